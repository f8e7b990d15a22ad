"""The rules of graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import sympy

from ..expr.symbols import Interval
from ..expr.value import is_value
from ..function.function import Callee, TensorFunction
from ..graph.graph import (
    CONSTANT,
    CallRegion,
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
from ..graph.regions import handed_on
from ..graph.slices import MEMORY
from ..nest.loops import Buffer, LoopNest
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
    memories: dict[str, TensorType] = {}
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
            case View(source=source) if source in memories and not node.axes:
                yield from _slice(node, memories[source], sizes)
            case View():
                yield from _view(node, shapes, sizes)
            case Library(target=target, types=(TensorType() as kind,)) if target == MEMORY:
                memories[node.names[0]] = kind
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
        yield from expression(value, shapes, sizes | {*axes}, ranges, in_graph=True)


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
    yield from expression(node.initial, shapes, sizes | {*node.axes}, _ranges(node.axes, kind.shape), in_graph=True)
    bound, ranges = sizes | {*node.source_axes}, _ranges(node.source_axes, node.source_shape)
    for v in node.values[1:]:
        yield from expression(v, shapes, bound, ranges, in_graph=True)
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


def _slice(node: View, memory: TensorType, sizes: set[sympy.Symbol]) -> Iterator[Fault]:
    """A slice of memory that kernels write is told by where it begins and how it lies there; it is inside."""
    yield from index_symbols(node, node.offset, sizes)
    if node.type.dtype is not memory.dtype:
        yield Fault(node, f"a slice of {memory.dtype.value} as {node.type.dtype.value}", "give both one type")
    if any(n.is_zero for n in node.type.shape):
        return
    if not all(
        e.is_Integer for e in (node.offset, *node.type.shape, *node.type.strides, *memory.shape, *memory.strides)
    ):
        return
    last, end = node.offset + _reach(node.type), _reach(memory)
    if node.offset < 0 or last > end:
        yield Fault(node, f"the slice ends at element {last} of memory that ends at {end}")


def _reach(kind: TensorType) -> sympy.Expr:
    """How far behind the first element the last one lies."""
    return sympy.Add(*((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True)))


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
    match callee:
        case Graph():
            made = callee.types()
            wants = [(i.type.dtype, len(i.type.shape)) for i in callee.inputs if isinstance(i, Input)]
            gives = [(made[o].dtype, len(made[o].shape)) for o in callee.outputs if isinstance(o, str)]
        case TensorFunction() | LoopNest():
            yield from _kernel_call(node, types, callee)
            return
    given = [(types[a].dtype, len(types[a].shape)) for a in node.args if a in types]
    for what, have, want in (
        ("arguments", given, wants),
        ("results", [(t.dtype, len(t.shape)) for t in node.types], gives),
    ):
        if have != want:
            yield Fault(node, f"{node.function} has {what} {_signature(want)}, here {_signature(have)}")
    if len(node.sizes) != len(callee.symbols.symbols):
        yield Fault(node, f"{node.function} has {len(callee.symbols.symbols)} sizes, here {len(node.sizes)}")


def _kernel_call(node: CallTensor, types: dict[str, TensorType], callee: Callee) -> Iterator[Fault]:
    """The memory that a function or nest is given and gives is that of its parameters, at the sizes of the call."""
    if isinstance(callee, LoopNest):
        buffers = callee.buffers
        inputs, outputs = callee.given, tuple(buffers[n] for n in callee.outputs if n in buffers)
        order = [b.name for b in (*inputs, *(b for b in outputs if b not in inputs))]
        if order != [b.name for b in callee.params]:
            says = f"the parameters of {callee.name} are not its inputs and then its outputs"
            yield Fault(node, says, f"write them in the order {', '.join(order)}")
            return
    else:
        inputs, outputs = callee.inputs, tuple(o.buffer for o in callee.outputs)
    if len(node.sizes) != len(callee.symbols.symbols):
        names = ", ".join(s.name for s in callee.symbols.symbols) or "none"
        yield Fault(node, f"{callee.name} has the sizes {names}, here are {len(node.sizes)}")
        return
    if (len(node.args), len(node.names)) != (len(inputs), len(outputs)):
        says = f"{callee.name} has {len(inputs)} arguments and {len(outputs)} results"
        yield Fault(node, f"{says}, here {len(node.args)} and {len(node.names)}")
        return
    if node.into and len(node.into) != len(node.names):
        yield Fault(node, f"{len(node.names)} results, and into names {len(node.into)}")
    sizes = dict(zip(callee.symbols.symbols, node.sizes, strict=True))
    pairs = [(a, types[a], b) for a, b in zip(node.args, inputs, strict=True) if a in types]
    pairs += zip(node.names, node.types, outputs, strict=True)
    for name, kind, buffer in pairs:
        misfit = _misfit(kind, buffer, sizes)
        if misfit is not None:
            yield Fault(node, f"{name} as {buffer.name} of {callee.name}: {misfit}")
    devices = {kind.device for _, kind, _ in pairs if kind.shape}
    if len(devices) > 1:
        yield Fault(
            node, f"{callee.name} is given tensors of {' and '.join(sorted(devices))}", "copy them to one device"
        )
    written = {b.name: k for k, b in enumerate(outputs)}
    for k, b in enumerate(inputs):
        if b.name in written and node.args[k] != (node.into or (None,) * len(node.names))[written[b.name]]:
            says = f"{callee.name} writes over {b.name}, and the call does not say that {node.args[k]} is written"
            yield Fault(node, says, f"into={node.args[k]} for that result")


def _misfit(kind: TensorType, buffer: Buffer, sizes: dict[sympy.Symbol, sympy.Expr]) -> str | None:
    """Why a tensor is not the memory that a parameter is; None where it is. A parameter may see the same elements by
    other dimensions."""
    shape, strides = (tuple(e.xreplace(sizes) for e in part) for part in (buffer.shape, buffer.strides))
    if kind.dtype is not buffer.dtype:
        return f"{kind.dtype.value}, where {buffer.dtype.value} is wanted"
    if len(shape) == len(kind.shape):
        wanted = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
        given = [(n, s) for n, s in zip(kind.shape, kind.strides, strict=True) if n != 1]
        if all(_same(a, b) for x, y in zip(wanted, given, strict=False) for a, b in zip(x, y, strict=True)):
            if len(wanted) == len(given):
                return None
    if _same(sympy.Mul(*shape), sympy.Mul(*kind.shape)):
        return None
    return f"a shape of {_listed(kind.shape)}, where {_listed(shape)} is wanted"


def _same(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether two sizes are one, if not by their form then at two values of every size."""
    difference = sympy.expand(a - b)
    values = (840, 2520)  # which most divisors divide
    return all(difference.xreplace({s: sympy.Integer(n) for s in difference.free_symbols}) == 0 for n in values)


