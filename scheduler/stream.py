"""Streams: a reduction that reads the results of a contraction as they are made, and what follows it row by row.

A contraction's results are many and wanted once, so a kernel makes a block of them, hands it to the reduction and
forgets it: the scores of an attention never exist in memory. Which nodes form a stream is decided before the greedy
search, since the search compares bytes of tensors that are there, and these never are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import sympy

from ..ir.dtypes import DType
from ..ir.expr import Call, Cast, Expr, Load, cast, is_value, loads, rewrite, symbol
from ..ir.graph import CallTensor, Compute, Graph, Node, Origin, Reduction, TensorType, node_values, uses
from ..ir.index import Extents, simplify
from ..ir.loops import Buffer
from ..ir.monoid import SUM, WEIGHTED
from ..ir.symbols import Size, SymbolTable
from .assemble import PARAM_ALIGN
from .domain import Binding, Digits, Domain, bind_access
from .function import Dim, Output, Stage, TensorFunction
from .members import simplify_value
from .order import in_order
from .split_keys import in_key_pieces
from .views import ViewMap, map_value

# What follows a stream row by row and is taken in: at most so many nodes.
MAX_EPILOGUE = 16


@dataclass(frozen=True, slots=True)
class Streams:
    """A graph in which every stream is a call, the functions by name, and how many nodes went into them."""

    graph: Graph
    functions: dict[str, TensorFunction]
    nodes: int = 0


def open_streams(graph: Graph, *, fast: bool) -> Streams:
    """Make one function of every reduction by a monoid with a vector component and what it streams.

    ``fast`` keeps float32 between fused operations where the graph rounds to a half type.
    """
    starts = [n for n in graph.nodes if isinstance(n, Reduction) and any(c.vector for c in n.monoid.components)]
    if not starts:
        return Streams(graph, {})
    views, types = ViewMap(graph), graph.types()
    readers = _readers(graph, views)
    needed = {views.base(o) for o in graph.outputs if isinstance(o, str)}
    functions: dict[TensorFunction, str] = {}
    calls: dict[str, list[CallTensor]] = {}
    gone: set[str] = set()
    others = _Others(graph)
    for group in _together(graph, starts):
        stream = _Stream(graph, views, readers, needed, group, others)
        stream.grow()
        others.add(stream)
        calls[stream.last] = [
            replace(call, function=functions.setdefault(function, f"{function.name}_{len(functions)}"))
            for function, call in _calls(*_Writer(stream, types, fast).build())
        ]
        gone.update(n for m in stream.members for n in m.names)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.names and node.names[0] in calls:
            nodes += calls[node.names[0]]
        elif not node.names or node.names[0] not in gone:
            nodes.append(node)
    named = {name: replace(f, name=name) for f, name in functions.items()}
    return Streams(replace(graph, nodes=in_order(nodes)), named, len(gone))


def _together(graph: Graph, starts: Sequence[Reduction]) -> list[tuple[Reduction, ...]]:
    """Starts that read the same contractions are one stream."""
    makers = {n: node for node in graph.nodes for n in node.names}
    groups: list[tuple[list[Reduction], set[str]]] = []
    for start in starts:
        read: set[str] = set()
        stack = [ld.buffer for ld in told(start)]
        while stack:
            node = makers.get(name := stack.pop())
            if isinstance(node, (Compute, Reduction)) and name not in read:
                read.add(name)
                if isinstance(node, Compute):
                    stack += [ld.buffer for ld in loads(node.value)]
        shared = {n for n in read if isinstance(m := makers[n], Reduction) and is_contraction(m)}
        home = next((g for g in groups if g[1] & shared and _alike(g[0][0], start)), None)
        if home is None:
            groups.append(([start], shared))
        else:
            home[0].append(start)
            home[1].update(shared)
    return [tuple(g[0]) for g in groups]


def _alike(a: Reduction, b: Reduction) -> bool:
    """Whether two starts may be of one function: sums over the same columns of the same rows."""
    if a.monoid is not WEIGHTED or b.monoid is not WEIGHTED or a.reduce_shape != b.reduce_shape:
        return False
    rows_a, rows_b = (
        [n for x, n in zip(r.axes, r.types[0].shape, strict=True) if x in row_axes(r)] for r in (a, b)
    )  # fmt: skip
    return rows_a == rows_b


def told(start: Reduction) -> list[Load]:
    """The loads that tell a start about each of its columns, apart from the vectors that it weighs."""
    value = start.values[0]
    if start.monoid is WEIGHTED:
        assert isinstance(value, Call)
        value = value.args[0]
    return list(loads(value))


def row_axes(start: Reduction) -> set[sympy.Symbol]:
    """The axes of a start that its scores have too."""
    scored = {x for ld in told(start) for i in ld.indices if not is_value(i) for x in i.free_symbols}
    return scored & set(start.axes)


def _calls(function: TensorFunction, call: CallTensor) -> list[tuple[TensorFunction, CallTensor]]:
    """A stream's function and its call; on a GPU that its rows do not occupy, those of pieces of it and of all."""
    pieces = None if call.types[0].device.startswith("cpu") else in_key_pieces(function)
    if pieces is None:
        return [(function, call)]
    first, second = pieces.calls(call, function.symbols.symbols)
    return [(pieces.first, first), (pieces.second, second)]


