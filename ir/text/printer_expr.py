"""Script text of index expressions, value expressions, types and library arguments.

The text is Python syntax, and ``parser_expr`` reads it back to equal objects.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PowByNatural, PythonMod

from ..expr.dtypes import DType
from ..expr.ops import OPS, Result
from ..expr.symbols import PositivePart
from ..expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, children, is_value
from ..graph.graph import ArgumentRef, ConstantRef, OpRef, Ref, TensorType
from ..nest.loops import Buffer, Scope, contiguous_strides

# Functions of index expressions, by the name that stands in the text.
INDEX_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": FloorDiv, "CleanDiv": CleanDiv, "ModularIndexing": ModularIndexing, "Mod": Mod, "PythonMod": PythonMod,
    "Max": Max, "Min": Min, "PowByNatural": PowByNatural, "sympy_Max": sympy.Max, "sympy_Min": sympy.Min,
    "Add": sympy.Add, "Mul": sympy.Mul, "Pow": sympy.Pow, "PositivePart": PositivePart,
}  # fmt: skip
_FUNCTION_NAMES = {kind: name for name, kind in INDEX_FUNCTIONS.items()}
_SUM, _PRODUCT, _ATOM = range(3)
# Around the text of an object that is to be underlined; neither character can stand in a script.
MARK, UNMARK = "\x01", "\x02"
_MAX_NESTING = 24
# What is said of a library call by its name alone, after the reason.
LIBRARY_MARKS = frozenset({"rounded", "refused"})


def names(items: Iterable[str]) -> str:
    """The inside of a tuple: a lone item keeps its comma."""
    parts = list(items)
    return f"{parts[0]}," if len(parts) == 1 else ", ".join(parts)


def listing(items: Iterable[sympy.Expr]) -> str:
    return f"[{', '.join(index_text(e) for e in items)}]"


def is_name(text: str) -> bool:
    """Whether a script can use this as a name."""
    return text.isidentifier() and not keyword.iskeyword(text) and not is_let(text)


def is_let(text: str) -> bool:
    """Whether a name is one of the printer's own, by which it names parts of expressions."""
    return text[:2] == "_t" and text[2:].isdigit()


# --- index expressions ----------------------------------------------------------------------------------------------


def index_text(expr: sympy.Expr) -> str:
    """An index expression; ``a // b`` is FloorDiv and ``a % b`` ModularIndexing with divisor one."""
    return _index(sympy.sympify(expr))[0]


@lru_cache(maxsize=65536)
def _index(expr: sympy.Expr) -> tuple[str, int]:
    """Text, and how tightly its outermost operator binds."""
    if expr.is_Integer:
        return str(expr), _ATOM if expr >= 0 else _SUM
    if expr.is_Symbol:
        return (expr.name if is_name(expr.name) else f"symbol({expr.name!r})"), _ATOM
    kind = type(expr)
    if kind not in _FUNCTION_NAMES:
        return f"opaque({str(expr)!r})", _ATOM
    # Sympy objects made with evaluate=False would be evaluated when read back.
    if expr.func(*expr.args) != expr:
        return f"raw.{_call(expr)}", _ATOM
    if expr.is_Add:
        return _sum_text(expr), _SUM
    if expr.is_Mul:
        number, *rest = expr.args
        negative = bool(number.is_Integer and number < 0)
        factors = [str(number) if negative else _at(number, _ATOM), *(_at(a, _ATOM) for a in rest)]
        return ("-" + "*".join(factors[1:]) if number == -1 else "*".join(factors)), _SUM if negative else _PRODUCT
    if expr.is_Pow:
        return f"{_at(expr.args[0], _ATOM)}**{_at(expr.args[1], _ATOM)}", _PRODUCT
    if kind is FloorDiv:
        return f"{_at(expr.args[0], _ATOM)} // {_at(expr.args[1], _ATOM)}", _PRODUCT
    if kind is ModularIndexing and expr.args[1] == 1:
        return f"{_at(expr.args[0], _ATOM)} % {_at(expr.args[2], _ATOM)}", _PRODUCT
    return _call(expr), _ATOM


def _sum_text(expr: sympy.Expr) -> str:
    terms = sorted(expr.args, key=lambda a: bool(a.is_Integer))  # stable: a constant goes last
    text = _at(terms[0], _SUM)
    for term in terms[1:]:
        t = _at(term, _SUM)
        text += f" - {t[1:]}" if t.startswith("-") else f" + {t}"
    return text


def _at(expr: sympy.Expr, level: int) -> str:
    text, binds = _index(expr)
    return text if binds >= level else f"({text})"


def _call(expr: sympy.Expr) -> str:
    return f"{_FUNCTION_NAMES[type(expr)]}({', '.join(_index(a)[0] for a in expr.args)})"


# --- types ----------------------------------------------------------------------------------------------------------


def type_text(
    shape: tuple[sympy.Expr, ...], strides: tuple[sympy.Expr, ...], dtype: DType, **rest: str | int | None
) -> str:
    """``float32[s0, 128]``, or ``tensor(…)`` where strides or anything else is out of the ordinary."""
    extra = "".join(f", {k}={v!r}" for k, v in rest.items() if v is not None)
    if strides == contiguous_strides(shape):
        if not extra:
            return f"{dtype.value}[{', '.join(map(index_text, shape)) or '()'}]"
    else:
        extra = f", strides={listing(strides)}{extra}"
    return f"tensor({dtype.value}, {listing(shape)}{extra})"


