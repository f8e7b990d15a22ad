"""The oracle: what a loop nest or a graph computes, by definition.

Slow and obvious. Every primitive, rule and emitter is tested against it. Arrays are logical: element ``a[i, j]`` is
the element of the buffer at indices ``(i, j)``, in whatever memory order the array has; strides are layout and never
meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NoReturn, TypeAlias

import numpy as np
import sympy

from ..expr.intrinsics import INTRINSICS, ScalarFunction
from ..expr.symbols import Size, SymbolTable
from ..expr.value import Load, free_symbols, is_value, symbol
from ..function.function import TensorFunction
from ..graph.graph import (
    CallTensor,
    Compute,
    Graph,
    Input,
    IRModule,
    Library,
    Node,
    Reduction,
    Scan,
    Scatter,
    TensorType,
    View,
    uses,
)
from ..graph.regions import write_out_regions
from ..nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Buffer,
    Loop,
    LoopNest,
    Scope,
    Statement,
    Store,
    Update,
    contiguous_strides,
)
from .arrays import Array, Arrays, OracleError, by_name, logical, poison, size
from .function import run_function
from .text import NestText

LibraryCall: TypeAlias = Callable[[Library, Mapping[str, Array]], Sequence[Array]]


def run_nest(nest: LoopNest, inputs: Arrays, sizes: Mapping[str, int], *, backward: bool = False) -> dict[str, Array]:
    """Run a nest, every loop one iteration after the other, and return the outputs by name.

    ``inputs`` gives logical arrays by name, or in order for the parameters that come with content; a one-dimensional
    array where the buffer has another rank is its storage, read at the buffer's strides. An output that is given too
    starts from that content (a nest that writes in place). ``sizes`` gives every size symbol by name. What nothing
    has written is NaN, or garbage where the type has none. ``backward`` runs the parallel and bound loops from their
    ends, which must change nothing.

    Raises:
        OracleError: an index out of range, an axis outside its extent, a missing or misshapen input.
    """
    wanted = {b.name for b in nest.given}
    given = by_name(inputs, [b.name for b in nest.given], nest.name)
    integers = {s.name: size(s, sizes) for s in nest.symbols.symbols}
    arrays: dict[str, Array] = {}
    for buffer in (*nest.params, *nest.locals):
        shape = tuple(size(e, sizes) for e in buffer.shape)
        if buffer.name in given and buffer in nest.params:
            array = logical(buffer, given[buffer.name], shape, sizes)
            arrays[buffer.name] = array.copy() if buffer.name in nest.outputs else array
        elif buffer in nest.params and buffer.name in wanted:
            raise OracleError(f"{nest.name}: no input for parameter {buffer.name!r}")
        else:
            arrays[buffer.name] = poison(shape, buffer.dtype)
    with np.errstate(all="ignore"):
        _compiled(nest, backward, tuple(INTRINSICS.values()))(arrays, integers)
    return {name: arrays[name] for name in nest.outputs}


@lru_cache(maxsize=512)
def _compiled(
    nest: LoopNest, backward: bool, intrinsics: tuple[ScalarFunction, ...]
) -> Callable[[Mapping[str, Array], Mapping[str, int]], None]:
    """A nest as a function; ``intrinsics`` are what the functions of users mean at the time."""
    text = NestText(nest, backward)
    source = text.source()
    scope = {**text.globals, "out_of_range": _out_of_range, "bad_axis": _bad_axis}
    exec(compile(source, f"<oracle of {nest.name}>", "exec"), scope)
    kernel: Callable[[Mapping[str, Array], Mapping[str, int]], None] = scope["kernel"]
    return kernel


def _out_of_range(block: str, verb: str, buffer: str, indices: tuple[int, ...], array: Array) -> NoReturn:
    raise OracleError(f"block {block}: {verb} {buffer}[{', '.join(map(str, indices))}], whose shape is {array.shape}")


def _bad_axis(block: str, axis: str, value: int, extent: int) -> NoReturn:
    raise OracleError(
        f"block {block}: axis {axis} is bound to {value}, outside range({extent}); a predicate is missing"
    )


# --- graphs -----------------------------------------------------------------------------------------------------------


def run_graph(
    function: Graph,
    inputs: Arrays,
    sizes: Mapping[str, int],
    *,
    module: IRModule | None = None,
    library: LibraryCall | None = None,
) -> dict[str, Array]:
    """Run a graph node by node and return its tensor outputs by name.

    ``inputs`` gives logical arrays by name, or in the order of the graph's tensor inputs. ``module`` holds the
    functions that ``CallTensor`` names; ``library(node, arrays)`` gives the results of library calls.

    Raises:
        OracleError: as ``run_nest``; a library call without ``library``; a call without ``module``.
    """
    function = write_out_regions(function)
    tensors = [i for i in function.inputs if isinstance(i, Input)]
    given = by_name(inputs, [i.name for i in tensors], function.name)
    arrays: dict[str, Array] = {}
    types = function.types()
    for i in tensors:
        if i.name not in given:
            raise OracleError(f"{function.name}: no input for {i.name!r}")
        shape = tuple(size(e, sizes) for e in i.type.shape)
        arrays[i.name] = logical(_buffer(i.name, i.type), given[i.name], shape, sizes)
    for node in function.nodes:
        match node:
            case Library():
                if library is None:
                    raise OracleError(f"{function.name}: library call {node.target}; pass library= to run it")
                arrays.update(zip(node.names, library(node, arrays), strict=True))
            case CallTensor():
                for one in node.calls():
                    results = _call(one, arrays, types, sizes, module, library)
                    arrays.update(results)
                    arrays.update({t: results[n] for n, t in zip(one.names, one.into) if t is not None})
            case _:
                nest = _element_nest(function, node)
                arrays.update(run_nest(nest, {u: arrays[u] for u in uses(node)}, sizes))
    return {o: arrays[o] for o in function.outputs if isinstance(o, str)}


def _call(
    node: CallTensor,
    arrays: Mapping[str, Array],
    types: Mapping[str, TensorType],
    sizes: Mapping[str, int],
    module: IRModule | None,
    library: LibraryCall | None,
) -> dict[str, Array]:
    if module is None or node.function not in module.functions:
        raise OracleError(f"call of {node.function!r}, which is not in the module")
    callee = module.functions[node.function]
    bound = {s.name: size(v, sizes) for s, v in zip(callee.symbols.symbols, node.sizes, strict=True)}
    args = [arrays[a] for a in node.args]
    match callee:
        case Graph():
            results = run_graph(callee, args, bound, module=module, library=library)
            names = [o for o in callee.outputs if isinstance(o, str)]
        case LoopNest():
            results, names = run_nest(callee, args, bound), list(callee.outputs)
        case TensorFunction():
            given = [
                _seen(a, types[n], b, sizes, bound) for n, a, b in zip(node.args, args, callee.inputs, strict=True)
            ]
            made = run_function(callee, given, bound)
            return {
                name: _shown(made[o.buffer.name], o.buffer, kind, sizes, bound)
                for name, kind, o in zip(node.names, node.types, callee.outputs, strict=True)
            }
    return {mine: results[theirs] for mine, theirs in zip(node.names, names, strict=True)}


def _seen(array: Array, kind: TensorType, buffer: Buffer, sizes: Mapping[str, int], bound: Mapping[str, int]) -> Array:
    """A tensor as a function sees it: the memory itself where its parameter has other dimensions."""
    if array.shape == tuple(size(e, bound) for e in buffer.shape):
        return array
    strides = tuple(size(s, sizes) for s in kind.strides)
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) if array.size else 0
    memory = np.zeros(span, array.dtype)
    _strided(memory, array.shape, strides)[...] = array
    return memory


def _shown(array: Array, buffer: Buffer, kind: TensorType, sizes: Mapping[str, int], bound: Mapping[str, int]) -> Array:
    """What a function has written, with the dimensions of the tensor that it is."""
    shape, strides = (tuple(size(e, sizes) for e in part) for part in (kind.shape, kind.strides))
    if array.shape == shape:
        return array
    steps = tuple(size(s, bound) for s in buffer.strides)
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, steps, strict=True)) if array.size else 0
    memory = np.zeros(span, array.dtype)
    _strided(memory, array.shape, steps)[...] = array
    return _strided(memory, shape, strides)


def _strided(memory: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    return np.lib.stride_tricks.as_strided(memory, shape, tuple(s * memory.itemsize for s in strides))


def _buffer(name: str, kind: TensorType) -> Buffer:
    return Buffer(name, kind.shape, kind.strides, kind.dtype)


def _element_nest(function: Graph, node: Node) -> LoopNest:
    """One node as loops over its elements."""
    match node:
        case Reduction():
            axes = [Axis(v, e) for v, e in zip(node.axes, node.types[0].shape, strict=True)]
            reduced = [Axis(v, e, AxisKind.REDUCTION) for v, e in zip(node.reduce_axes, node.reduce_shape, strict=True)]
            targets = tuple(Access(n, node.axes) for n in node.names)
            return _loops(function, node, (*axes, *reduced), (Update(node.monoid, targets, node.values),))
        case Scan():
            return _scan_nest(function, node)
        case Scatter():
            return _scatter_nest(function, node)
        case Compute():
            value = node.value
        case View():
            dtype = node.type.dtype
            value = Load(node.source, node.indices, dtype)
        case _:
            raise OracleError(f"{type(node).__name__} is no function of elements")
    axes = [Axis(v, e) for v, e in zip(node.axes, node.type.shape, strict=True)]
    return _loops(function, node, tuple(axes), (Store(node.name, node.axes, value),))


def _scan_nest(function: Graph, node: Scan) -> LoopNest:
    axes = tuple(
        Axis(v, e, AxisKind.SCAN if v == node.scan_axis else AxisKind.SPATIAL)
        for v, e in zip(node.axes, node.types[0].shape, strict=True)
    )
    kept = [a for a in axes if a.kind is AxisKind.SPATIAL]
    where, shape = tuple(a.var for a in kept), tuple(a.extent for a in kept)
    states = tuple(
        Buffer(f"{n}_state", shape, contiguous_strides(shape), v.dtype, Scope.LOCAL)
        for n, v in zip(node.names, node.values, strict=True)
    )
    update = Update(node.monoid, tuple(Access(s.name, where) for s in states), node.values)
    stores = (Store(n, node.axes, Load(s.name, where, s.dtype)) for n, s in zip(node.names, states, strict=True))
    return _loops(function, node, axes, (update, *stores), states)


def _scatter_nest(function: Graph, node: Scatter) -> LoopNest:
    places = node.positions
    first = Store(node.name, node.axes, node.initial)
    update: Statement = Store(node.name, places, node.value)
    if node.monoid is not None:
        update = Update(node.monoid, (Access(node.name, places),), (node.value,), begins=False)
    axes = tuple(
        Axis(v, e, AxisKind.SPATIAL if v in places else AxisKind.SCATTER)
        for v, e in zip(node.source_axes, node.source_shape, strict=True)
    )
    kept = tuple(Axis(v, e) for v, e in zip(node.axes, node.type.shape, strict=True))
    return _loops(function, node, kept, (first,), then=(axes, (update,)))


def _loops(
    function: Graph,
    node: Compute | Reduction | Scan | Scatter | View,
    axes: tuple[Axis, ...],
    body: tuple[Statement, ...],
    states: tuple[Buffer, ...] = (),
    then: tuple[tuple[Axis, ...], tuple[Statement, ...]] | None = None,
) -> LoopNest:
    """A block over ``axes``; ``then`` another."""
    types = function.types()
    trees = [_tree(node.names[0], "loop", axes, body)]
    if then is not None:
        trees.append(_tree(f"{node.names[0]}_then", "then", *then))
        axes, body = (*axes, *then[0]), (*body, *then[1])
    kinds = [t for t in node.types if t is not None]
    outputs = [Buffer(n, t.shape, contiguous_strides(t.shape), t.dtype) for n, t in zip(node.names, kinds, strict=True)]
    inputs = [_buffer(u, types[u]) for u in uses(node)]
    used = {s for b in (*inputs, *outputs) for e in (*b.shape, *b.strides) for s in e.free_symbols}
    used |= {s for a in axes for s in a.extent.free_symbols}
    used |= {s for statement in body for s in _mentioned(statement)}
    used -= {a.var for a in axes}
    table = SymbolTable(tuple(Size(s) for s in sorted(used, key=lambda s: str(s.name))))
    return LoopNest(node.names[0], (*inputs, *outputs), node.names, tuple(trees), states, symbols=table)


def _tree(name: str, prefix: str, axes: tuple[Axis, ...], body: tuple[Statement, ...]) -> Loop | Block:
    loops = [symbol(f"{prefix}_{k}") for k in range(len(axes))]
    tree: Loop | Block = Block(name, axes, tuple(loops), body)
    for var, axis in zip(reversed(loops), reversed(axes), strict=True):
        tree = Loop(var, axis.extent, (tree,))
    return tree


def _mentioned(body: Store | Update) -> set[sympy.Symbol]:
    if isinstance(body, Update):
        sites = [i for t in body.targets for i in t.indices]
        values = {s for v in body.values for s in free_symbols(v)}
        return values | {s for i in sites for s in (free_symbols(i) if is_value(i) else i.free_symbols)}
    plain = {s for i in body.indices if not is_value(i) for s in i.free_symbols}  # type: ignore[union-attr]
    return free_symbols(body.value) | plain | {s for i in body.indices if is_value(i) for s in free_symbols(i)}
