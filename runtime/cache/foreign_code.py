"""Code of others among ours: functions that somebody put into our modules, classes and tables, as text for cache keys.

A key holds the text of our own sources, and so tells nothing of what a process has put in the place of a function: a
converter of the user's, a pass or a rule that is patched. What does not come from this package or a library is found by
the name of its module, and described by what it does: bytecode, constants, defaults, what it has closed over, and the
same of the functions that it calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import sympy
import torch
from torch._decomp import global_decomposition_table
from torch._library.custom_ops import CustomOpDef

from ...ir.registration import Registration

PACKAGE = __name__.split(".")[0]
# Whose code a key tells by its version; stand-ins of unittest.mock are anybody's.
_LIBRARIES = frozenset(
    (PACKAGE, "torch", "sympy", "mpmath", "numpy", "ml_dtypes", "llvmlite", "triton", "filelock", "fsspec",
     "platformdirs", "networkx", "click", "rich", "typing_extensions", "namedtuple_OptionSpec",
     *sys.stdlib_module_names)
) - {"unittest", "__main__"}  # fmt: skip
_BEGINS = f"{PACKAGE}."
# What checks backends has no part in compiling, and is made of pytest's classes.
_ASIDE = f"{PACKAGE}.dynamo_backend.conformance"
_CONTAINERS = frozenset((dict, list, tuple, set, frozenset))
_WRAPPED = frozenset((staticmethod, classmethod, property))
_PLAIN = (int, float, complex, str, bytes, type(None), type(...))
_SKIPPED = frozenset((*_PLAIN, bool, ModuleType))
# What Python keeps of modules and classes.
_UNREAD = frozenset(
    ("__annotations__", "__builtins__", "__dataclass_fields__", "__match_args__", "__slots__", "__path__", "__all__",
     "_member_map_", "_value2member_map_", "_member_names_")
)  # fmt: skip
# What is described by its text.
_TOLD = (torch.dtype, torch.device, torch.layout, torch.memory_format, sympy.Basic)


class UnknownCode(Exception):
    """What an object does cannot be told; the text says which."""


@dataclass(frozen=True, slots=True)
class ForeignCode:
    """``text`` tells code of others from any other, "" where there is none; ``unknown`` says of what it cannot be told,
    so that nothing may be cached. ``state`` is another one where anything in this package is another."""

    text: str = ""
    unknown: str = ""
    state: int = 0


def foreign_code() -> ForeignCode:
    """The code of others that is in this package now. What has not changed since the last call is not looked at
    again, which takes about a millisecond."""
    return _search().now()


@cache
def _search() -> _CodeSearch:
    return _CodeSearch()


class _CodeSearch:
    def __init__(self) -> None:
        self._state = 0
        self._modules: list[str] = []
        # What gives the values of everything that can change, and what it gave.
        self._seen: list[tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]] = []
        self._found: list[tuple[str, Any]] = []

    def now(self) -> ForeignCode:
        if _ours() != self._modules or not all(map(_is_as_it_was, self._seen)):
            self._look()
        # Even where no place has changed, what a function closes over may have.
        lines = []
        for where, value in self._found:
            try:
                lines.append(f"{where}: {described(value)}")
            except UnknownCode as error:
                return ForeignCode(unknown=f"{where} is {error}", state=self._state)
        return ForeignCode("\n".join(sorted(lines)), state=self._state)

    def _look(self) -> None:
        self._state += 1
        self._modules, self._seen, self._found = _ours(), [], []
        visited: set[int] = set()
        for name in self._modules:
            self._inside(name, vars(sys.modules[name]), visited)
        for name, table in global_decomposition_table.items():
            self._inside(f"torch's decompositions ({name})", table, visited)

    def _inside(self, where: str, holder: Any, visited: set[int]) -> None:
        """Look at the values of a module, a class, a container, or an object of ours that holds functions."""
        if id(holder) in visited:
            return
        visited.add(id(holder))
        names: Iterable[Any]
        values: Callable[[], Iterable[Any]]
        match holder:
            case type():
                values, names = vars(holder).values, vars(holder)
            case dict():
                values, names = partial(_entries_of, holder), holder
            case tuple() | list() | set() | frozenset():
                values, names = holder.__iter__, range(len(holder))
            case _:
                names = [f.name for f in fields(holder)]
                values = partial(_fields_of, holder)
        held = tuple(values())
        if not isinstance(holder, (tuple, frozenset)):
            self._seen.append((values, held))
        if isinstance(holder, dict):  # a value under another name is another entry
            names, held = held[: len(held) // 2], held[len(held) // 2 :]
        for name, value in zip(list(names), held, strict=True):
            kind = type(value)
            if kind in _SKIPPED or (kind in _CONTAINERS and name in _UNREAD):
                continue
            if kind in _WRAPPED:
                value = value.fget if kind is property else value.__func__
                kind = type(value)
            if kind in _CONTAINERS:
                self._inside(f"{where}.{name}", value, visited)
            elif isinstance(value, type):
                if not _is_own(value):
                    self._found.append((f"{where}.{name}", value))
                elif value.__module__ == where:
                    self._inside(where, value, visited)
            elif kind is FunctionType:
                if not _is_library(value.__module__ or ""):
                    self._found.append((f"{where}.{name}", value))
            elif kind is partial:
                if not _is_partial_of_ours(value):
                    self._found.append((f"{where}.{name}", value))
            elif _is_ours(kind):  # type: ignore[arg-type]
                if hasattr(kind, "__dataclass_fields__"):
                    self._inside(f"{where}.{name}", value, visited)
            elif callable(value) and not _is_own(value):
                self._found.append((f"{where}.{name}", value))


def _ours() -> list[str]:
    loaded = sorted(name for name in list(sys.modules) if name.startswith(_BEGINS) or name == PACKAGE)
    return [module for module in loaded if not module.startswith(_ASIDE)]


def _entries_of(table: dict[Any, Any]) -> tuple[Any, ...]:
    """Keys, then values."""
    return (*table, *table.values())


def _fields_of(value: Any) -> list[Any]:
    return [getattr(value, f.name, None) for f in fields(value)]


def _is_as_it_was(seen: tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]) -> bool:
    now = tuple(seen[0]())
    return len(now) == len(seen[1]) and all(map(is_, now, seen[1]))


@cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


@cache
def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith(_BEGINS)


def _is_own(value: Any) -> bool:
    """Whether this package or a library defines a function or a class, or an object of such a class."""
    module = getattr(value, "__module__", None)
    if not _is_library(str(type(value).__module__)):
        return False
    return not isinstance(module, str) or _is_library(module)


def _is_partial_of_ours(value: Any) -> bool:
    if not isinstance(value, partial):
        return False
    parts = (value.func, *value.args, *value.keywords.values())
    return all(_is_partial_of_ours(p) or _is_own(p) for p in parts if callable(p))


def described(value: Any) -> str:
    """What a value is and does, the same in any process. Raises UnknownCode where that cannot be told."""
    return "".join(_text(value, {}))


def _text(value: Any, known: dict[int, int]) -> Iterator[str]:
    """``known`` numbers what is being described already, for functions that call one another."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in known:
        yield f"#{known[id(value)]}"
        return
    known[id(value)] = len(known)
    tell = partial(_text, known=known)
    match value:
        case CodeType():
            yield f"code {value.co_name} {value.co_code.hex()} {value.co_names} {value.co_varnames} {value.co_freevars}"
            yield from _row(value.co_consts, tell)
        case ModuleType():
            yield f"module {value.__name__}"
        case partial():
            yield "partial "
            yield from _row((value.func, value.args, value.keywords), tell)
        case MethodType():
            yield "method "
            yield from _row((value.__func__, value.__self__), tell)
        case BuiltinFunctionType():
            yield f"built-in {value.__module__}.{value.__qualname__}"
        case FunctionType() if not _is_own(value):
            yield f"function {value.__module__}.{value.__qualname__} "
            cells = [_content(cell) for cell in value.__closure__ or ()]
            names = _global_names(value.__code__)
            used = {n: value.__globals__[n] for n in names if n in value.__globals__}
            yield from _row((value.__code__, value.__defaults__, value.__kwdefaults__, cells, used), tell)
        case type() if not _is_own(value):
            yield f"class {value.__module__}.{value.__qualname__} {value.__mro__[1:]} "
            skipped = ("__dict__", "__weakref__", "__doc__", "__annotations__", "__firstlineno__")
            yield from _row({n: v for n, v in vars(value).items() if n not in skipped}, tell)
        case staticmethod() | classmethod():
            yield f"{type(value).__name__} "
            yield from tell(value.__func__)
        case property():
            yield from _row((value.fget, value.fset, value.fdel), tell)
        case dict() | Mapping() | list() | tuple() | set() | frozenset():
            yield f"{type(value).__name__} "
            yield from _row(value, tell)
        case _ if isinstance(value, _TOLD):
            yield f"{type(value).__qualname__} {value}"
        case _ if isinstance(getattr(value, "__qualname__", None), str) and _is_own(value):
            yield f"{getattr(value, '__module__', type(value).__name__)}.{value.__qualname__}"
        case _ if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            yield str(value)
        case CustomOpDef():
            yield f"op {value._opoverload} "
            yield from _row((value._init_fn, value._abstract_fn, value._setup_context_fn, value._backward_fn), tell)
        case Registration():
            yield f"{value.kind} {value.name} "
            yield from tell(value.value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            yield f"{type(value).__module__}.{type(value).__qualname__} "
            yield from _row({f.name: getattr(value, f.name, None) for f in fields(value)}, tell)
            if not _is_own(type(value)):
                yield from tell(type(value))
        case _:
            raise UnknownCode(
                f"made of a {type(value).__module__}.{type(value).__qualname__}, and what that does is not known"
            )


def _row(values: Any, tell: Callable[[Any], Iterator[str]]) -> Iterator[str]:
    if isinstance(values, Mapping):
        values = [part for item in values.items() for part in item]
    elif isinstance(values, (set, frozenset)):
        values = sorted(values, key=repr)
    yield "("
    for value in values:
        yield from tell(value)
        yield ","
    yield ")"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not given a value yet
        return None


def _global_names(code: CodeType) -> list[str]:
    """The names that a function and those inside of it look up, in order."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_global_names(constant))
    return list(names)
