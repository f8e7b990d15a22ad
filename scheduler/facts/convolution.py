"""Convolutions as the graph has them, and their element-wise form: sums over the taps of a window.

A depthwise convolution (one filter for each channel) multiplies each loaded element a few times only, so it is no
product of matrices but a stencil: a reduction over the taps whose loads are guarded where the window overhangs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import SUM
from ...ir.expr.value import Expr, IndexValue, Load, Select, call, cast, const, symbol
from ...ir.graph.graph import Compute, Library, Node, Reduction, Ref, TensorType
from ...ir.target import has_kernels

FORWARD, BACKWARD = "aten::convolution.default", "aten::convolution_backward.default"


@dataclass(frozen=True, slots=True)
class Convolution:
    """A library call that convolves, or the gradients of one: types of the ``input`` [N, C, *size], the ``weight``
    [O, C / groups, *kernel] ([C, O / groups, *kernel] where ``transposed``) and the ``output`` [N, O, *size].

    ``names`` are those of "input", "weight", and where they are given "bias" and "grad", the gradient of the output.
    ``stride``, ``padding`` and ``dilation`` have an entry a spatial dimension.
    """

    node: Library
    names: Mapping[str, str]
    input: TensorType
    weight: TensorType
    output: TensorType
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    @property
    def rank(self) -> int:
        """Spatial dimensions."""
        return len(self.stride)

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(int(k) for k in self.weight.shape[2:])

    @property
    def is_backward(self) -> bool:
        return self.node.target == BACKWARD

    @property
    def is_depthwise(self) -> bool:
        """Whether each filter reads one channel, and there are several."""
        one = self.weight.shape[1] == 1 if not self.transposed else self.weight.shape[0] == self.groups
        return one and self.groups > 1

    @property
    def taps(self) -> int:
        count = 1
        for k in self.kernel:
            count *= k
        return count

    @property
    def read(self) -> sympy.Expr:
        """Input channels of a group: of each filter."""
        return sympy.Integer(int(self.input.shape[1]) // self.groups)

    @property
    def made(self) -> sympy.Expr:
        """Outputs of a group."""
        return sympy.Integer(int(self.output.shape[1]) // self.groups)

    def group(self, channel: sympy.Expr, of: sympy.Expr) -> sympy.Expr:
        """The group of a channel, of ``of`` in each."""
        return sympy.S.Zero if self.groups == 1 else channel if of == 1 else FloorDiv(channel, of)

    def member(self, channel: sympy.Expr, of: sympy.Expr) -> sympy.Expr:
        """Which of its group a channel is."""
        if of == 1:
            return sympy.S.Zero
        return channel if self.groups == 1 else ModularIndexing(channel, sympy.S.One, of)


def convolution(node: Node, graph_types: Mapping[str, TensorType]) -> Convolution | None:
    """The node as a convolution; None where it is none, or not one of floats with a constant kernel and channels, on a
    device that kernels are made for."""
    if not isinstance(node, Library) or node.target not in (FORWARD, BACKWARD) or node.kwargs:
        return None
    if node.target == FORWARD:
        x, weight, bias, *rest = node.args
        tensors = {"input": x, "weight": weight, "bias": bias}
        stride, padding, dilation, transposed, _, groups = rest
        output = node.types[0]
    else:
        grad, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
        tensors = {"grad": grad, "input": x, "weight": weight}
        output = graph_types.get(grad.name) if isinstance(grad, Ref) else None
    names = {k: v.name for k, v in tensors.items() if isinstance(v, Ref)}
    kinds = {k: graph_types[v] for k, v in names.items()}
    if output is None or not {"input", "weight"} <= kinds.keys():
        return None
    own, filters = kinds["input"], kinds["weight"]
    rank = len(own.shape) - 2
    steps, pads, spread = (_numbers(v, rank) for v in (stride, padding, dilation))
    numbers = (*filters.shape, own.shape[1], output.shape[1])
    if rank < 1 or own.dtype.itemsize < 2 or steps is None or pads is None or spread is None:
        return None
    if not has_kernels(own.device) or not own.dtype.is_float:
        return None
    if any(t.dtype is not own.dtype for t in (*kinds.values(), output)):
        return None
    if not all(e.is_Integer and e > 0 for e in numbers) or not isinstance(groups, int):
        return None
    return Convolution(node, names, own, filters, output, steps, pads, spread, bool(transposed), groups)


def _numbers(value: object, rank: int) -> tuple[int, ...] | None:
    """One number a spatial dimension; None where some are no constants."""
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, (int, sympy.Integer)) for v in value):
        return None
    found = tuple(int(v) for v in value)
    return found * rank if len(found) == 1 else found if len(found) == rank else None


# --- elements ---------------------------------------------------------------------------------------------------------

Extents = dict[sympy.Symbol, sympy.Expr]


@dataclass(frozen=True, slots=True)
class Names:
    """What the nodes of a decomposed part are called: its result, and a free name for the sum behind it."""

    result: str
    total: str


@dataclass(frozen=True, slots=True)
class _Window:
    """Where each tap of a window reads, which tap of the filter it is, and when the place and the tap are there."""

    places: tuple[sympy.Expr, ...]
    taps: tuple[sympy.Expr, ...]
    inside: tuple[Expr, ...]
    exists: tuple[Expr, ...] = ()


def decompose_forward(c: Convolution, name: Names, note: str) -> list[Node]:
    """The output as a sum over taps and the channels that filters read, and the element that adds its bias."""
    batch, channel, *at = axes_of(len(c.output.shape))
    over: Extents = {}
    window = _covering(c, at, over) if c.transposed else _covered(c, at, _taps(c, over))
    within = _axis(c.read, over)
    source = c.group(channel, c.made) * c.read + within
    filters = (source, c.member(channel, c.made)) if c.transposed else (channel, within)
    term = _term(c, c.names["input"], (batch, source, *window.places), filters, window)
    bias = Load(c.names["bias"], (channel,), c.output.dtype) if "bias" in c.names else None
    return _summed(c, name, c.output, over, term, bias, note)


def decompose_input_gradient(c: Convolution, name: Names, kind: TensorType, note: str) -> list[Node]:
    """The gradient of the input: what each element gave to the windows that cover it, or that it was spread over."""
    batch, channel, *at = axes_of(len(kind.shape))
    over: Extents = {}
    window = _covered(c, at, _taps(c, over)) if c.transposed else _covering(c, at, over)
    within = _axis(c.made, over)
    which = c.group(channel, c.read) * c.made + within
    filters = (channel, within) if c.transposed else (which, c.member(channel, c.read))
    term = _term(c, c.names["grad"], (batch, which, *window.places), filters, window)
    return _summed(c, name, kind, over, term, None, note)


def decompose_weight_gradient(c: Convolution, name: Names, kind: TensorType, note: str) -> list[Node]:
    """The gradient of the filters: sums over all windows."""
    first, second, *taps = axes_of(len(kind.shape))
    over: Extents = {}
    shorter = c.input if c.transposed else c.output
    batch, *at = (_axis(e, over) for e in (shorter.shape[0], *shorter.shape[2:]))
    window = _covered(c, at, [sympy.S.Zero if k == 1 else t for t, k in zip(taps, c.kernel, strict=True)])
    wide, of = kind.dtype.compute, (c.made, c.read) if not c.transposed else (c.read, c.made)
    # What the filters' first dimension counts lies on the shorter side, and of its group the second on the longer one.
    other = c.group(first, of[0]) * of[1] + (second if of[1] != 1 else sympy.S.Zero)
    near, far = ("input", "grad") if c.transposed else ("grad", "input")
    read = cast(Load(c.names[far], (batch, other, *window.places), kind.dtype), wide)
    given = cast(Load(c.names[near], (batch, first, *at), kind.dtype), wide)
    return _summed(c, name, kind, over, call("mul", _guarded(read, window.inside), given), None, note)


def _taps(c: Convolution, over: Extents) -> list[sympy.Expr]:
    return [_axis(k, over) for k in c.kernel]


def decompose_bias_gradient(c: Convolution, name: Names, kind: TensorType, note: str) -> list[Node]:
    """The gradient of a bias: the sum of what flows back into each channel."""
    over: Extents = {}
    batch, *at = (_axis(e, over) for e in (c.output.shape[0], *c.output.shape[2:]))
    (channel,) = axes_of(1)
    grad = cast(Load(c.names["grad"], (batch, channel, *at), kind.dtype), kind.dtype.compute)
    return _summed(c, name, kind, over, grad, None, note)


def can_gather(c: Convolution) -> bool:
    """Whether ``_covering`` counts the windows that cover a place: no stride together with a dilation."""
    return all(s == 1 or d == 1 for s, d in zip(c.stride, c.dilation, strict=True))


def _covered(c: Convolution, at: Sequence[sympy.Expr], taps: Sequence[sympy.Expr]) -> _Window:
    """The places of the longer side that the windows ``at`` of the shorter one cover."""
    places, inside = [], []
    longer, shorter = (c.output, c.input) if c.transposed else (c.input, c.output)
    for k, size in enumerate(c.kernel):
        place = at[k] * c.stride[k] + taps[k] * c.dilation[k] - c.padding[k]
        extent, out = longer.shape[2 + k], shorter.shape[2 + k]
        beyond = (out - 1) * c.stride[k] + (size - 1) * c.dilation[k] - c.padding[k] - (extent - 1)
        if c.padding[k] > 0:
            inside.append(_compared("ge", place, sympy.S.Zero))
        if c.padding[k] > 0 and not (beyond.is_Integer and beyond <= 0):
            inside.append(_compared("lt", place, extent))
        places.append(place)
    return _Window(tuple(places), tuple(taps), tuple(inside))


def _covering(c: Convolution, at: Sequence[sympy.Expr], over: Extents) -> _Window:
    """The windows of the shorter side that cover the places ``at`` of the longer one.

    They begin at multiples of the stride, and are counted back from the last one that begins at the place or before.
    Where windows are dilated too, all taps are counted, of which some meet no window.
    """
    places, taps, inside, exists = [], [], [], []
    shorter = (c.input if c.transposed else c.output).shape[2:]
    for k, size in enumerate(c.kernel):
        step, moved = c.stride[k], at[k] + c.padding[k]
        if step == 1:
            tap = _axis(size, over)
            place = moved - tap * c.dilation[k]
        elif c.dilation[k] != 1:
            tap = _axis(size, over)
            ahead = -(-(size - 1) * c.dilation[k] // step)  # windows that may lie before the first
            from_first = moved - tap * c.dilation[k] + ahead * step
            place = FloorDiv(from_first, sympy.Integer(step)) - ahead
            exists.append(_compared("eq", ModularIndexing(from_first, sympy.S.One, sympy.Integer(step)), sympy.S.Zero))
        else:
            back = _axis(-(-size // step), over)
            tap = ModularIndexing(moved, sympy.S.One, sympy.Integer(step)) + step * back
            place = FloorDiv(moved, sympy.Integer(step)) - back
            if size % step:
                exists.append(_compared("lt", tap, sympy.Integer(size)))
        # A single tap meets every place, unless an output padding has made the longer side longer.
        alike = c.input.shape[2 + k] == c.output.shape[2 + k]
        if not (place.is_Symbol and c.padding[k] == 0 and step == 1 and alike):
            inside += [_compared("ge", place, sympy.S.Zero), _compared("lt", place, shorter[k])]
        places.append(place)
        taps.append(tap)
    return _Window(tuple(places), tuple(taps), tuple(inside), tuple(exists))


def _axis(extent: int | sympy.Expr, over: Extents) -> sympy.Expr:
    """A new axis to sum over; none for one term."""
    if extent == 1:
        return sympy.S.Zero
    var = symbol(f"r{len(over)}")
    over[var] = sympy.sympify(extent)
    return var


def axes_of(rank: int) -> tuple[sympy.Symbol, ...]:
    """Names for the dimensions of a tensor."""
    return tuple(symbol(f"i{k}") for k in range(rank))


def _compared(fn: str, place: sympy.Expr, limit: sympy.Expr) -> Expr:
    bound = const(int(limit), DType.INT64) if limit.is_Integer else IndexValue(limit, DType.INT64)
    return call(fn, IndexValue(place, DType.INT64), bound)


def _guarded(value: Expr, conditions: Sequence[Expr]) -> Expr:
    """The value where all conditions hold, else zero."""
    if not conditions:
        return value
    all_hold = conditions[0]
    for c in conditions[1:]:
        all_hold = call("logical_and", all_hold, c)
    return Select(all_hold, value, const(0, value.dtype))


def _term(
    c: Convolution, read: str, at: tuple[sympy.Expr, ...], filters: tuple[sympy.Expr, ...], window: _Window
) -> Expr:
    """One tap's product, in the type in which it is summed; zero where there is no such tap."""
    dtype = c.input.dtype
    weight = cast(Load(c.names["weight"], (*filters, *window.taps), dtype), dtype.compute)
    value = cast(Load(read, at, dtype), dtype.compute)
    if window.exists:
        return _guarded(call("mul", value, weight), (*window.inside, *window.exists))
    return call("mul", _guarded(value, window.inside), weight)


def _summed(
    c: Convolution, name: Names, kind: TensorType, over: Extents, value: Expr, bias: Expr | None, note: str
) -> list[Node]:
    """The nodes that sum a value (over no axes: the value itself), add a bias, and round."""
    axes = axes_of(len(kind.shape))
    origins = tuple(replace(o, note=note) for o in c.node.origins)
    nodes: list[Node] = []
    if over:
        wide = replace(kind, dtype=value.dtype)
        whole = bias is None and wide == kind
        total = name.result if whole else name.total
        nodes.append(Reduction((total,), (wide,), axes, tuple(over), tuple(over.values()), SUM, (value,), origins))
        if whole:
            return nodes
        value = Load(total, axes, value.dtype)
    if bias is not None:
        value = call("add", value, cast(bias, value.dtype))
    value = cast(value, kind.dtype, when_stored=not c.node.rounded)
    return [*nodes, Compute(name.result, kind, axes, value, origins)]
