"""The rules of the IR, as a table of small functions, and the error that shows which one is broken and where.

``verify`` runs before and after every pass. A rule yields a ``Fault`` for each object that breaks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import sympy

from ..errors import VerifyError
from ..expr.symbols import Interval
from ..expr.value import is_value, symbol
from ..function.function import TensorFunction
from ..graph.graph import Graph, IRModule
from ..nest.hints import Place, misfits
from ..nest.loops import (
    BLOCK_KINDS,
    Access,
    AxisKind,
    Block,
    DimKind,
    Loop,
    LoopKind,
    LoopNest,
    Scope,
    Update,
    blocks,
    walk_nodes,
)
from ..text.printer import show
from .expr import AccessShape, Fault, access, exact_range, expression, index_symbols
from .function import FUNCTION_RULES
from .graph import GRAPH_RULES
from .roles import roles_of_blocks_hold


def verify(obj: IRModule | Graph | TensorFunction | LoopNest) -> None:
    """Check every rule. Raises VerifyError, which shows the IR with the first culprit underlined and lists the rest."""
    match obj:
        case LoopNest():
            _report(obj, [f for rule in NEST_RULES for f in rule(obj)])
        case TensorFunction():
            _report(obj, [f for rule in FUNCTION_RULES for f in rule(obj)])
        case Graph():
            _report(obj, [f for rule in GRAPH_RULES for f in rule(obj, None)])
        case IRModule():
            if not isinstance(obj.functions.get(obj.main), Graph):
                known = ", ".join(obj.functions)
                raise VerifyError(f"the module's entry {obj.main!r} is no graph of it; it has {known}")
            # What graphs call comes first: a call is judged by parameters that are sound.
            for function in sorted(obj.functions.values(), key=lambda f: isinstance(f, Graph)):
                if isinstance(function, Graph):
                    _report(function, [f for rule in GRAPH_RULES for f in rule(function, obj)])
                else:
                    verify(function)


def _report(function: Graph | TensorFunction | LoopNest, faults: list[Fault]) -> None:
    if not faults:
        return
    first, *rest = faults
    more = [f"also: {f.message}" for f in rest[:8]] + ([f"and {len(rest) - 8} more"] if len(rest) > 8 else [])
    lines = [f"{function.name}: {first.message}", *_around(show(function, first.culprit))]
    raise VerifyError("\n".join([*lines, *([f"hint: {first.hint}"] if first.hint else []), *more]))


def _around(script: str, reach: int = 12) -> list[str]:
    """The underlined line with the lines near it, and the head of the function."""
    lines = script.rstrip().split("\n")
    at = next((k for k, line in enumerate(lines) if line.strip().startswith("^") and line.endswith(" here")), None)
    if at is None or len(lines) <= 4 * reach:
        return lines
    low, high = max(2, at - reach), at + reach
    middle = lines[low:high]
    return [*lines[:2], *(["    …"] if low > 2 else []), *middle, *(["    …"] if high < len(lines) else [])]


# --- rules of nests ---------------------------------------------------------------------------------------------------


def names_are_unique(nest: LoopNest) -> Iterator[Fault]:
    """Buffers, blocks and loop variables each have a name of their own."""
    buffers = (*nest.params, *nest.locals)
    for name in _doubles(b.name for b in buffers):
        yield Fault([b for b in buffers if b.name == name][-1], f"two buffers are called {name!r}")
    nodes = [n for n, _ in walk_nodes(nest.body)]
    for name in _doubles(n.name for n in nodes if isinstance(n, Block)):
        block = [n for n in nodes if isinstance(n, Block) and n.name == name][-1]
        yield Fault(block, f"two blocks are called {name!r}")
    for var in _doubles(n.var for n in nodes if isinstance(n, Loop)):
        culprit = [n for n in nodes if isinstance(n, Loop) and n.var == var][-1]
        yield Fault(culprit, f"two loops run over {var}", "loop variables are unique in a nest")
    for name in nest.outputs:
        if name not in {b.name for b in nest.params}:
            yield Fault(nest, f"output {name!r} is no parameter")


def symbols_are_bound(nest: LoopNest) -> Iterator[Fault]:
    """Shapes speak of sizes; extents, bindings and predicates of sizes and the loops around; axes' extents of sizes."""
    sizes = set(nest.symbols.symbols)
    for b in (*nest.params, *nest.locals):
        for e in (*b.shape, *b.strides):
            yield from index_symbols(b, e, sizes)
        if len(b.shape) != len(b.strides):
            yield Fault(b, f"{b.name} has {len(b.shape)} dimensions and {len(b.strides)} strides")
    for node, outer in walk_nodes(nest.body):
        around = sizes | {loop.var for loop in outer}
        if isinstance(node, Loop):
            yield from index_symbols(node, node.extent, around)
            if symbol(node.var.name) != node.var:
                yield Fault(node, f"{node.var} is not ir.expr.value.symbol({node.var.name!r})", "make symbols with it")
            continue
        for e in (*node.bindings, *(side for p in node.predicate for side in (p.lhs, p.rhs))):
            yield from index_symbols(node, e, around)
        for a in node.axes:
            yield from index_symbols(a, a.extent, sizes)