def _readers(graph: Graph, views: ViewMap) -> dict[str, list[Node]]:
    """Who reads each tensor, through views or not."""
    result: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.names and node.names[0] in views.views:
            continue
        for name in dict.fromkeys(views.base(u) for u in uses(node)):
            result.setdefault(name, []).append(node)
    return result


# --- which nodes ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Others:
    """The streams of a graph so far, which nodes are theirs, and where each node of the graph stands."""

    graph: Graph
    built: list[_Stream] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    # Members of streams, and what they compute in place.
    claimed: set[str] = field(default_factory=set)
    # What starts make: nobody computes in place what reads it, since it may never be in memory.
    started: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = {n: k for k, node in enumerate(self.graph.nodes) for n in node.names}
        for node in self.graph.nodes:
            if isinstance(node, Reduction) and any(c.vector for c in node.monoid.components):
                self.started.update(node.names)

    def add(self, stream: _Stream) -> None:
        self.built.append(stream)
        self.claimed |= stream.taken

    def apart(self, stream: _Stream, operands: Sequence[str]) -> bool:
        """Whether none of the operands, for which a stream would wait, waits for that stream.

        An earlier stream that reads what is made after this one began may wait for this one: nothing of it is read.
        """
        first = min(self.places[n] for s in stream.starts for n in s.names)
        forbidden = set(stream.taken)
        for other in self.built:
            if other.latest >= first:
                forbidden |= other.taken
        floor = min(self.places[n] for n in forbidden)
        stack, seen = list(operands), set()
        while stack:
            name = stack.pop()
            if name in forbidden:
                return False
            place = self.places.get(name, -1)
            if place > floor and name not in seen:
                seen.add(name)
                stack += uses(self.graph.nodes[place])
        return True


