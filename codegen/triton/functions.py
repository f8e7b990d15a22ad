"""The table of scalar functions as Triton expressions.

Accuracy is torch's: libdevice's functions rather than the fast approximations of ``tl.math``, divisions and square
roots rounded to nearest. What may be approximate has a name of its own in the table (``approximations.py``). Half
types are computed in float32 and rounded after each call.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ir.expr.dtypes import DType
from ...ir.expr.intrinsics import INTRINSICS, ScalarFunction
from ...ir.expr.iterations import ITERATIONS
from ...ir.expr.ops import APPROXIMATIONS, DRAWN_TOGETHER, OPS
from ..kernel import EmitError
from .types import Types, type_text, typed_literal

# Texts of the arguments and their type, to text.
Handler = Callable[[tuple[str, ...], DType], str]


def _names(text: str) -> list[str]:
    return text.split()


def call_text(fn: str, args: tuple[str, ...], dtype: DType, result: DType, types: Types) -> str:
    """The call of an IR function on arguments of ``dtype``. Raises EmitError where that type has no such function."""
    if fn == "bitcast":
        return f"{args[0]}.to({types.text(result)}, bitcast=True)"
    if fn in _FLOAT_ONLY and not dtype.is_float:
        raise EmitError(f"{fn} of {dtype.value}: cast to a float type first")
    handler = FUNCTIONS.get(fn) or _intrinsic(INTRINSICS[fn])
    if dtype.is_half:
        text = handler(tuple(types.wide(a, dtype) for a in args), DType.FLOAT32)
        return types.cast(f"({text})", DType.FLOAT32, result) if result is dtype else text
    return handler(args, dtype)


def iteration_name(fn: str, dtype: DType) -> str:
    """The device function for arguments of a type."""
    return f"mlc_{fn}_{dtype.value}"


def intrinsic_name(fn: str, dtype: DType) -> str:
    """The device function of a user's function for arguments of a type."""
    return f"mlc_defined_{fn}_{dtype.value}"


def takes_literals(fn: str) -> bool:
    """Whether a literal may stand bare among the arguments: it then takes the type of the other argument."""
    return fn in _PLAIN


def _infix(op: str) -> Handler:
    return lambda a, d: f"({a[0]} {op} {a[1]})"


def _libdevice(name: str) -> Handler:
    return lambda a, d: f"libdevice.{name}({', '.join(a)})"


def _by_kind(of_float: Handler, of_int: Handler) -> Handler:
    return lambda a, d: of_float(a, d) if d.is_float else of_int(a, d)


def _named(name: str) -> Handler:
    return lambda a, d: f"{name}({', '.join(a)})"


def _iterated(fn: str) -> Handler:
    return lambda a, d: f"{iteration_name(fn, d)}({', '.join(a)})"


def _intrinsic(intrinsic: ScalarFunction) -> Handler:
    """A function of a user's: by the text that it gives, or by a device function of its formula."""
    match intrinsic.triton:
        case None:
            return lambda a, d: f"{intrinsic_name(intrinsic.name, d)}({', '.join(a)})"
        case str() as text:
            return lambda a, d: f"({text.format(*a)})"
        case write:
            return lambda a, d: f"({write(*a)})"


def _extreme(name: str, nan: str, of_bool: str) -> Handler:
    def make(a: tuple[str, ...], d: DType) -> str:
        if d is DType.BOOL:
            return f"({a[0]} {of_bool} {a[1]})"
        how = f", propagate_nan=tl.PropagateNan.{nan}" if d.is_float else ""
        return f"tl.{name}({a[0]}, {a[1]}{how})"

    return make


def _logical(op: str) -> Handler:
    def make(a: tuple[str, ...], d: DType) -> str:
        x, y = a if d is DType.BOOL else (f"({a[0]} != 0)", f"({a[1]} != 0)")
        return f"({x} {op} {y})"

    return make


def _div(a: tuple[str, ...], d: DType) -> str:
    return f"tl.div_rn({a[0]}, {a[1]})" if d is DType.FLOAT32 else f"({a[0]} / {a[1]})"


def _reciprocal(a: tuple[str, ...], d: DType) -> str:
    return _div((typed_literal("1.0", d), a[0]), d)


def _sigmoid(a: tuple[str, ...], d: DType) -> str:
    return f"(1.0 / (1.0 + libdevice.exp(-{a[0]})))"


def _rounding(name: str) -> Handler:
    return lambda a, d: f"libdevice.{name}({a[0]})" if d.is_float else a[0]


def _shift_left(a: tuple[str, ...], d: DType) -> str:
    return f"tl.where(({a[1]} >= 0) & ({a[1]} < {d.bits}), {a[0]} << {a[1]}, 0)"


def _shift_right(a: tuple[str, ...], d: DType) -> str:
    if not d.is_signed:
        return f"tl.where({a[1]} < {d.bits}, {a[0]} >> {a[1]}, 0)"
    return f"({a[0]} >> tl.where(({a[1]} >= 0) & ({a[1]} < {d.bits}), {a[1]}, {d.bits - 1}))"


