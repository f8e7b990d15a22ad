"""How an op of ATen's is called through torch's C interface (``aoti_torch_cpu_…``, ``aoti_torch_cuda_…``): its
arguments as C passes them.

The interface is made from the ops' schemas by torchgen (``gen_aoti_c_shim.py``): a tensor is a handle, an optional one
a pointer to a handle, a list a pointer and a length, results are handles behind pointers at the end. An op is called
so only where the prototype that this torch declares is the one that its schema leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy

from ....ir.graph.effects import resolve_op
from ....ir.graph.graph import Library, Ref

HANDLE = "AtenTensorHandle"
Value: TypeAlias = "sympy.Expr | float"


@dataclass(frozen=True, slots=True)
class Shims:
    """torch's C interface in this process: the C types of each function's parameters, and its numbers for element types
    (by torch's names) and for ``devices`` (by their types). ``prefixes`` are how the names of a device's ops begin."""

    prototypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=lambda: {"cpu": 0})
    prefixes: Mapping[str, str] = field(default_factory=lambda: {"cpu": "aoti_torch_cpu_"})


@dataclass(frozen=True, slots=True)
class Word:
    """An argument that is passed by value, or where ``behind``, as a pointer to it. ``kind`` is "i64", "i32" or
    "double"."""

    kind: str
    value: Value
    behind: bool = False


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor; where ``behind``, a pointer to its handle."""

    name: str
    behind: bool = False


@dataclass(frozen=True, slots=True)
class Null:
    """What is not given; ``length`` where a length follows."""

    length: bool = False


@dataclass(frozen=True, slots=True)
class Array:
    """A pointer to numbers or handles and their number; with ``behind`` a pointer to that pointer."""

    kind: str
    values: tuple[Any, ...]
    behind: bool = False


Argument: TypeAlias = Word | Handle | Null | Array


@dataclass(frozen=True, slots=True)
class ShimCall:
    """A function of the interface and its arguments. With ``out`` the result's memory is the first argument, made
    before; otherwise as many handles come back behind pointers as the op has results."""

    function: str
    arguments: tuple[Argument, ...]
    out: bool


def shim_call(node: Library, shims: Shims) -> ShimCall | None:
    """The call of an op, or None where Python has to call it."""
    namespace, _, rest = node.target.partition("::")
    name, _, overload = rest.partition(".")
    kinds = {t.device.partition(":")[0] if t is not None else "" for t in node.types}
    prefix = shims.prefixes.get(kinds.pop()) if len(kinds) == 1 else None
    if namespace != "aten" or prefix is None:
        return None
    schema = resolve_op(node.target)._schema
    if len(schema.returns) != len(node.types) or any(str(r.type) != "Tensor" or r.alias_info for r in schema.returns):
        return None
    suffix = "" if overload == "default" else f"_{overload}"
    functional, into = f"{prefix}{name}{suffix}", f"{prefix}{name}{suffix}_out"
    function = next((f for f in (functional, into) if f in shims.prototypes), None)
    if function is None or (function == into and len(node.types) != 1):
        return None
    # Numbers of any type are passed as doubles, which ops on integers refuse.
    floats = all(t is not None and t.dtype.is_float for t in node.types)
    given = _arguments(schema, node, floats)
    if given is None:
        return None
    out = function == into
    types = [t for _, kinds in given for t in kinds]
    expected = [HANDLE, *types] if out else [*types, *[f"{HANDLE}*"] * len(node.types)]
    if tuple(expected) != shims.prototypes[function]:
        return None
    return ShimCall(function, tuple(a for a, _ in given), out)


# An argument, and the C types of the parameters that it fills.
_Typed: TypeAlias = "tuple[Argument, tuple[str, ...]]"


def _arguments(schema: Any, node: Library, floats: bool) -> list[_Typed] | None:
    named = dict(node.kwargs)
    found: list[_Typed] = []
    for k, parameter in enumerate(schema.arguments):
        if parameter.alias_info is not None:
            return None
        if k < len(node.args) and not parameter.kwarg_only:
            value = node.args[k]
        elif parameter.name in named:
            value = named.pop(parameter.name)
        elif parameter.has_default_value():
            value = parameter.default_value
        else:
            return None
        one = _argument(str(parameter.type), value, floats)
        if one is None:
            return None
        found.append(one)
    return None if named else found


def _argument(kind: str, value: Any, floats: bool) -> _Typed | None:
    """An argument by the type of its parameter in the schema."""
    if kind.startswith("Optional["):
        inner = kind.removeprefix("Optional[").removesuffix("]")
        is_list = inner.startswith("List[")
        if value is None:
            types = _C_TYPES.get(inner)
            return None if types is None else (Null(is_list), (f"{types[0]}*", *types[1:]))
        known = _argument(inner, value, floats)
        if known is None or isinstance(known[0], Null):
            return None
        return replace(known[0], behind=True), (f"{known[1][0]}*", *known[1][1:])
    types = _C_TYPES.get(kind)
    if types is None:
        return None
    match kind, value:
        case "Tensor", Ref(name):
            return Handle(name), types
        case ("List[Tensor]", tuple() | list()) if all(isinstance(v, Ref) for v in value):
            return Array("ptr", tuple(v.name for v in value)), types
        case ("List[int]", tuple() | list()):
            sizes = [_size(v) for v in value]
            return None if None in sizes else (Array("i64", tuple(sizes)), types)
        case ("List[bool]", tuple() | list()) if all(isinstance(v, bool) for v in value):
            return Array("i32", tuple(sympy.Integer(v) for v in value)), types
        case "int", _:
            size = _size(value)
            return None if size is None else (Word("i64", size), types)
        case "bool", bool():
            return Word("i32", sympy.Integer(value)), types
        case ("float", int() | float()):
            return Word("double", float(value)), types
        case ("number", int() | float()) if floats and not isinstance(value, bool):
            return Word("double", float(value)), types
    return None


# The C types of the parameters for each type of a schema.
_C_TYPES: Mapping[str, tuple[str, ...]] = {
    "Tensor": (HANDLE,),
    "List[Tensor]": (f"const {HANDLE}*", "int64_t"),
    "List[int]": ("const int64_t*", "int64_t"),
    "List[bool]": ("const int32_t*", "int64_t"),
    "int": ("int64_t",),
    "bool": ("int32_t",),
    "float": ("double",),
    "number": ("double",),
}


def _size(value: Any) -> sympy.Expr | None:
    if isinstance(value, bool) or not isinstance(value, (int, sympy.Expr)):
        return None
    found = sympy.sympify(value)
    return found if found.is_integer else None