@dataclass(slots=True)
class _Stream:
    """The members of one stream in topological order, and the axes of each as digits of the domain of its results."""

    graph: Graph
    views: ViewMap
    readers: dict[str, list[Node]]
    needed: set[str]
    starts: tuple[Reduction, ...]
    others: _Others
    members: list[Compute | Reduction] = field(default_factory=list)
    # Members after the start, with their values read through views; the domain is that of the start's results.
    domain: Domain = field(default_factory=Domain)
    bindings: dict[str, Binding] = field(default_factory=dict)
    values: dict[str, tuple[Expr, ...]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    last: str = ""
    computes: dict[str, Compute] = field(default_factory=dict)
    # Members' names and those of nodes computed in place; those of the latter, by the node that reads them.
    taken: set[str] = field(default_factory=set)
    own: dict[str, set[str]] = field(default_factory=dict)
    # Where the last of what the stream reads stands.
    latest: int = -1

    def grow(self) -> None:
        """Take in what leads from contractions to the starts, then what follows."""
        self.computes = {n.name: n for n in self.graph.nodes if isinstance(n, Compute)}
        self.members = [*self._sources(), *self.starts]
        self.taken = {n for m in self.members for n in m.names}
        rows: list[Digits] = []
        for start in self.starts:
            binding: Binding = {}
            kept, found = row_axes(start), iter(rows)
            for axis, extent in zip(start.axes, start.types[0].shape, strict=True):
                if axis in kept and start is not self.starts[0]:
                    binding[axis] = next(found)
                else:
                    # What has one element has no digit: readers name it by 0, or not at all.
                    binding[axis] = (self.domain.add(extent),) if extent != 1 else ()
                if axis in kept and start is self.starts[0]:
                    rows.append(binding[axis])
            self.bindings[start.names[0]] = binding
        while len(self.bindings) <= MAX_EPILOGUE and self._follow():
            pass
        inside = {n for m in self.members for n in m.names}
        for m in self.members[self.members.index(self.starts[0]) :]:
            for name in m.names:
                outer = [r for r in self.readers.get(name, ()) if inside.isdisjoint(r.names)]
                if outer or name in self.needed:
                    self.outputs.append(name)
        self.last = self.members[-1].names[0]
        read = {u for m in self.members for u in uses(m)} | {
            ld.buffer for values in self.values.values() for v in values for ld in loads(v)
        }
        self.latest = max((self.others.places.get(n, -1) for n in read - self.taken), default=-1)

    def _sources(self) -> list[Compute | Reduction]:
        """The nodes between a contraction and the start's first value, the contraction among them, in order."""
        makers = {n: node for node in self.graph.nodes for n in node.names}
        found: list[Compute | Reduction] = []
        inside = {n for s in self.starts for n in s.names}
        stack = [ld.buffer for s in self.starts for ld in told(s)]
        while stack:
            node = makers.get(stack.pop())
            if not isinstance(node, (Compute, Reduction)) or node.names[0] in inside:
                continue
            if node.names[0] in self.others.claimed:
                continue
            if isinstance(node, Compute) and not self._leads_back(node, makers):
                continue
            if isinstance(node, Reduction) and not is_contraction(node):
                continue
            others = [r for n in node.names for r in self.readers.get(n, ()) if inside.isdisjoint(r.names)]
            if others or not self.needed.isdisjoint(node.names) or not self._is_read_plainly(node):
                continue
            inside.update(node.names)
            found.append(node)
            if isinstance(node, Compute):
                stack += [ld.buffer for ld in loads(node.value)]
        return [n for n in self.graph.nodes if any(n is m for m in found)]  # type: ignore[misc]

    def _is_read_plainly(self, node: Compute | Reduction) -> bool:
        """Whether each reader reads one element of a node, at axes of its own."""
        for name in node.names:
            for reader in self.readers.get(name, ()):
                assert isinstance(reader, (Compute, Reduction))
                at = {ld.indices for v in node_values(reader) for ld in loads(v) if ld.buffer == name}
                if len(at) != 1 or not all(isinstance(i, sympy.Symbol) for i in next(iter(at))):
                    return False
        return True

    def _leads_back(self, node: Compute, makers: dict[str, Node]) -> bool:
        """Whether a node reads a contraction's results, directly or through other element-wise nodes."""
        for name in {ld.buffer for ld in loads(node.value)}:
            made = makers.get(name)
            if isinstance(made, Reduction) and is_contraction(made):
                return True
            if isinstance(made, Compute) and self._leads_back(made, makers):
                return True
        return False

    def _follow(self) -> bool:
        """Take in one node that reads results of the stream, element by element, if all it reads is at hand."""
        made = {n: m for m in self.members[self.members.index(self.starts[0]) :] for n in m.names}
        inside = {n for m in self.members for n in m.names}
        for node in (r for n in made for r in self.readers.get(n, ()) if isinstance(r, Compute)):
            if node.name in inside or node.name in self.others.claimed or not self._is_only_way(node, made):
                continue
            binding, values = self._bound(node, made)
            if binding is None:
                continue
            foreign = [b for ld in loads(values[0]) for b in [self.views.base(ld.buffer)] if b not in made]
            if not self.others.apart(self, foreign):
                continue
            self.members.append(node)
            self.taken |= {node.name, *self.own[node.name]}
            self.bindings[node.name], self.values[node.name] = binding, values
            return True
        return False

    def _is_only_way(self, node: Compute, made: dict[str, Compute | Reduction]) -> bool:
        """Whether nobody else reads the results that a node reads, so that they need not be written."""
        read = {self.views.base(u) for u in uses(node)} & made.keys()
        return all(
            n not in self.needed
            and all(r.names == node.names or (r.names and r.names[0] in made) or self._is_next(r, made)
                    for r in self.readers[n])
            for n in read
        )  # fmt: skip

    def _is_next(self, node: Node, made: dict[str, Compute | Reduction]) -> bool:
        """Whether a node reads results of the stream alone, so that it can be taken in whatever else is."""
        if not isinstance(node, Compute) or not all(self.views.base(u) in made for u in uses(node)):
            return False
        return self._bound(node, made)[0] is not None

    def _bound(
        self, node: Compute, made: dict[str, Compute | Reduction]
    ) -> tuple[Binding, tuple[Expr, ...]] | tuple[None, tuple[()]]:
        """The node's axes as digits of the domain, and its value read through views; None where it does not line
        up."""
        extents = dict(zip(node.axes, node.type.shape, strict=True))
        value = self._with_own_operands(self.views.resolve(node.value, extents), node, extents, made)
        trial, binding = self.domain.copy(), Binding()
        whole: set[int] = set()
        for ld in loads(value):
            if ld.buffer not in made:
                continue
            if any(is_value(i) for i in ld.indices):
                return None, ()
            maker = made[ld.buffer]
            places = [self.bindings[maker.names[0]][a] for a in maker.axes]
            # Maxima and sums are those of a row whatever the feature: they may be read at the first.
            digits: list[Digits | None] = [() if i == 0 else d for i, d in zip(ld.indices, places, strict=True)]
            whole.update(d for i, own in zip(ld.indices, places, strict=True) if i != 0 for d in own)
            if not bind_access(trial, ld.indices, digits, extents, binding):
                return None, ()
        covered = [d for a in node.axes for d in binding.get(a, ())]
        missing = [a for a in node.axes if a not in binding and extents[a] != 1]
        if missing or len(trial.splits) != len(self.domain.splits) or sorted(covered) != sorted(whole):
            return None, ()
        return {a: binding.get(a, ()) for a in node.axes}, (value,)

    def _with_own_operands(
        self, value: Expr, node: Compute, extents: Extents, made: dict[str, Compute | Reduction]
    ) -> Expr:
        """The value with element-wise operands that nobody else reads computed in place: gates, biases."""
        mine = {node.name}

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.buffer in made or e.buffer in self.needed or len(mine) > MAX_EPILOGUE:
                return None
            other = self.computes.get(e.buffer)
            if other is None or not all(r.names and mine.issuperset(r.names) for r in self.readers[e.buffer]):
                return None
            elsewhere = self.others.started - self.bindings.keys()
            if e.buffer in self.others.claimed or any(self.views.base(u) in elsewhere for u in uses(other)):
                return None
            mine.add(e.buffer)
            moved = map_value(other.value, dict(zip(other.axes, e.indices, strict=True)))
            moved = rewrite(moved, lambda _: None, lambda i: simplify(i, extents, self.views.table))
            return rewrite(self.views.resolve(moved, extents), leaf)

        result = rewrite(value, leaf)
        self.own[node.name] = mine
        return result


def is_contraction(node: Reduction) -> bool:
    """A sum over one axis of products of two operands, one of which lacks an axis of the result that the other has."""
    if node.monoid.name != "sum" or len(node.reduce_axes) != 1:
        return False
    (value,) = node.values
    while isinstance(value, Cast):
        value = value.value
    args = getattr(value, "args", ())
    if getattr(value, "fn", "") != "mul" or len(args) != 2:
        return False
    axes = set(node.axes)
    first, second = ({s for ld in loads(a) for i in ld.indices if not is_value(i) for s in i.free_symbols & axes}
                     for a in args)  # fmt: skip
    return first != second


# --- the function -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    """Writes a stream as a tensor function: rows are the axes of the scores but the last, which is the inner one;
    features and what a contraction sums over are dimensions of their stages alone."""

    stream: _Stream
    types: dict[str, TensorType]
    fast: bool
    extents: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    inputs: dict[str, Buffer] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    # The axes of each member, and the dimensions that a reduction combines, as dimensions of the function.
    axes: dict[str, tuple[sympy.Symbol, ...]] = field(default_factory=dict)
    over: dict[str, tuple[sympy.Symbol, ...]] = field(default_factory=dict)
    kinds: dict[str, DType] = field(default_factory=dict)
    # The dimensions of the function that stand for those of the domain.
    digits: dict[int, sympy.Symbol] = field(default_factory=dict)

    def build(self) -> tuple[TensorFunction, CallTensor]:
        s = self.stream
        rows, inner, extra = self._dimensions()
        made = [n for m in s.members for n in m.names]
        self.results = {n: f"t{k}" for k, n in enumerate(made)}
        stages = tuple(self._stage(m) for m in s.members)
        outputs = tuple(self._output(n, k) for k, n in enumerate(s.outputs))
        dims = [tuple(Dim(v, self._canonical(self.extents[v])) for v in part) for part in (rows, inner, extra)]
        used = [z for z in s.graph.symbols.sizes if z.symbol in self.sizes]
        ordered = sorted(used, key=lambda z: int(self.sizes[z.symbol].name[1:]))
        table = SymbolTable(tuple(Size(self.sizes[z.symbol], z.lower, z.upper, z.divisor, z.hint) for z in ordered))
        function = TensorFunction(
            self._name(), dims[0], dims[1], tuple(self.inputs.values()), outputs, stages, table, dims[2]
        )
        origins: tuple[Origin, ...] = tuple(dict.fromkeys(o for m in s.members for o in m.origins))
        types = tuple(self.types[n] for n in s.outputs)
        sizes = tuple(z.symbol for z in ordered)
        return function, CallTensor(tuple(s.outputs), types, function.name, tuple(self.inputs), sizes, origins)

    def _dimensions(self) -> tuple[list[sympy.Symbol], list[sympy.Symbol], list[sympy.Symbol]]:
        """Rows, inner and extra dimensions; and, on the way, every member's axes in terms of them."""
        s, start = self.stream, self.stream.starts[0]
        rows: list[sympy.Symbol] = []
        extra: list[sympy.Symbol] = []
        inner = [symbol(f"r{k}") for k in range(len(start.reduce_axes))]
        self.extents |= dict(zip(inner, start.reduce_shape, strict=True))
        grids: dict[str, dict[sympy.Symbol, sympy.Symbol]] = {}
        for each in s.starts:
            grid, kept, placed = dict(zip(each.reduce_axes, inner, strict=True)), row_axes(each), iter(list(rows))
            for axis, extent in zip(each.axes, each.types[0].shape, strict=True):
                if axis in kept and each is not start:
                    grid[axis] = next(placed)
                    continue
                part, prefix = (rows, "i") if axis in kept else (extra, "x")
                grid[axis] = symbol(f"{prefix}{len(part)}")
                part.append(grid[axis])
                self.extents[grid[axis]] = extent
                self.digits.update((d, grid[axis]) for d in s.bindings[each.names[0]][axis])
            grids[each.names[0]] = grid
            self.axes[each.names[0]] = tuple(grid[a] for a in each.axes)
            self.over[each.names[0]] = tuple(inner)
        at = s.members.index(s.starts[-1])
        for k in range(s.members.index(start) - 1, -1, -1):
            m = s.members[k]
            reader, load = next((r, ld) for r in s.members[k + 1 : at + 1] for v in node_values(r) for ld in loads(v)
                                if ld.buffer in m.names)  # fmt: skip
            env = grids.get(reader.names[0]) or dict(zip(reader.axes, self.axes[reader.names[0]], strict=True))
            self.axes[m.names[0]] = tuple(i.xreplace(env) for i in load.indices)
            if isinstance(m, Reduction):
                own = [symbol(f"x{len(extra) + k}") for k in range(len(m.reduce_axes))]
                extra += own
                self.extents |= dict(zip(own, m.reduce_shape, strict=True))
                self.over[m.names[0]] = tuple(own)
        single = [grids[start.names[0]][a] for a in start.axes if not s.bindings[start.names[0]][a]]
        for m in s.members[at + 1 :]:
            dims = (self.digits[d] for a in m.axes for d in s.bindings[m.names[0]][a])
            self.axes[m.names[0]] = (*dims, *(v for v in single if v in rows or len(s.starts) == 1))
        return rows, inner, extra

    # --- names --------------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        ops: dict[str, None] = {}
        for m in self.stream.members:
            for o in m.origins:
                ops[re.sub(r"\W+", "_", o.op.split(".")[1] if o.op.count(".") else o.op).strip("_")] = None
        words = list(ops)[-3:]
        return "_".join([self.stream.starts[0].monoid.name, *words])[:60].rstrip("_")

    def _canonical(self, expr: sympy.Expr) -> sympy.Expr:
        """Size symbols renamed in order of appearance."""
        for s in sorted(expr.free_symbols - self.extents.keys(), key=lambda s: s.name):
            if s not in self.sizes:
                self.sizes[s] = symbol(f"s{len(self.sizes)}")
        return expr.xreplace(self.sizes) if expr.free_symbols else expr

    def _buffer(self, name: str, t: TensorType) -> Buffer:
        shape, strides = (tuple(self._canonical(e) for e in part) for part in (t.shape, t.strides))
        return Buffer(name, shape, strides, t.dtype, align=PARAM_ALIGN)

    # --- stages -------------------------------------------------------------------------------------------------------

    def _stage(self, m: Compute | Reduction) -> Stage:
        name = m.names[0]
        env = self._places(m)
        own = {*self.axes[name], *self.over.get(name, ())}
        values = tuple(self._value(v, env, own) for v in self.stream.values.get(name, self._through_views(m)))
        if self.fast and isinstance(m, Compute) and isinstance(values[0], Cast) and values[0].dtype.is_half:
            # The value stays in float32; where it leaves the kernel it is rounded.
            values = (values[0].value,) if values[0].value.dtype is DType.FLOAT32 else values
        self.kinds.update(zip(m.names, (v.dtype for v in values), strict=True))
        axes = self.axes[name]
        monoid = m.monoid if isinstance(m, Reduction) else None
        if monoid is WEIGHTED:
            monoid = SUM  # here a sum like any other
        results = tuple(self.results[n] for n in m.names)
        return Stage(results, values, True, monoid, m.origins, axes, self.over.get(name))

    def _places(self, m: Compute | Reduction) -> dict[sympy.Symbol, sympy.Expr]:
        """The axes of a member over the dimensions of the function."""
        name = m.names[0]
        binding = self.stream.bindings.get(name)
        if binding is None or isinstance(m, Reduction):
            env = dict(zip(m.axes, self.axes[name], strict=True))
            if isinstance(m, Reduction):
                env |= dict(zip(m.reduce_axes, self.over[name], strict=True))
            return env
        return {a: self._number([self.digits[d] for d in binding[a]]) for a in m.axes}

    def _number(self, digits: Sequence[sympy.Symbol]) -> sympy.Expr:
        terms, step = [], sympy.S.One
        for d in reversed(digits):
            terms.append(d * step)
            step = step * self.extents[d]
        return sympy.Add(*terms)

    def _through_views(self, m: Compute | Reduction) -> tuple[Expr, ...]:
        reduced = zip(m.reduce_axes, m.reduce_shape, strict=True) if isinstance(m, Reduction) else ()
        extents = {v: e for v, e in [*zip(m.axes, m.types[0].shape, strict=True), *reduced] if e != 1}
        return tuple(self.stream.views.resolve(v, extents) for v in node_values(m))

    def _value(self, value: Expr, env: dict[sympy.Symbol, sympy.Expr], own: set[sympy.Symbol]) -> Expr:
        """A value of a member whose dimensions are ``own``, over dimensions of the function."""
        makers = {n: m for m in self.stream.members for n in m.names}

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load):
                return None
            made = makers.get(e.buffer)
            if made is None:
                return Load(self._input(e.buffer), e.indices, e.dtype)
            # A feature of one element is a dimension of what has it alone.
            at = tuple(v if v in own or self.extents.get(v) != 1 else sympy.S.Zero for v in self.axes[made.names[0]])
            return cast(Load(self.results[e.buffer], at, self.kinds[e.buffer]), e.dtype)

        # A row of one element keeps its name: it is the row of a tile.
        extents = {v: e for v, e in self.extents.items() if e != 1}

        def index(i: sympy.Expr) -> sympy.Expr:
            moved = i.xreplace(env) if i.free_symbols else i
            return self._canonical(simplify(moved, extents, self.stream.graph.symbols))

        return simplify_value(rewrite(value, leaf, index), self.fast)

    def _input(self, name: str) -> str:
        buffer = self.inputs.get(name)
        if buffer is None:
            buffer = self.inputs[name] = self._buffer(f"in{len(self.inputs)}", self.types[name])
        return buffer.name

    def _output(self, name: str, k: int) -> Output:
        member = next(m for m in self.stream.members if name in m.names)
        env = self._places(member)
        indices = tuple(self._canonical(env[a]) for a in member.axes)
        return Output(self._buffer(f"out{k}", self.types[name]), self.results[name], indices)
