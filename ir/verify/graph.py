"""The rules of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import sympy

from ..expr.symbols import Interval
from ..expr.value import is_value
from ..graph.graph import (
    CallTensor,
    Compute,
    Graph,
    Input,
    IRModule,
    Library,
    Reduction,
    Scan,
    Scatter,
    TensorType,
    View,
    node_values,
    uses,
)
from .expr import AccessShape, Fault, Shapes, access, expression, index_symbols


def names_are_defined(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """Every tensor has one definition, which stands above its uses; outputs are defined."""
    defined: set[str] = set()
    for i in graph.inputs:
        if i.name in defined:
            yield Fault(i, f"two inputs are called {i.name!r}")
        defined.add(i.name)
    for node in graph.nodes:
        for name in uses(node):
            if name not in defined:
                yield Fault(node, f"nothing above defines {name!r}")
        for name in node.names:
            if name in defined:
                yield Fault(node, f"{name!r} is defined twice")
            defined.add(name)
        if len(node.names) != len(node.types):
            yield Fault(node, f"{len(node.names)} names and {len(node.types)} types")
    for output in graph.outputs:
        if isinstance(output, str) and output not in defined:
            yield Fault(graph, f"the output {output!r} is not defined")


def sizes_are_bound(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """Shapes, strides, sizes passed on and sizes returned speak of the graph's size symbols."""
    sizes = set(graph.symbols.symbols)
    for i in graph.inputs:
        yield from _type_symbols(i, i.type, sizes) if isinstance(i, Input) else index_symbols(i, i.value, sizes)
    for node in graph.nodes:
        for kind in node.types:
            if kind is not None:
                yield from _type_symbols(node, kind, sizes)
        used: tuple[sympy.Expr, ...] = ()
        if isinstance(node, CallTensor):
            used = node.sizes
        elif isinstance(node, Reduction):
            used = node.reduce_shape
        for e in used:
            yield from index_symbols(node, e, sizes)
    for output in graph.outputs:
        if isinstance(output, sympy.Expr):
            yield from index_symbols(graph, output, sizes)


def _type_symbols(culprit: object, kind: TensorType, sizes: set[sympy.Symbol]) -> Iterator[Fault]:
    for e in (*kind.shape, *kind.strides):
        yield from index_symbols(culprit, e, sizes)
    if len(kind.shape) != len(kind.strides):
        yield Fault(culprit, f"{len(kind.shape)} dimensions and {len(kind.strides)} strides")


