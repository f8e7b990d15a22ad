"""Attention as tensor functions: what plain PyTorch code of attention variants becomes before any loop is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import ATTENTION, SUM
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer, contiguous_strides
from torch_mlc.runtime.compile.fallback import random_words

F32, I64 = DType.FLOAT32, DType.INT64
MINUS_INFINITY = const(float("-inf"), F32)
Extent = int | sympy.Expr


@dataclass(frozen=True)
class Variant:
    """``edit(score, b, h, m, n)`` is the score's value and ``reference`` the same on tensors [b, h, m, n]; ``extra``
    gives the further inputs' shapes by name, in (B, H, M, N). ``weight`` multiplies probabilities, as ``weighed`` does
    those of tensors."""

    name: str
    edit: Callable[..., Expr] = lambda s, b, h, m, n: s
    reference: Callable[..., Tensor] = lambda s: s
    extra: dict[str, str] = field(default_factory=dict)
    integers: tuple[str, ...] = ()
    weight: Callable[..., Expr] | None = None
    weighed: Callable[..., Tensor] = lambda p, *extra: p


def _index(e: sympy.Expr) -> Expr:
    return IndexValue(e, I64)


def _positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])[None, :]


def _where(condition: Expr, s: Expr) -> Expr:
    return Select(condition, s, MINUS_INFINITY)


def _softcap(s: Expr, *_: sympy.Symbol) -> Expr:
    return call("mul", call("tanh", call("mul", s, const(0.05, F32))), const(20.0, F32))


def _causal(m: sympy.Symbol, n: sympy.Symbol) -> Expr:
    return call("le", _index(n), _index(m))


def _window(width: int) -> Callable[..., Expr]:
    def edit(s: Expr, b: sympy.Symbol, h: sympy.Symbol, m: sympy.Symbol, n: sympy.Symbol) -> Expr:
        near = call("lt", _index(m - n), const(width, I64))
        return _where(call("logical_and", _causal(m, n), near), s)

    return edit


def _alibi(s: Expr, b: sympy.Symbol, h: sympy.Symbol, m: sympy.Symbol, n: sympy.Symbol) -> Expr:
    slope = call("mul", Load("slopes", (h,), F32), const(0.01, F32))
    return call("add", s, call("mul", slope, cast(_index(n - m), F32)))


def _documents(s: Expr, b: sympy.Symbol, h: sympy.Symbol, m: sympy.Symbol, n: sympy.Symbol) -> Expr:
    return _where(call("eq", Load("documents", (m,), I64), Load("documents", (n,), I64)), s)


def _bias(s: Expr, b: sympy.Symbol, h: sympy.Symbol, m: sympy.Symbol, n: sympy.Symbol) -> Expr:
    return call("add", s, Load("bias", (h, m, n), F32))


def window(width: int) -> Variant:
    def reference(s: Tensor) -> Tensor:
        m, n = _positions(s)
        return s.masked_fill(~((n <= m) & (m - n < width)), float("-inf"))

    return Variant(f"window{width}", _window(width), reference)


def _place(m: sympy.Symbol, n: sympy.Symbol, columns: sympy.Expr) -> Expr:
    return _index(m * columns + n)


def _dropped(h: sympy.Symbol, m: sympy.Symbol, n: sympy.Symbol, columns: sympy.Expr) -> Expr:
    number = call("rand", Load("seeds", (h,), I64), _place(m, n, columns), dtype=F32)
    return Select(call("lt", number, const(0.75, F32)), const(1 / 0.75, F32), const(0.0, F32))


def _dropped_reference(p: Tensor, seeds: Tensor) -> Tensor:
    places = torch.arange(p.shape[-2] * p.shape[-1]).view(p.shape[-2:])
    numbers = (random_words(seeds[:, None, None], places) >> 8) * 2.0**-24
    return torch.where(numbers < 0.75, p / 0.75, 0.0)


def _causal_reference(s: Tensor) -> Tensor:
    m, n = _positions(s)
    return s.masked_fill(n > m, float("-inf"))


PLAIN = Variant("plain")
SOFTCAP = Variant("softcap", _softcap, lambda s: torch.tanh(s * 0.05) * 20.0)
CAUSAL = Variant("causal", lambda s, b, h, m, n: _where(_causal(m, n), s), _causal_reference)
ALIBI = Variant(
    "alibi", _alibi,
    lambda s, slopes: s + 0.01 * slopes[:, None, None] * (_positions(s)[1] - _positions(s)[0]), {"slopes": "H"},
)  # fmt: skip
DOCUMENTS = Variant(
    "documents", _documents,
    lambda s, d: s.masked_fill(d[: s.shape[-2], None] != d[None, : s.shape[-1]], float("-inf")),
    {"documents": "N"}, ("documents",),
)  # fmt: skip
BIAS = Variant("bias", _bias, lambda s, bias: s + bias, {"bias": "HMN"})
DROPOUT = Variant(
    "dropout", extra={"seeds": "H"}, integers=("seeds",), weight=_dropped, weighed=_dropped_reference,
    reference=lambda s, seeds: s,
)  # fmt: skip
WEIGHTS = Variant(
    "weights", extra={"kept": "HMN"}, weight=lambda h, m, n, _: Load("kept", (h, m, n), F32),
    weighed=lambda p, kept: p * kept, reference=lambda s, kept: s,
)  # fmt: skip
VARIANTS = (PLAIN, SOFTCAP, CAUSAL, ALIBI, DOCUMENTS, BIAS, window(5), DROPOUT, WEIGHTS)


@dataclass(frozen=True)
class Sizes:
    """Extents; ``groups`` query heads share one of keys and values. ``rows_first`` lays tensors out as [b, m, h, d]."""

    b: Extent = 1
    h: int = 2
    m: Extent = 5
    n: Extent = 7
    e: int = 4
    d: int = 3
    groups: int = 1
    dtype: DType = F32
    rows_first: bool = False


def attention(variant: Variant, sizes: Sizes, hints: dict[str, int] | None = None) -> TensorFunction:
    """softmax(edit(q @ k^T / sqrt(e))) @ v; rows that are all minus infinity become NaN, as torch has it."""
    b, h, m, n, d, e = map(symbol, ("i0", "i1", "i2", "r0", "x0", "x1"))
    extent = {k: sympy.sympify(getattr(sizes, k)) for k in "bhmned"}
    by_letter = {"B": extent["b"], "H": extent["h"], "M": extent["m"], "N": extent["n"]}
    heads = extent["h"] / sizes.groups
    head = h if sizes.groups == 1 else FloorDiv(h, sympy.Integer(sizes.groups))

    def tensor(name: str, count: sympy.Expr, length: sympy.Expr, width: sympy.Expr) -> Buffer:
        shape = (extent["b"], count, length, width)
        if not sizes.rows_first:
            return Buffer(name, shape, contiguous_strides(shape), sizes.dtype)
        return Buffer(name, shape, (length * count * width, width, count * width, sympy.S.One), sizes.dtype)

    q, k, v = (
        tensor("q", extent["h"], extent["m"], extent["e"]),
        tensor("k", heads, extent["n"], extent["e"]),
        tensor("v", heads, extent["n"], extent["d"]),
    )

    def load(buffer: Buffer, *indices: sympy.Expr) -> Expr:
        return cast(Load(buffer.name, indices, buffer.dtype), F32)

    extra = []
    for name, letters in variant.extra.items():
        shape = tuple(by_letter[x] for x in letters)
        extra.append(Buffer(name, shape, contiguous_strides(shape), I64 if name in variant.integers else F32))
    score = Stage(("t0",), (call("mul", load(q, b, h, m, e), load(k, b, head, n, e)),), True, SUM,
                  axes=(b, h, m, n), over=(e,), role=Role.SCORE)  # fmt: skip
    scaled = call("mul", Load("t0", (b, h, m, n), F32), const(float(sizes.e) ** -0.5, F32))
    edited = Stage(("t1",), (variant.edit(scaled, b, h, m, n),), True, axes=(b, h, m, n), role=Role.WEIGHT)
    value = load(v, b, head, n, d)
    if variant.weight is not None:
        value = call("mul", variant.weight(h, m, n, extent["n"]), value)
    state = Stage(("t2", "t3", "t4"), (Load("t1", (b, h, m, n), F32), const(1.0, F32), value), True,
                  ATTENTION, axes=(b, h, m, d), over=(n,), role=Role.STATE)  # fmt: skip
    empty = call("eq", Load("t2", (b, h, m, d), F32), MINUS_INFINITY)
    share = call("div", Load("t4", (b, h, m, d), F32), Load("t3", (b, h, m, d), F32))
    out = Stage(("t5",), (Select(empty, const(float("nan"), F32), share),), True, axes=(b, h, m, d), role=Role.RESULT)
    symbols = {s for x in extent.values() for s in x.free_symbols}
    table = tuple(Size(s, 1, hint=(hints or {}).get(str(s.name))) for s in sorted(symbols, key=lambda s: str(s.name)))
    return TensorFunction(
        "attention",
        (Dim(b, extent["b"]), Dim(h, extent["h"]), Dim(m, extent["m"])),
        (Dim(n, extent["n"]),),
        (q, k, v, *extra),
        (Output(tensor("out0", extent["h"], extent["m"], extent["d"]), "t5", (b, h, m, d)),),
        (score, edited, state, out),
        SymbolTable(table),
        (Dim(d, extent["d"]), Dim(e, extent["e"])),
    )


def inputs(function: TensorFunction, values: dict[str, int] | None = None) -> list[Tensor]:
    """Random inputs in the layout of the function's buffers."""
    made = []
    for b in function.inputs:
        t = empty(b, values or {})
        made.append(torch.randint(0, 3, t.shape).sort()[0] if b.dtype.is_int else t.copy_(torch.randn(t.shape)))
    return made


def empty(buffer: Buffer, values: dict[str, int]) -> Tensor:
    """A tensor in the layout of a buffer, NaN where it can be."""
    known = {symbol(k): sympy.Integer(n) for k, n in values.items()}
    shape, strides = ([int(x.xreplace(known)) for x in side] for side in (buffer.shape, buffer.strides))
    t = torch.empty_strided(shape, strides, dtype=buffer.dtype.torch)
    return t.fill_(float("nan")) if buffer.dtype.is_float else t


def expected(variant: Variant, tensors: list[Tensor]) -> Tensor:
    """The same by torch, in float64."""
    q, k, v, *extra = (t.double() if t.is_floating_point() else t for t in tensors)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = variant.reference(q @ k.mT * q.shape[-1] ** -0.5, *extra)
    return variant.weighed(torch.softmax(scores, -1), *extra) @ v