def _remainder(a: tuple[str, ...], d: DType) -> str:
    if d.is_float:
        return f"mlc_remainder_float({a[0]}, {a[1]})"
    return f"mlc_remainder({a[0]}, {a[1]})" if d.is_signed else f"({a[0]} % {a[1]})"


def _floordiv(a: tuple[str, ...], d: DType) -> str:
    if d.is_float:
        return f"mlc_floordiv_float({a[0]}, {a[1]})"
    return f"mlc_floordiv({a[0]}, {a[1]})" if d.is_signed else f"({a[0]} // {a[1]})"


def _truncdiv(a: tuple[str, ...], d: DType) -> str:
    return f"libdevice.trunc({_div(a, d)})" if d.is_float else f"({a[0]} // {a[1]})"


def _approximate(fn: str) -> Handler:
    """By a device function of float32, which has texts for several targets; other types have the exact one."""
    return lambda a, d: (_named(f"mlc_{fn}") if d is DType.FLOAT32 else FUNCTIONS[APPROXIMATIONS[fn].of])(a, d)


FUNCTIONS: dict[str, Handler] = {
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    "maximum": _extreme("maximum", "ALL", "|"),
    "minimum": _extreme("minimum", "ALL", "&"),
    "fmax": _extreme("maximum", "NONE", "|"),
    "fmin": _extreme("minimum", "NONE", "&"),
    "div": _div,
    "floordiv": _floordiv,
    "remainder": _remainder,
    "truncdiv": _truncdiv,
    "fmod": _by_kind(_libdevice("fmod"), _infix("%")),
    "pow": _by_kind(_libdevice("pow"), _named("mlc_pow")),
    **{name: _libdevice(name) for name in ("atan2", "hypot", "nextafter", "copysign")},
    "fma": _by_kind(_named("tl.fma"), lambda a, d: f"({a[0]} * {a[1]} + {a[2]})"),
    # Triton 3.6 subtracts from zero where it is asked to negate, which of zero gives zero.
    "neg": _by_kind(lambda a, d: f"({a[0]} * -1.0)", lambda a, d: f"(0 - {a[0]})"),
    "abs": _named("tl.abs"),
    "sign": lambda a, d: f"(({a[0]} > 0).to({type_text(d)}) - ({a[0]} < 0).to({type_text(d)}))",
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "trunc": _rounding("trunc"),
    "round": _rounding("nearbyint"),
    "sqrt": lambda a, d: f"tl.sqrt_rn({a[0]})" if d is DType.FLOAT32 else f"tl.sqrt({a[0]})",
    "rsqrt": _libdevice("rsqrt"),
    "reciprocal": _reciprocal,
    "sigmoid": _sigmoid,
    **{name: _libdevice(name) for name in _names("exp exp2 expm1 log log2 log10 log1p tanh")},
    **{name: _libdevice(name) for name in _names("sin cos tan asin acos atan sinh cosh asinh acosh atanh")},
    **{name: _libdevice(name) for name in _names("erf erfc erfinv lgamma")},
    "digamma": _named("mlc_digamma"),
    **{fn: _approximate(fn) for fn in APPROXIMATIONS},
    **dict(zip(_names("eq ne lt le gt ge"), map(_infix, _names("== != < <= > >=")), strict=True)),
    **{fn: _iterated(fn) for fn in ITERATIONS},
    "isnan": _by_kind(lambda a, d: f"({a[0]} != {a[0]})", lambda a, d: f"({a[0]} != {a[0]})"),
    "isinf": _by_kind(lambda a, d: f'(tl.abs({a[0]}) == float("inf"))', lambda a, d: f"({a[0]} != {a[0]})"),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "logical_not": lambda a, d: f"({a[0]} == 0)",
    "bit_and": _infix("&"),
    "bit_or": _infix("|"),
    "bit_xor": _infix("^"),
    "bit_not": lambda a, d: f"({a[0]} == 0)" if d is DType.BOOL else f"(~{a[0]})",
    "shl": _shift_left,
    "shr": _shift_right,
    "check_bounds": lambda a, d: a[0],  # a GPU itself faults on memory that is nobody's
    "check_divisor": lambda a, d: a[0],
    "bitcast": lambda a, d: a[0],  # needs the result's type; see call_text
    "rand": _named("mlc_rand"),
    "randn": _named("mlc_randn"),
    "randbits": _named("mlc_randbits"),
}

_PLAIN = frozenset(_names("add sub mul maximum minimum fmax fmin eq ne lt le gt ge bit_and bit_or bit_xor"))
_FLOAT_ONLY = frozenset({n for n, o in OPS.items() if o.flops >= 4 and o.arity == 1} - {*DRAWN_TOGETHER, "lgamma"}) | {
    "div",
    "atan2",
    "hypot",
    "nextafter",
    "copysign",
    "lgamma",
    *APPROXIMATIONS,
}