def tensor_text(kind: TensorType | None, device: str) -> str:
    """A graph's type; ``device`` is the one that goes without saying."""
    if kind is None:
        return "None"
    return type_text(kind.shape, kind.strides, kind.dtype, device=kind.device if kind.device != device else None)


def buffer_text(buffer: Buffer, scope: Scope) -> str:
    """A nest's buffer; ``scope`` is the one that goes without saying."""
    return type_text(
        buffer.shape,
        buffer.strides,
        buffer.dtype,
        scope=buffer.scope.value if buffer.scope is not scope else None,
        align=buffer.align or None,
    )


def literal(value: Any) -> str:
    """A Python number or string, NaN and the infinities included."""
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f'float("{value}")'
    return repr(value)


def argument(arg: Any) -> str:
    """An argument of a library call."""
    match arg:
        case Ref():
            return f"ref({arg.name!r})"
        case ConstantRef():
            return f"constant({arg.name!r})"
        case ArgumentRef():
            return f"argument({arg.name!r})"
        case OpRef():
            return f"op({arg.name!r})"
        case tuple():
            return f"({names(map(argument, arg))})"
        case list():
            return f"[{', '.join(map(argument, arg))}]"
        case dict():
            return f"{{{', '.join(f'{argument(k)}: {argument(v)}' for k, v in arg.items())}}}"
        case slice():
            return f"slice({argument(arg.start)}, {argument(arg.stop)}, {argument(arg.step)})"
        case sympy.Expr():
            return f"size({index_text(arg)})"
        case torch.device():
            return f'torch.device("{arg}")'
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(arg)
        case complex():
            return f"complex({literal(arg.real)}, {literal(arg.imag)})"
        case None | bool() | int() | float() | str():
            return literal(arg)
        case DType():
            return arg.value
    return f"opaque({str(arg)!r})"


# --- value expressions ----------------------------------------------------------------------------------------------


class ExprText:
    """Value expressions as text. ``lets`` collects definitions of parts that occur twice or nest too deep.

    ``dtypes`` are the element types that loads have when nothing is said; None says nothing of any.
    """

    def __init__(self, dtypes: Mapping[str, DType] | None, culprit: object = None) -> None:
        self.dtypes = dtypes
        self.culprit = culprit
        self.lets: list[str] = []
        self._named: dict[int, str] = {}
        self._count = 0

    def text(self, expr: Expr) -> str:
        """The text of one expression; take ``lets`` and write them above it."""
        for part in self._to_name(expr):
            name = f"_t{self._count}"
            self._count += 1
            self.lets.append(f"{name} = {self._text(part)}")
            self._named[id(part)] = name
        return self._text(expr)

    def take_lets(self) -> list[str]:
        """The definitions since the last call."""
        taken, self.lets = self.lets, []
        self._named.clear()
        return taken

    def marked(self, thing: object, text: str) -> str:
        return f"{MARK}{text}{UNMARK}" if thing is self.culprit and thing is not None else text

    def indices(self, items: tuple[Index, ...]) -> str:
        parts = [self._text(i) if is_value(i) else self.marked(i, index_text(i)) for i in items]
        return ", ".join(parts) or "()"

    def _to_name(self, root: Expr) -> list[Expr]:
        """Compound parts that are shared or too deep to nest, innermost first."""
        uses: dict[int, int] = {}
        order: list[Expr] = []
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            e, done = stack.pop()
            if done:
                order.append(e)
                continue
            uses[id(e)] = uses.get(id(e), 0) + 1
            if uses[id(e)] == 1:
                stack.append((e, True))
                stack.extend((p, False) for p in reversed(children(e)))
        depth: dict[int, int] = {}
        chosen: list[Expr] = []
        for e in order:
            height = 1 + max((depth[id(p)] for p in children(e)), default=0)
            shared = uses[id(e)] > 1 and isinstance(e, (Call, Select))
            if id(e) in self._named:
                height = 0
            elif e is not root and (shared or height > _MAX_NESTING):
                chosen.append(e)
                height = 0
            depth[id(e)] = height
        return chosen

    def _text(self, e: Expr) -> str:
        if id(e) in self._named:
            return self.marked(e, self._named[id(e)])
        return self.marked(e, self._plain(e))

    def _plain(self, e: Expr) -> str:
        match e:
            case Load():
                name = e.buffer if is_name(e.buffer) else f"buffer({e.buffer!r})"
                text = f"{name}[{self.indices(e.indices)}]"
                known = self.dtypes is None or self.dtypes.get(e.buffer) is e.dtype
                return text if known else f"load({text}, {e.dtype.value})"
            case Const():
                return f"{e.dtype.value}({literal(e.value)})"
            case Var():
                return f"var({e.name!r}, {e.dtype.value})"
            case IndexValue():
                return f"index({self.marked(e.index, index_text(e.index))}, {e.dtype.value})"
            case Cast():
                return f"{'stored' if e.when_stored else 'cast'}({self._text(e.value)}, {e.dtype.value})"
            case Call():
                args = [self._text(a) for a in e.args]
                if result_type(e.fn, e.args) is not e.dtype:
                    args.append(f"dtype={e.dtype.value}")
                return f"{e.fn}({', '.join(args)})"
            case Select():
                return f"select({', '.join(self._text(x) for x in (e.condition, e.if_true, e.if_false))})"


def result_type(fn: str, args: tuple[Expr, ...]) -> DType | None:
    """The element type that a call has when nothing is said; None where it must be said."""
    info = OPS.get(fn)
    if info is None or info.result is Result.EXPLICIT or not args:
        return None
    return DType.BOOL if info.result is Result.BOOL else args[0].dtype