def values_are_sound(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """Types, ranks and ranges inside the nodes that say what an element is."""
    shapes: dict[str, AccessShape] = {}
    sizes = set(graph.symbols.symbols)
    for i in graph.inputs:
        if isinstance(i, Input):
            shapes[i.name] = AccessShape(i.type.dtype, i.type.shape)
    for node in graph.nodes:
        match node:
            case Compute() | Reduction() | Scan():
                yield from _elements(node, shapes, sizes)
            case Scatter():
                yield from _scatter(node, shapes, sizes)
            case View():
                yield from _view(node, shapes, sizes)
        shapes.update({n: AccessShape(t.dtype, t.shape) for n, t in zip(node.names, node.types) if t is not None})


def _elements(node: Compute | Reduction | Scan, shapes: Shapes, sizes: set[sympy.Symbol]) -> Iterator[Fault]:
    axes, extents = node.axes, node.types[0].shape if node.types else ()
    if any(len(axes) != len(t.shape) for t in node.types):
        yield Fault(node, f"{len(axes)} axes and a shape of {len(extents)} dimensions")
        return
    if isinstance(node, (Reduction, Scan)):
        wanted = len(node.monoid.components)
        if not len(node.names) == len(node.types) == len(node.values) == wanted:
            yield Fault(node, f"{node.monoid.name} has {wanted} components, here {len(node.values)} values")
    if isinstance(node, Scan) and node.scan_axis not in node.axes:
        yield Fault(node, f"the scan axis {node.scan_axis} is none of its axes")
    if isinstance(node, Reduction):
        if len(node.reduce_axes) != len(node.reduce_shape):
            yield Fault(node, f"{len(node.reduce_axes)} reduction axes and {len(node.reduce_shape)} extents")
            return
        axes, extents = (*axes, *node.reduce_axes), (*extents, *node.reduce_shape)
    if len(set(axes)) != len(axes):
        yield Fault(node, f"two axes have the same name among {', '.join(map(str, axes))}")
    ranges = _ranges(axes, extents)
    for value, kind in zip(node_values(node), node.types):
        if value.dtype is not kind.dtype:
            yield Fault(value, f"the node is {kind.dtype.value}, its value {value.dtype.value}", "cast the value")
    for value in node_values(node):
        yield from expression(value, shapes, sizes | {*axes}, ranges)


def _scatter(node: Scatter, shapes: Shapes, sizes: set[sympy.Symbol]) -> Iterator[Fault]:
    kind = node.type
    if len(node.axes) != len(kind.shape) or len(node.values) != 2 + len(kind.shape):
        yield Fault(node, f"{len(node.axes)} axes and {len(node.values) - 2} positions of {len(kind.shape)} dimensions")
        return
    if len(node.source_axes) != len(node.source_shape):
        yield Fault(node, f"{len(node.source_axes)} source axes and {len(node.source_shape)} extents")
        return
    if node.monoid is not None and len(node.monoid.components) != 1:
        yield Fault(node, f"{node.monoid.name} has {len(node.monoid.components)} components; a scatter combines one")
    for e in node.source_shape:
        yield from index_symbols(node, e, sizes)
    for v in node.values[:2]:
        if v.dtype is not kind.dtype:
            yield Fault(v, f"the node is {kind.dtype.value}, its value {v.dtype.value}", "cast the value")
    yield from expression(node.initial, shapes, sizes | {*node.axes}, _ranges(node.axes, kind.shape))
    bound, ranges = sizes | {*node.source_axes}, _ranges(node.source_axes, node.source_shape)
    for v in node.values[1:]:
        yield from expression(v, shapes, bound, ranges)
    own = {**shapes, node.name: AccessShape(kind.dtype, kind.shape)}
    yield from access(node, node.name, node.positions, own, bound, ranges)


def _view(node: View, shapes: Shapes, sizes: set[sympy.Symbol]) -> Iterator[Fault]:
    if len(node.axes) != len(node.type.shape):
        yield Fault(node, f"{len(node.axes)} axes and a shape of {len(node.type.shape)} dimensions")
        return
    bound, ranges = sizes | {*node.axes}, _ranges(node.axes, node.type.shape)
    yield from index_symbols(node, node.offset, sizes)
    yield from access(node, node.source, node.indices, shapes, bound, ranges)
    for i in node.indices:
        if is_value(i):
            yield from expression(i, shapes, bound, ranges)
    if node.source in shapes and shapes[node.source].dtype is not node.type.dtype:
        yield Fault(node, f"a view of {shapes[node.source].dtype.value} as {node.type.dtype.value}", "use bitcast")


def _ranges(axes: tuple[sympy.Symbol, ...], extents: tuple[sympy.Expr, ...]) -> dict[sympy.Symbol, Interval]:
    # An empty domain reaches nothing, so nothing in it is out of range.
    if any(e.is_zero for e in extents):
        return {}
    return {v: (0, int(e) - 1 if e.is_Integer else None) for v, e in zip(axes, extents)}


def calls_fit(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """Calls name functions of the module, with arguments and results of their types and a value for every size."""
    if module is None:
        return
    types: dict[str, TensorType] = {i.name: i.type for i in graph.inputs if isinstance(i, Input)}
    for node in graph.nodes:
        if isinstance(node, CallTensor):
            for one in node.calls():
                yield from _call(one, types, module)
        types.update({n: t for n, t in zip(node.names, node.types) if t is not None})


def _call(node: CallTensor, types: dict[str, TensorType], module: IRModule) -> Iterator[Fault]:
    callee = module.functions.get(node.function)
    if callee is None:
        yield Fault(node, f"the module has no function {node.function!r}; it has {', '.join(module.functions)}")
        return
    if isinstance(callee, Graph):
        made = callee.types()
        wants = [(i.type.dtype, len(i.type.shape)) for i in callee.inputs if isinstance(i, Input)]
        gives = [(made[o].dtype, len(made[o].shape)) for o in callee.outputs if isinstance(o, str)]
    else:
        wants = [(b.dtype, len(b.shape)) for b in callee.given]
        made_by_name = callee.buffers
        gives = [(made_by_name[n].dtype, len(made_by_name[n].shape)) for n in callee.outputs]
    given = [(types[a].dtype, len(types[a].shape)) for a in node.args if a in types]
    for what, have, want in (
        ("arguments", given, wants),
        ("results", [(t.dtype, len(t.shape)) for t in node.types], gives),
    ):
        if have != want:
            yield Fault(node, f"{node.function} has {what} {_signature(want)}, here {_signature(have)}")
    if len(node.sizes) != len(callee.symbols.symbols):
        yield Fault(node, f"{node.function} has {len(callee.symbols.symbols)} sizes, here {len(node.sizes)}")


def _signature(kinds: Sequence[tuple[object, int]]) -> str:
    return f"({', '.join(f'{dtype!r} of {rank} dimensions' for dtype, rank in kinds)})"


def library_calls_fit(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """Targets are full names of ATen's kind."""
    for node in graph.nodes:
        if isinstance(node, Library) and "::" not in node.target:
            yield Fault(node, f"{node.target!r} names no op", 'write the full name: "aten::mm.default"')


Rule = Callable[[Graph, "IRModule | None"], Iterator[Fault]]
GRAPH_RULES: tuple[Rule, ...] = (
    names_are_defined,
    sizes_are_bound,
    values_are_sound,
    calls_fit,
    library_calls_fit,
)
