"""Random graphs of tensor functions keep their meaning through the passes, fusion and lowering."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.index import simplify
from torch_mlc.ir.expr.monoid import MAX, SUM
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, const, symbol
from torch_mlc.ir.graph.graph import CallTensor, Compute, Graph, Input, Node, Reduction, TensorType, View
from torch_mlc.ir.nest.loops import contiguous_strides
from torch_mlc.ir.oracle.oracle import run_graph, run_nest
from torch_mlc.ir.passes import run_passes
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES

F32 = DType.FLOAT32


def kind(shape: tuple[int, ...]) -> TensorType:
    sizes = tuple(sympy.Integer(n) for n in shape)
    return TensorType(sizes, contiguous_strides(sizes), F32)


def axes_of(shape: tuple[int, ...], prefix: str = "i") -> tuple[sympy.Symbol, ...]:
    return tuple(symbol(f"{prefix}{k}") for k in range(len(shape)))


@dataclass
class Builder:
    """Draws nodes; shapes by name."""

    draw: st.DrawFn
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def name(self, shape: tuple[int, ...]) -> str:
        name = f"n{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def pick(self) -> str:
        return self.draw(st.sampled_from(sorted(self.shapes)))

    def pointwise(self) -> None:
        a = self.pick()
        shape = self.shapes[a]
        axes = axes_of(shape)
        fitting = [b for b, s in sorted(self.shapes.items()) if s == shape or shape[len(shape) - len(s) :] == s]
        b = self.draw(st.sampled_from(fitting))
        left = Load(a, axes, F32)
        right = Load(b, axes[len(axes) - len(self.shapes[b]) :], F32)
        fn = self.draw(st.sampled_from(["add", "mul", "maximum", "sub"]))
        value: Expr = call(fn, left, right)
        if self.draw(st.booleans()):
            value = call("tanh", value)
        name = self.name(shape)
        self.nodes.append(Compute(name, kind(shape), axes, value))

    def rows(self) -> None:
        """``a + b[..., None]``: a result of fewer dimensions broadcast along new last ones."""
        pairs = [
            (a, b)
            for a, s in sorted(self.shapes.items())
            for b, t in sorted(self.shapes.items())
            if len(t) < len(s) and s[: len(t)] == t
        ]
        if not pairs:
            return
        a, b = self.draw(st.sampled_from(pairs))
        axes = axes_of(self.shapes[a])
        value = call("sub", Load(a, axes, F32), Load(b, axes[: len(self.shapes[b])], F32))
        self.nodes.append(Compute(self.name(self.shapes[a]), kind(self.shapes[a]), axes, value))

    def shifted(self) -> None:
        a = self.pick()
        shape = self.shapes[a]
        if not shape or shape[-1] < 2:
            return
        axes = axes_of(shape)
        inside = call("lt", IndexValue(axes[-1], DType.INT64), const(shape[-1] - 1, DType.INT64))
        value = Select(inside, Load(a, (*axes[:-1], axes[-1] + 1), F32), const(0.5, F32))
        self.nodes.append(Compute(self.name(shape), kind(shape), axes, value))

    def front(self) -> None:
        """``a[..., :n]``."""
        a = self.pick()
        shape = self.shapes[a]
        if not shape or shape[-1] < 2:
            return
        new = (*shape[:-1], self.draw(st.integers(1, shape[-1] - 1)))
        axes = axes_of(new)
        self.nodes.append(Compute(self.name(new), kind(new), axes, call("neg", Load(a, axes, F32))))

    def reduction(self) -> None:
        a = self.pick()
        shape = self.shapes[a]
        if not shape:
            return
        k = self.draw(st.integers(0, len(shape) - 1))
        everything = self.draw(st.integers(0, 5)) == 0
        reduced = tuple(range(len(shape))) if everything else (k,)
        kept = tuple(n for j, n in enumerate(shape) if j not in reduced)
        axes, inner = axes_of(kept), axes_of(reduced, "r")
        keep, red = iter(axes), iter(inner)
        at = tuple(next(red) if j in reduced else next(keep) for j in range(len(shape)))
        monoid = self.draw(st.sampled_from([SUM, MAX]))
        sizes = tuple(sympy.Integer(shape[j]) for j in reduced)
        name = self.name(kept)
        self.nodes.append(Reduction((name,), (kind(kept),), axes, inner, sizes, monoid, (Load(a, at, F32),)))

    def view(self) -> None:
        a = self.pick()
        shape = self.shapes[a]
        if self.draw(st.booleans()) and len(shape) > 1:
            order = self.draw(st.permutations(range(len(shape))))
            new = tuple(shape[j] for j in order)
            axes = axes_of(new)
            indices = [sympy.S.Zero] * len(shape)
            for position, j in enumerate(order):
                indices[j] = axes[position]
        else:
            total = math.prod(shape)
            divisors = [d for d in range(1, total + 1) if total % d == 0]
            first = self.draw(st.sampled_from(divisors))
            new = (first, total // first)
            axes = axes_of(new)
            flat = axes[0] * new[1] + axes[1]
            indices, step = [], 1
            for n in reversed(shape):
                i = ModularIndexing(flat, step, n) if step * n != total else FloorDiv(flat, step)
                indices.insert(0, simplify(i, dict(zip(axes, map(sympy.Integer, new), strict=True))))
                step *= n
        # A copy, as the layout of a view is not what is tested here.
        value = Load(a, tuple(indices), F32)
        self.nodes.append(Compute(self.name(new), kind(new), axes, value))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    b = Builder(draw)
    shapes = draw(st.lists(st.sampled_from([(4, 6), (2, 2, 6), (6,), (24,), (4,), (1, 6)]), min_size=1, max_size=3))
    inputs = tuple(Input(b.name(s), kind(s)) for s in shapes)
    steps = [b.pointwise, b.pointwise, b.rows, b.reduction, b.view, b.shifted, b.front]
    for _ in range(draw(st.integers(1, 9))):
        draw(st.sampled_from(steps))()
    made = [n for node in b.nodes for n in node.names]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True)) if made else []
    return Graph("random", inputs, tuple(b.nodes), tuple(outputs))


@settings(max_examples=400)
@given(graphs())
def test_fused_equals_unfused(graph: Graph) -> None:
    rng = np.random.default_rng(0)
    values = {
        i.name: rng.standard_normal([int(n) for n in i.type.shape]).astype(np.float32)
        for i in graph.inputs
        if isinstance(i, Input)
    }
    expected = run_graph(graph, values, {})
    optimized = graph
    optimized = run_passes(GRAPH_PASSES, optimized, USUAL)
    fusion = fuse(optimized)
    env = dict(values)
    types = optimized.types()
    for node in fusion.graph.nodes:
        if isinstance(node, CallTensor):
            nest = lower_to_loops(fusion.functions[node.function])
            given_ = {
                b.name: env[a].reshape([int(n) for n in b.shape]) for b, a in zip(nest.params, node.args, strict=False)
            }
            results = run_nest(nest, given_, {})
            for name, out in zip(node.names, nest.outputs, strict=True):
                env[name] = results[out].reshape([int(n) for n in types[name].shape])
        elif isinstance(node, View):
            strides = [4 * int(s) for s in node.type.strides]
            flat = np.ascontiguousarray(env[node.source]).reshape(-1)[int(node.offset) :]
            env[node.name] = np.lib.stride_tricks.as_strided(flat, [int(n) for n in node.type.shape], strides)
    for name, want in expected.items():
        np.testing.assert_allclose(env[name], want, rtol=1e-5, atol=1e-5)