def axes_are_bound(nest: LoopNest) -> Iterator[Fault]:
    """Each axis of a block has one binding, and no binding surely leaves the axis' extent without a predicate."""
    for block, outer in blocks(nest):
        if len(block.axes) != len(block.bindings):
            yield Fault(block, f"{len(block.axes)} axes and {len(block.bindings)} bindings")
            continue
        for var in _doubles(a.var for a in block.axes):
            yield Fault(block, f"two axes are called {var}")
        ranges = {loop.var: _range(loop.extent) for loop in outer}
        for axis, binding in zip(block.axes, block.bindings, strict=True):
            reached = exact_range(binding, ranges) if not block.predicate else None
            if reached and axis.extent.is_Integer and not (reached[0] >= 0 and reached[1] < axis.extent):
                says = f"axis {axis.var} of extent {axis.extent} is bound to {reached[0]}..{reached[1]}"
                yield Fault(axis, says, "a split whose factors do not divide the extent needs a predicate")


def dimensions_agree(nest: LoopNest) -> Iterator[Fault]:
    """Axes of one name are one dimension of the function, or parts of it."""
    known: dict[sympy.Symbol, DimKind] = {}
    for axis in (a for block, _ in blocks(nest) for a in block.axes):
        dim = known.setdefault(axis.var, axis.dim)
        if dim is not axis.dim:
            says = f"{axis.var} is of the {axis.dim.value} dimensions here, of the {dim.value} ones above"
            yield Fault(axis, says, f"dim={dim.value}, or another name")


def bodies_are_sound(nest: LoopNest) -> Iterator[Fault]:
    """Types, ranks and ranges inside the statements."""
    shapes = {b.name: AccessShape(b.dtype, b.shape) for b in (*nest.params, *nest.locals)}
    sizes = set(nest.symbols.symbols)
    for block, _ in blocks(nest):
        bound = sizes | {a.var for a in block.axes}
        # A predicate may keep the axes from their ends.
        ranges = {} if block.predicate else {a.var: _range(a.extent) for a in block.axes}
        for s in block.body:
            targets = s.targets if isinstance(s, Update) else (Access(s.buffer, s.indices),)
            for t in targets:
                yield from access(t if isinstance(s, Update) else s, t.buffer, t.indices, shapes, bound, ranges)
                for i in t.indices:
                    if is_value(i):
                        yield from expression(i, shapes, bound, ranges)
            values = s.values if isinstance(s, Update) else (s.value,)
            for t, value in zip(targets, values):
                if t.buffer in shapes and shapes[t.buffer].dtype is not value.dtype:
                    says = f"{t.buffer} holds {shapes[t.buffer].dtype.value}, the value is {value.dtype.value}"
                    yield Fault(value, says, "cast the value")
            for value in values:
                yield from expression(value, shapes, bound, ranges)


def updates_fit(nest: LoopNest) -> Iterator[Fault]:
    """An update has a target and a value for each component; a reduction axis has an update."""
    for block, _ in blocks(nest):
        for s in block.body:
            if isinstance(s, Update):
                wanted = len(s.monoid.components)
                if not len(s.targets) == len(s.values) == wanted:
                    here = f"{len(s.targets)} targets and {len(s.values)} values"
                    yield Fault(s, f"{s.monoid.name} has {wanted} components, here {here}")
            elif block.axes_of(AxisKind.REDUCTION):
                hint = "make the axis spatial, or the store an update"
                yield Fault(s, "a store in a block with a reduction axis", hint)