def _listed(shape: tuple[sympy.Expr, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _signature(kinds: Sequence[tuple[object, int]]) -> str:
    return f"({', '.join(f'{dtype!r} of {rank} dimensions' for dtype, rank in kinds)})"


def regions_fit(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """A region holds to the rules of graphs, and its calls fit what it takes and gives."""
    types: dict[str, TensorType] = {i.name: i.type for i in graph.inputs if isinstance(i, Input)}
    for node in graph.nodes:
        if isinstance(node, CallRegion):
            # What is wrong inside is shown as its call: its nodes are not of the graph that is printed alone.
            inside = [f for rule in GRAPH_RULES for f in rule(node.region, module)]
            yield from inside or _region(node, graph, types)
        types.update({n: t for n, t in zip(node.names, node.types) if t is not None})


def _region(node: CallRegion, graph: Graph, types: dict[str, TensorType]) -> Iterator[Fault]:
    region, carries, times = node.region, len(node.carried), node.times
    inputs, outputs = region.inputs, region.outputs
    given, gives = carries + len(node.taken) + len(node.shared), carries + times * (len(outputs) - carries)
    if times < 1 or any(len(row) != times for row in node.taken):
        yield Fault(node, f"it calls {region.name} {times} times, and does not take as much of everything")
    elif given != len(inputs) or len(outputs) < carries or len(node.names) != gives:
        says = f"{region.name} has {len(inputs)} inputs and {len(outputs)} outputs, of which {carries} are carried"
        yield Fault(node, f"{says}; {given} are given, and {len(node.names)} results of {times} calls are named")
    elif not all(isinstance(i, Input) for i in inputs) or not all(isinstance(o, str) for o in outputs):
        yield Fault(
            node, f"{region.name} takes or gives what is no tensor", "its sizes are those of the graph around it"
        )
    else:
        yield from _handed(node, graph, types)


def _handed(node: CallRegion, graph: Graph, types: dict[str, TensorType]) -> Iterator[Fault]:
    region, carries = node.region, len(node.carried)
    if region.symbols != graph.symbols:
        yield Fault(node, f"{region.name} has other sizes than the graph around it")
    wanted = region.types()
    outputs = [str(o) for o in region.outputs]
    inputs = [i.name for i in region.inputs]
    given = (*((n,) for n in node.carried), *node.taken, *((n,) for n in node.shared))
    for name, argument in ((i, a) for i, row in zip(inputs, given, strict=True) for a in row):
        if argument in types and types[argument] != wanted[name]:
            yield Fault(node, f"{region.name} takes {argument} as {name}, which is of another type")
    for name, output in zip(inputs, outputs[:carries]):
        if wanted[output] != wanted[name]:
            yield Fault(node, f"{region.name} hands on {output} as {name}, which is of another type")
    if len(handed_on(node)) != carries:
        yield Fault(node, f"{region.name} hands what it is given round in a circle")
    for some in (outputs[:carries], outputs[carries:]):
        if len(set(some)) != len(some):
            yield Fault(node, f"{region.name} gives one result twice")
    known, others = {i.name for i in graph.inputs}, {n for x in graph.nodes if x is not node for n in uses(x)}
    taken = Counter((*(n for row in node.taken for n in row), *{*node.carried, *node.shared}))
    for name in (n for row in node.taken for n in row):
        if name not in known or name in others or taken[name] > 1:
            yield Fault(node, f"{name} is to be an input of the graph that one call has for itself", "share it")
    for name in (n for row in node.kept for n in row):
        if name in others:
            yield Fault(node, f"{name} is kept of one call, and is read; it may only leave the graph", "carry it")


def library_calls_fit(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """Targets are full names of ATen's kind."""
    for node in graph.nodes:
        if isinstance(node, Library) and "::" not in node.target:
            yield Fault(node, f"{node.target!r} names no op", 'write the full name: "aten::mm.default"')


def constants_are_known(graph: Graph, module: IRModule | None) -> Iterator[Fault]:
    """What a node gives as a tensor of the model is a constant of the graph, of that type."""
    for node in graph.nodes:
        if isinstance(node, Library) and node.target == CONSTANT:
            name, (kind,) = node.args[0], node.types
            if name not in graph.constants:
                known = ", ".join(graph.constants) or "none"
                yield Fault(
                    node, f"the graph has no constant {name!r}; it has {known}", "constant(name, type, …) above"
                )
            elif graph.constants[name].kind != kind:
                yield Fault(graph.constants[name], f"constant {name!r} is not of the type that {node.names[0]} has")


Rule = Callable[[Graph, "IRModule | None"], Iterator[Fault]]
GRAPH_RULES: tuple[Rule, ...] = (
    names_are_defined,
    sizes_are_bound,
    values_are_sound,
    calls_fit,
    library_calls_fit,
    constants_are_known,
    regions_fit,
)
