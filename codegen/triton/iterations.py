"""Device functions that expressions define, as text: with a loop that goes on while any element of a tile does, or of a
formula."""

from __future__ import annotations

import re
from functools import cache

from ...ir.expr.dtypes import DType
from ...ir.expr.intrinsics import INTRINSICS, definition
from ...ir.expr.iterations import ITERATIONS, iteration
from ...ir.expr.value import Call, Cast, Const, Expr, Select, Var, children
from ..kernel import EmitError
from .functions import call_text, intrinsic_name, iteration_name
from .types import Types, literal, type_text, typed_literal

# The name of a device function -> what it computes.
_NAMES = {iteration_name(fn, d): (fn, d) for fn in ITERATIONS for d in DType}
_INTRINSIC = re.compile(intrinsic_name(r"(\w+)", DType.BOOL).replace(DType.BOOL.value, "([a-z0-9]+)"))


def iteration_source(name: str, types: Types) -> str | None:
    """The device function of that name; None where it is none of these."""
    return _source(name, *_NAMES[name], types) if name in _NAMES else None


def intrinsic_source(name: str, types: Types) -> str | None:
    """The device function of that name for a function of a user's; None where it is none of these."""
    match = _INTRINSIC.fullmatch(name)
    if match is None:
        return None
    meaning = definition(INTRINSICS[match[1]], DType(match[2]))
    lets = "".join(f"    {v.name} = {_text(e, types)}\n" for v, e in meaning.lets)
    return f'''
@triton.jit
def {name}({", ".join(v.name for v in meaning.args)}):
    """{match[1]}, by its formula."""
{lets}    return {_text(meaning.result, types)}
'''


@cache
def _source(name: str, fn: str, dtype: DType, types: Types) -> str:
    loop = iteration(fn, dtype)
    args, state = [v.name for v in loop.args], [v.name for v in loop.state]
    start = [f"tl.broadcast_to({_text(e, types)}, {args[0]}.shape)" for e in loop.start]
    following = [f"tl.where(active, {_text(e, types)}, {v})" for v, e in zip(state, loop.step, strict=True)]
    everything = ", ".join([*args, *state])
    return f'''
@triton.jit
def mlc_more_{name}({everything}):
    """Which elements go on."""
    return {_text(loop.condition, types)}

@triton.jit
def {name}({", ".join(args)}):
    """{fn}, by iteration."""
    {", ".join(args)} = tl.broadcast({", ".join(args)})
    {", ".join(state)} = {", ".join(start)}
    while mlc_any(mlc_more_{name}({everything})):
        active = mlc_more_{name}({everything})
        {", ".join(state)} = {", ".join(following)}
    return {_text(loop.result, types)}
'''


def _text(expr: Expr, types: Types) -> str:
    """An expression of named values alone."""
    match expr:
        case Var():
            return expr.name
        case Const():
            return typed_literal(literal(expr.value), expr.dtype)
        case Cast():
            type_text(expr.dtype)
            return types.cast(_text(expr.value, types), expr.value.dtype, expr.dtype)
        case Select():
            return f"tl.where({', '.join(_text(e, types) for e in children(expr))})"
        case Call():
            return call_text(expr.fn, tuple(_text(a, types) for a in expr.args), expr.args[0].dtype, expr.dtype, types)
    raise EmitError(f"an iteration holds a {type(expr).__name__}")
