"""Scatters: functions of their own, decided before the greedy search, since nobody shares their loops.

A scatter's function has a stage that begins the result, at every row, and one that writes where data say, over
dimensions of its own. What is scattered, and the places, are computed on the way where nobody else needs them. Where
the result takes the place of what it begins with (``scattered_over``) only the elements that are named are touched; so
what is made of that tensor's own elements is stored first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ...ir.expr.index import Extents, simplify
from ...ir.expr.value import (
    Expr,
    Load,
    always_rounded,
    flops,
    free_symbols,
    is_value,
    length,
    loads,
    rename_loads,
    rewrite,
    symbol,
    times,
)
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.graph.graph import CallTensor, Compute, Graph, Node, Scatter
from ...ir.target import updates_in_order
from ..context import PassContext
from ..facts.evaluations import points_of
from ..facts.fusion_nodes import CHEAP_FLOPS, INLINE_NODES, simplify_value
from ..facts.views import ViewMap, map_value, readers_of, results_of, views_of
from ..functions.function_table import FunctionTable
from .fusion import Fusion
from .outlined import Functions, Parameters, function_name

# An operand that is made of more bytes than so many times its own, some of them a kernel's results, is stored before it
# is scattered: that kernel may make it, and what it is made of is not kept beside the result.
MOST_READ = 2.5


def outline_scatters(fusion: Fusion, context: PassContext) -> Fusion:
    """Make one function of every scatter and of what is computed for it alone."""
    graph = fusion.graph
    if not any(isinstance(n, Scatter) for n in graph.nodes):
        return fusion
    views, types = views_of(graph), graph.types()
    computes = {n.name: n for n in graph.nodes if isinstance(n, Compute)}
    needed, readers = results_of(graph), readers_of(graph)
    functions = Functions()
    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, Scatter):
            writer = _ScatterWriter(graph, views, Parameters(graph, types), computes, readers, needed, node)
            nodes.append(functions.enter(*writer.build()))
        else:
            nodes.append(node)
    return functions.outlined(fusion, nodes, sum(isinstance(n, Scatter) for n in graph.nodes))


def scattered_over(function: TensorFunction, given: int) -> TensorFunction | None:
    """The function that scatters into one of its inputs; None where it begins with anything but its very elements, or
    reads them besides."""
    begin, *others = function.stages
    old, buffer = function.outputs[0], function.inputs[given]
    if (old.buffer.shape, old.buffer.strides, old.buffer.dtype) != (buffer.shape, buffer.strides, buffer.dtype):
        return None
    if begin.values[0] != Load(buffer.name, old.indices, buffer.dtype):
        return None
    if any(ld.buffer == buffer.name for s in others for v in s.values for ld in loads(v)):
        return None
    return replace(function, outputs=(replace(old, buffer=buffer),))


def begin_apart(fusion: Fusion) -> Fusion:
    """Scatters on GPUs, where programs do not wait for one another, find their result begun."""
    graph, functions = fusion.graph, fusion.functions
    table = FunctionTable(functions)
    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, CallTensor) and not updates_in_order(node.types[0].device):
            function = functions[node.function]
            if function.scatters and function.outputs[0].buffer not in function.inputs:
                nodes += [replace(c, function=table.enter(f)) for c, f in _apart(node, function)]
                continue
        nodes.append(node)
    if len(nodes) == len(graph.nodes):
        return fusion
    return fusion.having(replace(graph, nodes=tuple(nodes)), table.used(nodes))


def _apart(call: CallTensor, function: TensorFunction) -> list[tuple[CallTensor, TensorFunction]]:
    """The call that begins the result of a scatter, and the one that scatters into it."""
    begin, *rest = function.stages
    (output,) = function.outputs
    begun = f"{call.names[0]}_begun"
    first, given = _with_inputs(function, [begin], call)
    begins = replace(first, name=f"{function.name}_begin", extra=(), stages=tuple(first.stages))
    second, args = _with_inputs(function, rest, call)
    buffer = replace(output.buffer, name=f"in{len(args)}")
    kept = Stage(("t0",), (Load(buffer.name, output.indices, buffer.dtype),), False, None, begin.origins)
    stages, into = (kept, *second.stages), replace(output, buffer=buffer)
    scatters = replace(second, inputs=(*second.inputs, buffer), stages=stages, outputs=(into,))
    return [
        (replace(call, names=(begun,), args=given), begins),
        (replace(call, args=(*args, begun), into=(begun,)), scatters),
    ]


def _with_inputs(
    function: TensorFunction, stages: list[Stage], call: CallTensor
) -> tuple[TensorFunction, tuple[str, ...]]:
    """The function with some of its stages and the inputs that they read, and the arguments of a call of it."""
    used = {ld.buffer for s in stages for v in s.values for ld in loads(v)}
    pairs = [(b, a) for b, a in zip(function.inputs, call.args, strict=True) if b.name in used]
    names = {b.name: f"in{k}" for k, (b, _) in enumerate(pairs)}
    own = tuple(replace(s, values=tuple(rename_loads(v, names) for v in s.values)) for s in stages)
    inputs = tuple(replace(b, name=names[b.name]) for b, _ in pairs)
    return replace(function, inputs=inputs, stages=own), tuple(a for _, a in pairs)


@dataclass(slots=True)
class _ScatterWriter:
    graph: Graph
    views: ViewMap
    parameters: Parameters
    computes: Mapping[str, Compute]
    readers: Mapping[str, Sequence[Node]]
    needed: frozenset[str]
    node: Scatter
    # The scatter, and what is computed for it.
    taken: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)

    def build(self) -> tuple[TensorFunction, CallTensor]:
        n = self.node
        self.taken.add(n.name)
        rows = {a: symbol(f"i{k}") for k, a in enumerate(n.axes)}
        extra = {a: symbol(f"x{k}") for k, a in enumerate(n.source_axes)}
        kept = dict(zip(n.axes, n.type.shape, strict=True))
        over = dict(zip(n.source_axes, n.source_shape, strict=True))
        begin = self.value(n.initial, rows, kept)
        values = tuple(self.value(v, extra, over) for v in n.values[1:])
        result = Output(self.parameters.buffer("out0", n.type), "t0", tuple(rows.values()))
        stages = (
            Stage(("t0",), (begin,), False, None, n.origins),
            Stage((), values, False, n.monoid, n.origins, tuple(extra.values()), into="t0"),
        )
        dims = [
            tuple(Dim(v, self.parameters.canonical(part[a])) for a, v in env.items())
            for env, part in ((rows, kept), (extra, over))
        ]
        sizes, table = self.parameters.sizes()
        inputs = self.parameters.inputs
        name = function_name("scatter", n.origins)
        function = TensorFunction(name, dims[0], (), tuple(inputs.values()), (result,), stages, table, dims[1])
        return function, CallTensor(n.names, n.types, function.name, tuple(inputs), sizes, n.origins)

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, value: Expr, axes: Mapping[sympy.Symbol, sympy.Symbol], extents: Extents) -> Expr:
        """A value over some axes of the node as one over the function's dimensions, its operands computed in place."""
        value = self.with_operands(self.views.resolve(value, extents), extents)

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load):
                return None
            # Along a dimension of stride zero all elements are one, and so is the place that they name.
            steps = zip(e.indices, self.parameters.types[e.buffer].strides, strict=True)
            indices = tuple(sympy.S.Zero if s == 0 and not is_value(i) else i for i, s in steps)
            return Load(self.parameters.input(e.buffer), indices, e.dtype)

        def index(i: sympy.Expr) -> sympy.Expr:
            moved = i.xreplace(axes) if i.free_symbols else i
            return self.parameters.canonical(
                simplify(moved, {axes[a]: e for a, e in extents.items()}, self.graph.symbols)
            )

        return always_rounded(simplify_value(rewrite(value, leaf, index)))

    def with_operands(self, value: Expr, extents: Extents, most: int | None = None) -> Expr:
        """The value with what nobody else reads, and what costs next to nothing, computed in place; ``most``: at how
        many points the value is computed."""
        whole = math.prod(self.hint(n) for n in extents.values())
        most = whole if most is None else most
        points = self.points(value, extents)

        def leaf(e: Expr) -> Expr | None:
            made = self.computes.get(e.buffer) if isinstance(e, Load) else None
            if made is None or not isinstance(e, Load):
                return None
            here = min(points.get(e, whole), most)
            if not self.is_taken_in(made, e, here):
                return None
            before = set(self.taken)
            self.taken.add(made.name)
            moved = map_value(made.value, dict(zip(made.axes, e.indices, strict=True)))
            moved = rewrite(moved, lambda _: None, lambda i: simplify(i, extents, self.graph.symbols))
            inside = self.with_operands(self.views.resolve(moved, extents), extents, here)
            if self.is_stored_first(inside, made):
                self.taken = before
                return None
            return inside

        return rewrite(value, leaf)

    def points(self, value: Expr, extents: Extents) -> dict[Load, int]:
        """At how many points of the axes along which it moves each load of a value is done: a part of a concat is read
        at the points of that part alone."""
        hint, found = self.hint, dict[Load, int]()
        whole = math.prod(hint(n) for n in extents.values())
        for load, points in points_of((value,), extents, hint):
            moving = {s for i in load.indices if not is_value(i) for s in i.free_symbols}
            still = math.prod(hint(n) for a, n in extents.items() if a not in moving)
            found[load] = found.get(load, 0) + (points // still if whole else 0)
        return found

    def is_taken_in(self, made: Compute, load: Load, points: int) -> bool:
        """Whether an operand is computed where it is read: each element once, or for nothing."""
        cost = flops(made.value)
        inner = next(loads(made.value), None)
        if inner is None or (cost == 0 and not any(is_value(i) for ld in loads(made.value) for i in ld.indices)):
            return cost <= CHEAP_FLOPS and made.name not in self.needed
        if made.name in self.needed or not self.is_theirs(made.name):
            return False
        if any(is_value(i) for i in load.indices) or self.written_out(made) > INLINE_NODES:
            return False
        # What is not computed in lanes is worth a pass of its own where it is much.
        return points <= self.hint(made.type.numel) and (self.in_rows() or cost <= CHEAP_FLOPS)

    def is_stored_first(self, value: Expr, made: Compute) -> bool:
        """Whether the elements of an operand are made of so much that they should not be made here, or of the tensor
        whose place the result may take."""
        count, names = self.hint(made.type.numel), {ld.buffer for ld in loads(value)}
        begun = self.node.initial
        if isinstance(begun, Load) and self.views.base(begun.buffer) in names:
            return True
        types = [self.parameters.types[name] for name in names]
        nbytes = sum(min(self.hint(t.numel), count) * t.dtype.itemsize for t in types)
        return nbytes > MOST_READ * self.hint(made.type.nbytes) and not names.isdisjoint(self.computes)

    def written_out(self, made: Compute) -> int:
        """How large an operand is once what nobody else reads is computed in place: each step of a search reads the one
        before several times, so that its size is a power of their number."""
        if made.name not in self.sizes:
            self.sizes[made.name] = length(made.value)
            for buffer in dict.fromkeys(ld.buffer for ld in loads(made.value)):
                name = self.views.base(buffer)
                below = self.computes.get(name)
                if below is not None and name not in self.needed and len(self.readers[name]) == 1:
                    self.sizes[made.name] += times(made.value, buffer) * self.written_out(below)
        return self.sizes[made.name]

    def is_theirs(self, name: str) -> bool:
        """Whether nobody reads a tensor but the scatter and what is computed for it."""
        return all(r.names and r.names[0] in self.taken for r in self.readers.get(name, ()))

    def in_rows(self) -> bool:
        """Whether the last source axis runs along elements whose place data do not decide, so that it may be lanes."""
        last = self.node.source_axes[-1:]
        named = {s for p in self.node.positions if is_value(p) for s in free_symbols(p)}
        return bool(last) and last[0] in self.node.positions and last[0] not in named

    def hint(self, size: sympy.Expr) -> int:
        return int(self.graph.symbols.hint(size))