def scatters_are_apart(nest: LoopNest) -> Iterator[Fault]:
    """What writes where data say goes on from what is there, and its spatial axes each select places of their own."""
    for block, _ in blocks(nest):
        if not block.is_scatter:
            continue
        for s in block.body:
            if isinstance(s, Update) and s.begins:
                yield Fault(s, "a scatter that begins by itself", "let another block begin the targets; begins=False")
        for axis in block.axes:
            if axis.kind is AxisKind.SCATTER or axis.extent == 1:
                continue
            if axis.kind is not AxisKind.SPATIAL or not all(axis.var in w.indices for w in block.writes):
                says = f"iterations of {axis.var} may write the same places"
                yield Fault(axis, says, "an axis that is no index of what is written is a scatter axis")


def buffers_are_written(nest: LoopNest) -> Iterator[Fault]:
    """Outputs are written, inputs are not, and a local buffer is written before it is read."""
    written: set[str] = set()
    scopes = {b.name: b.scope for b in (*nest.params, *nest.locals)}
    local = {b.name for b in nest.locals}
    for block, _ in blocks(nest):
        for load in block.reads:
            if load.buffer in local and load.buffer not in written | {w.buffer for w in block.writes}:
                yield Fault(load, f"{load.buffer} is read before anything writes it")
        for s in block.body:
            for t in s.targets if isinstance(s, Update) and not s.begins else ():
                if t.buffer in local and t.buffer not in written:
                    hint = "let the update begin by itself, or store the identity before it"
                    yield Fault(s, f"{t.buffer} is updated before anything writes it", hint)
        for w in block.writes:
            if w.buffer in scopes and w.buffer not in local and w.buffer not in nest.outputs:
                yield Fault(block, f"{w.buffer} is an input, and is written", "name it among the outputs")
            written.add(w.buffer)
    for b in nest.params:
        if b.name in nest.outputs and b.name not in written:
            yield Fault(b, f"nothing writes the output {b.name}")
        if b.scope is not Scope.GLOBAL:
            yield Fault(b, f"a parameter lives in memory, not in scope {b.scope.value}")


def loop_kinds_fit(nest: LoopNest) -> Iterator[Fault]:
    """Lanes and unrolled loops have constant extents; parallel and grid loops stand outside of them, unmixed."""
    inner_kinds = (LoopKind.VECTORIZED, LoopKind.UNROLLED, LoopKind.THREAD_X)
    for node, outer in walk_nodes(nest.body):
        if not isinstance(node, Loop):
            continue
        around = [loop.kind for loop in outer]
        if node.kind in (LoopKind.VECTORIZED, LoopKind.UNROLLED) and not node.extent.is_Integer:
            says = f"a {node.kind.value} loop needs a constant extent, not {node.extent}"
            yield Fault(node, says, "split it by a constant factor first")
        if node.kind is LoopKind.PARALLEL or node.kind in BLOCK_KINDS:
            for kind in inner_kinds:
                if kind in around:
                    yield Fault(node, f"a {node.kind.value} loop inside a {kind.value} loop", "reorder the loops")
            if node.kind in around:
                yield Fault(node, f"a {node.kind.value} loop inside another", "fuse the two, or bind one otherwise")
            if (node.kind is LoopKind.PARALLEL and set(around) & {*BLOCK_KINDS}) or (
                node.kind in BLOCK_KINDS and LoopKind.PARALLEL in around
            ):
                yield Fault(node, "parallel is a CPU's kind of loop and blockIdx a GPU's", "bind both for one target")


def hints_are_known(nest: LoopNest) -> Iterator[Fault]:
    """Every annotation is one of ir/nest/hints.py, in a place and of a value that it has there."""
    params = [b.name for b in nest.params]
    for node in (nest, *(n for n, _ in walk_nodes(nest.body))):
        place = Place.NEST if node is nest else Place.LOOP if isinstance(node, Loop) else Place.BLOCK
        kind = node.kind if isinstance(node, Loop) else None
        for says, mend in misfits(node.annotations, place, params, nest.outputs, kind):
            yield Fault(node, says, mend)


NEST_RULES: tuple[Callable[[LoopNest], Iterator[Fault]], ...] = (
    names_are_unique,
    symbols_are_bound,
    axes_are_bound,
    dimensions_agree,
    roles_of_blocks_hold,
    bodies_are_sound,
    updates_fit,
    scatters_are_apart,
    buffers_are_written,
    loop_kinds_fit,
    hints_are_known,
)


def _doubles(items: Iterator[object]) -> list[object]:
    return [item for item, count in Counter(items).items() if count > 1]


def _range(extent: sympy.Expr) -> Interval:
    """What a variable takes on; of an extent that is not a positive constant nothing is known."""
    return (0, int(extent) - 1) if extent.is_Integer and extent > 0 else (0, None)
