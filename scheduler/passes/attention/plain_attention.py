"""Attention that torch's own kernel for CPUs could do, as a call of it where that is clearly faster.

Long sequences of wide heads without a mask: blocks are multiplied by BLAS there. What the kernel is given are the
operands of the two products, as BLAS would have been.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, Const, Expr, Load, symbol
from ....ir.graph.graph import Library, Node, Ref, TensorType, View
from ....ir.nest.loops import contiguous_strides
from ...context import PassContext
from ...cost.attention import AttentionSize, decide_library_cpu, library_time, ours_time
from ...decisions import Alternative, place_key
from ...facts.definitions import Definitions
from ..canonical.names import fresh_name
from ..products.operands import operand, scaled
from .attention_match import SCORES, Attention

OP = "aten::_scaled_dot_product_flash_attention_for_cpu.default"


def library_call(
    found: Definitions, attention: Attention, types: Mapping[str, TensorType], taken: set[str], context: PassContext
) -> list[Node] | None:
    """The nodes of a call of torch's kernel and of the product's result as a view of it; None where our loops do it."""
    product, first, a = attention.product, attention.first, attention.axes
    if not product.type.device.startswith("cpu") or product.type.dtype is not DType.FLOAT32 or a.batch is None:
        return None
    scale = _scale(attention.score)
    odd = attention.transposed or attention.zero_for_nan or attention.zero_for_empty or attention.weight is not None
    odd = odd or attention.shift is not None or attention.extra is not None
    if odd or scale is None or first.rank != 3 or first.added is not None:
        return None
    queries, keys, values = types[first.left], types[first.right], types[product.right]
    width = queries.shape[2]
    if not width.is_Integer or values.shape[2] != width or _unlike(found, attention, types):
        return None
    if (queries.strides[2], keys.strides[1], values.strides[2]) != (1, 1, 1):
        return None
    hint = found.graph.symbols.hint
    batch, rows, columns = queries.shape[0], queries.shape[1], values.shape[1]
    size = AttentionSize(hint(batch), hint(rows), hint(columns), int(width), product.type.dtype.is_half)
    machine = context.target_of(product.type.device).machine
    faster, told = decide_library_cpu(size, machine)
    chosen = context.decide(
        "attention", lambda: place_key(found.graph, (product.name,)),
        (Alternative("loops", ours_time(size)), Alternative("library", library_time(size, machine))),
        "library" if faster else "loops", at=product.name, reason=told,
        nbytes=sum(hint(types[n].nbytes) for n in (first.left, first.right, product.right, product.name)),
    )  # fmt: skip
    if chosen == "loops":
        return None
    here = found.within(attention.extents)
    kind = product.type.dtype
    within = (scaled(here, Load(first.left, (a.batch, a.row, a.inner), kind))[1],
              scaled(here, Load(first.right, (a.batch, a.inner, a.column), kind))[1])  # fmt: skip
    names = [fresh_name(f"{product.name}_{n}", taken) for n in ("query", "key", "value", "attention", "logsumexp")]
    taken.update(names)
    i0, _, i2, i3 = (symbol(f"i{k}") for k in range(4))
    nodes: list[Node] = [
        _head(names[0], queries, first.left, (i0, i2, i3), (0, 1, 2)),
        _head(names[1], keys, first.right, (i0, i3, i2), (0, 2, 1)),
        _head(names[2], values, product.right, (i0, i2, i3), (0, 1, 2)),
    ]
    shape, rest = (batch, sympy.S.One, rows, width), (batch, sympy.S.One, rows)
    device = product.type.device
    results = (
        TensorType(shape, contiguous_strides(shape), kind, device),
        TensorType(rest, contiguous_strides(rest), DType.FLOAT32, device),
    )
    origins = tuple(dict.fromkeys((*first.node.origins, *product.node.origins)))
    call = Library(
        tuple(names[3:]), results, OP, tuple(Ref(n) for n in names[:3]), (("scale", scale / (within[0] * within[1])),),
        f"attention: torch's flash kernel: {told}", origins,
    )  # fmt: skip
    axes = tuple(symbol(f"i{k}") for k in range(3))
    at = (axes[0], sympy.S.Zero, axes[1], axes[2])
    return [*nodes, call, View(product.name, product.type, names[3], axes, at, sympy.S.Zero, product.node.origins)]


def _head(name: str, kind: TensorType, source: str, at: tuple[sympy.Symbol, ...], order: tuple[int, int, int]) -> View:
    """Matrices as the one head of as many entries of a batch."""
    b, m, n = order
    shape = (kind.shape[b], sympy.S.One, kind.shape[m], kind.shape[n])
    strides = (kind.strides[b], kind.strides[b], kind.strides[m], kind.strides[n])
    axes = tuple(symbol(f"i{k}") for k in range(4))
    return View(name, TensorType(shape, strides, kind.dtype, kind.device), source, axes, at)


def _scale(score: Expr) -> float | None:
    """The number that scores are multiplied by, where that is all that is done to them."""
    match score:
        case Load(buffer, _, _) if buffer == SCORES:
            return 1.0
        case Cast(value, dtype) if dtype.is_float:
            return _scale(value)
        case Call("mul" | "div", (value, Const(factor, _)), _):
            inner = _scale(value)
            by = float(factor)
            return None if inner is None or by == 0.0 else inner * by if score.fn == "mul" else inner / by
    return None


def _unlike(found: Definitions, attention: Attention, types: Mapping[str, TensorType]) -> bool:
    """Whether the products read their operands otherwise than matrix by matrix, or those repeat what they are made
    of."""
    product, first, a = attention.product, attention.first, attention.axes
    assert a.batch is not None
    here, kind = found.within(attention.extents), product.type.dtype
    plain = (
        (attention.query, scaled(here, Load(first.left, (a.batch, a.row, a.inner), kind))[0], first.left),
        (attention.key, scaled(here, Load(first.right, (a.batch, a.inner, a.column), kind))[0], first.right),
        (attention.value, operand(here, Load(product.right, (a.batch, a.column, a.feature), kind)), product.right),
    )
    for read, given, name in plain:
        source = read.value if isinstance(read, Cast) else read
        if read != given or not isinstance(source, Load) or types[source.buffer].numel != types[name].numel:
            return True
    return False
