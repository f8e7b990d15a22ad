"""From groups to calls: each group becomes a canonical tensor function, equal ones become one, and the graph calls
them in order."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.index import expanded, simplify
from ...ir.expr.symbols import Size, SymbolTable
from ...ir.expr.value import Cast, Expr, Index, Load, always_rounded, cast, is_value, rewrite, symbol
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.graph.begun import is_wait
from ...ir.graph.facts import places_of
from ...ir.graph.graph import CallTensor, Graph, Library, Node, TensorType, View, size_makers, sizes_read, uses
from ...ir.graph.sequences import sequence_of
from ...ir.nest.loops import PARAM_ALIGN, Buffer
from ...ir.target import Target
from ..facts.domain import Digits
from ..facts.fusion_nodes import FusionNode, fusion_node_sizes
from ..facts.views import ViewMap
from ..rules import Capability, can
from .early_errors import sites, wait_for_checks
from .group import Group
from .pieces.column_pieces import in_column_pieces
from .pieces.two_stage import in_two_stages
from .tiles import kept, reduced

Call: TypeAlias = CallTensor
Unit: TypeAlias = Group | Library | CallTensor
# Elements from one position of a dimension of a group to the next, in a tensor.
Strides: TypeAlias = dict[int, int]


def assemble(
    graph: Graph, views: ViewMap, units: list[Unit], outside: set[str]
) -> tuple[list[Node], dict[str, TensorFunction]]:
    """The nodes of the fused graph in an order that respects dependences, and its functions by name."""
    needed = set(outside)
    for u in units:
        if isinstance(u, Group):
            needed.update(ld.buffer for m in u.nodes for ld in m.loads if ld.buffer not in u.produced)
    functions: dict[TensorFunction, str] = {}
    types = graph.types()
    nodes: list[Node] = []
    writer = _ViewWriter(graph, views, nodes)
    for u in _ordered(graph, views, units):
        if isinstance(u, Group):
            for function, call in _calls(*_Assembler(u, graph, types, needed).build(), u.target):
                name = functions.get(function)
                if name is None:
                    name = functions[function] = f"{function.name}_{len(functions)}"
                nodes.append(replace(call, function=name))
        else:
            for used in uses(u):
                writer.need(used)
            nodes.append(u)
    for out in graph.outputs:
        if isinstance(out, str):
            writer.need(out)
    return nodes, {name: replace(f, name=name) for f, name in functions.items()}


def _calls(function: TensorFunction, call: CallTensor, target: Target) -> list[tuple[TensorFunction, CallTensor]]:
    """A function and its call; where it reduces over rows too, or columns that occupy no GPU, and no rule does that in
    one kernel, those of its two parts."""
    if can(target, Capability.SPLIT_ROWS):
        return [(function, call)]
    split = in_two_stages(function, target.machine)
    if split is None:
        return in_column_pieces(function, call, target) or [(function, call)]
    return list(zip((split.first, split.second), split.calls(call, "pieces"), strict=True))


@dataclass(slots=True)
class _ViewWriter:
    """Writes the views that calls and outputs need, each once, straight onto the tensor that owns the memory."""

    graph: Graph
    views: ViewMap
    nodes: list[Node]
    by_name: dict[str, View] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.by_name = {n.name: n for n in self.graph.nodes if isinstance(n, View)}

    def need(self, name: str) -> None:
        view = self.by_name.get(name)
        if view is None or name in self.written:
            return
        self.written.add(name)
        source, offset = view.source, view.offset
        while source in self.by_name:
            offset, source = offset + self.by_name[source].offset, self.by_name[source].source
        _, axes, indices = self.views.views[name]
        self.nodes.append(View(name, view.type, source, axes, indices, offset, view.origins))


def _ordered(graph: Graph, views: ViewMap, units: list[Unit]) -> list[Unit]:
    """Units in topological order, ties broken by where the last node of a unit stood, which keeps lifetimes short.

    Sequences of calls keep their order, waits for collectives stand right before the first that reads what they wait
    for, and what looks at data that may be an error before what writes over inputs later in the model.
    """
    place = places_of(graph)
    maker: dict[str, int] = {}
    for k, u in enumerate(units):
        for name in u.produced if isinstance(u, Group) else u.names:
            maker[name] = k
    makers = size_makers(graph)
    needs: list[set[int]] = []
    keys: list[int] = []
    for k, u in enumerate(units):
        if isinstance(u, Group):
            read = {ld.buffer for m in u.nodes for ld in m.loads}
            if makers:
                read |= {makers[s] for m in u.nodes for s in fusion_node_sizes(m) & makers.keys()}
            keys.append(max(m.index for m in u.nodes))
        else:
            read = {views.base(n) for n in uses(u)}
            if makers:
                read |= {makers[s] for s in sizes_read(u) & makers.keys()}
            keys.append(max((place[n] for n in u.names), default=0))
        needs.append({maker[n] for n in read if n in maker} - {k})
    last: dict[str, int] = {}
    for k in sorted((k for k, u in enumerate(units) if not isinstance(u, Group)), key=keys.__getitem__):
        if (sequence := sequence_of(units[k])) is not None:  # type: ignore[arg-type]
            needs[k] |= {last[sequence]} if sequence in last else set()
            last[sequence] = k
    waits = {k for k, u in enumerate(units) if not isinstance(u, Group) and is_wait(u)}
    users: dict[int, list[int]] = {}
    for k, ns in enumerate(needs if waits else ()):
        for n in ns & waits:
            users.setdefault(n, []).append(k)
    for k in sorted(waits):
        keys[k] = min((keys[user] for user in users.get(k, ())), default=len(graph.nodes))
    order = _first_of_ready(needs, keys)
    found = sites(graph, views, units)
    while wait_for_checks(found, needs, order):
        order = _first_of_ready(needs, keys)
    return [units[k] for k in order]


def _first_of_ready(needs: list[set[int]], keys: list[int]) -> list[int]:
    """Each behind those that it needs, those with the least key first."""
    users: list[list[int]] = [[] for _ in needs]
    for k, ns in enumerate(needs):
        for n in ns:
            users[n].append(k)
    waiting = [len(n) for n in needs]
    ready = [(keys[k], k) for k, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    result: list[int] = []
    while ready:
        _, k = heapq.heappop(ready)
        result.append(k)
        for user in users[k]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (keys[user], user))
    assert len(result) == len(needs), "fusion made a cycle"
    return result


@dataclass(slots=True)
class _Assembler:
    group: Group
    graph: Graph
    types: dict[str, TensorType]
    needed: set[str]
    vars: dict[int, sympy.Symbol] = field(default_factory=dict)
    extents: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    inputs: dict[str, Buffer] = field(default_factory=dict)
    # Name in the graph -> name in the function; results kept in float32 though the graph says a half type.
    results: dict[str, str] = field(default_factory=dict)
    widened: dict[str, DType] = field(default_factory=dict)
    # The dimensions of what reductions over rows give, and those that they combine over.
    kept: tuple[sympy.Symbol, ...] = ()
    over: tuple[sympy.Symbol, ...] = ()
    # Strides of what is stored, then of what is read, once they were asked for.
    strides: list[Strides] | None = None

    def build(self) -> tuple[TensorFunction, CallTensor]:
        g = self.group
        g.nodes.sort(key=lambda m: m.index)
        rows = self._loop_order(g.domain.rows())
        # A scan goes along its digits in order, however they lie in memory.
        inner = g.domain.inner_order() if g.has_scan else self._loop_order(g.domain.inner_order())
        for prefix, dims in (("i", rows), ("r", inner)):
            for k, d in enumerate(dims):
                self.vars[d] = symbol(f"{prefix}{k}")
        self.extents = {v: g.domain.extents[d] for d, v in self.vars.items()}
        row_vars = tuple(self.vars[d] for d in rows)
        all_vars = (*row_vars, *(self.vars[d] for d in inner))
        if g.cross:
            gone = {self.vars[d] for d in reduced(g)} or set(row_vars)
            self.over = tuple(v for v in row_vars if v in gone)
            self.kept = tuple(v for v in all_vars if v in {self.vars[d] for d in kept(g)})
        made = [n for m in g.nodes for n in m.names]
        self.results = {n: f"t{k}" for k, n in enumerate(made)}
        stages = [self._stage(m, row_vars, all_vars) for m in g.nodes]
        outputs: list[Output] = []
        names: list[str] = []
        types: list[TensorType] = []
        types_of = {n: t for m in g.nodes for n, t in zip(m.names, m.types, strict=True)}
        for m in g.nodes:
            for n in m.names:
                if n in self.needed:
                    outputs.append(self._output(m, n, types_of[n], len(outputs)))
                    names.append(n)
                    types.append(types_of[n])
        dims_of = [Dim(v, self._canonical(self.extents[v])) for v in all_vars]
        known = {s.symbol: s for s in self.graph.symbols.sizes}
        by_canonical = [known[s] for s in self.sizes if s in known]
        table = SymbolTable(
            tuple(Size(self.sizes[s.symbol], s.lower, s.upper, s.divisor, s.hint) for s in by_canonical)
        )
        function = TensorFunction(
            self._name(), tuple(dims_of[: len(rows)]), tuple(dims_of[len(rows) :]), tuple(self.inputs.values()),
            tuple(outputs), tuple(stages), table,
        )  # fmt: skip
        origins = tuple(dict.fromkeys(o for m in g.nodes for o in m.origins))
        call = CallTensor(
            tuple(names),
            tuple(types),
            function.name,
            tuple(self.inputs),
            tuple(s.symbol for s in by_canonical),
            origins,
        )
        return function, call

    # --- loops --------------------------------------------------------------------------------------------------------

    def _loop_order(self, dims: list[int]) -> list[int]:
        """Dimensions in the memory order of the biggest tensor that the group touches, stores before loads."""
        if len(dims) < 2:
            return dims
        if self.strides is None:
            self.strides = self._strides_of_all()
        strides = max(self.strides, key=lambda found: len(found.keys() & set(dims)), default=Strides())
        return sorted(dims, key=lambda d: (-strides.get(d, 0), dims.index(d)))

    def _strides_of_all(self) -> list[Strides]:
        """Those of what the group stores, then of what it reads."""
        g, types = self.group, self.types
        strides = [
            self._strides([g.bindings[m.name][a] for a in m.axes], t)
            for m in g.nodes
            for n, t in zip(m.names, m.types, strict=True)
            if n in self.needed
        ]
        plain: dict[str, list[tuple[FusionNode, Load]]] = {}
        for m in g.nodes:
            for ld in m.loads:
                if not any(map(is_value, ld.indices)):
                    plain.setdefault(ld.buffer, []).append((m, ld))
        for name, known in g.reads.items():
            if name in types:
                found = self._strides([() if d is None else d for d in known], types[name])
                strides.append(self._steps(plain.get(name, []), types[name]) | found if None in known else found)
        return strides

    def _strides(self, axes: list[Digits], t: TensorType) -> Strides:
        hint = self.graph.symbols.hint
        result: Strides = {}
        for digits, stride in zip(axes, t.strides, strict=True):
            step = stride
            for d in reversed(digits):
                result[d] = hint(step)
                step = step * self.group.domain.extents[d]
        return result

    def _steps(self, sites: list[tuple[FusionNode, Load]], t: TensorType) -> Strides:
        """The same of a tensor that is read at sums of axes, such as every other row, or backward."""
        hint, result = self.graph.symbols.hint, Strides()
        for m, ld in sites:
            place = expanded(sympy.Add(*(i * s for i, s in zip(ld.indices, t.strides, strict=True))))
            for a in place.free_symbols & set(m.all_axes):
                step = abs(hint(place.coeff(a)))
                for d in reversed(self.group.bindings[m.name][a]) if step else ():
                    result.setdefault(d, step)
                    step *= hint(self.group.domain.extents[d])
        return result

    def _axis(self, digits: Digits) -> sympy.Expr:
        terms, step = [], sympy.S.One
        for d in reversed(digits):
            terms.append(self.vars[d] * step)
            step = step * self.group.domain.extents[d]
        return sympy.Add(*terms)

    def _places(self, m: FusionNode) -> dict[sympy.Symbol, sympy.Expr]:
        """Where each axis of a node is, in the variables of the loops."""
        found = {}
        for a, digits in self.group.bindings[m.name].items():
            place = self._axis(digits)
            found[a] = m.extents[a] - 1 - place if a in self.group.turned[m.name] else place
        return found

    # --- names --------------------------------------------------------------------------------------------------------

    def _canonical(self, expr: sympy.Expr) -> sympy.Expr:
        """Size symbols renamed in order of appearance."""
        if expr.is_Number or not (free := expr.free_symbols):
            return expr
        for s in sorted(free - self.extents.keys(), key=lambda s: s.name):
            if s not in self.sizes:
                self.sizes[s] = symbol(f"s{len(self.sizes)}")
        return expr.xreplace(self.sizes)

    def _name(self) -> str:
        ops: dict[str, None] = {}
        for m in self.group.nodes:
            for o in m.origins:
                ops[re.sub(r"\W+", "_", o.op.split(".")[1] if o.op.count(".") else o.op).strip("_")] = None
        words = list(ops)[-4:] or ["kernel"]
        return "_".join(["fused", *words])[:60].rstrip("_")

    # --- stages -------------------------------------------------------------------------------------------------------

    def _stage(self, m: FusionNode, rows: tuple[sympy.Symbol, ...], everything: tuple[sympy.Symbol, ...]) -> Stage:
        g = self.group
        env = self._places(m)
        values = [self._value(v, env, rows, everything) for v in m.values]
        for k, v in enumerate(values):
            if m.monoid is None and isinstance(v, Cast) and v.when_stored and v.value.dtype is DType.FLOAT32:
                values[k] = v.value
                self.widened[m.names[k]] = DType.FLOAT32
            values[k] = always_rounded(values[k])
        results, scan = tuple(self.results[n] for n in m.names), m.scan_axis is not None
        stage = Stage(results, tuple(values), g.is_inner(m), m.monoid, m.origins, scan=scan)
        if m.name in g.cross:
            return replace(stage, axes=self.kept, over=self.over if m.monoid is not None else None)
        return stage

    def _index(self, index: sympy.Expr, env: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
        if index.is_Number:
            return index
        moved = env.get(index, index) if index.is_Symbol else index.xreplace(env)
        return self._canonical(simplify(moved, self.extents, self.graph.symbols))

    def _value(
        self, value: Expr, env: dict[sympy.Symbol, sympy.Expr], rows: tuple[Index, ...], everything: tuple[Index, ...]
    ) -> Expr:
        def leaf(e: Expr) -> Expr | None:
            if isinstance(e, Load):
                made = self.group.produced.get(e.buffer)
                if made is None:
                    return Load(self._input(e.buffer), e.indices, e.dtype)
                of_points = made.monoid is None or made.scan_axis is not None
                at = everything if self.group.is_inner(made) and of_points else rows
                if made.name in self.group.cross:
                    at = self.kept
                kept = self.widened.get(e.buffer, e.dtype)
                return cast(Load(self.results[e.buffer], at, kept), e.dtype, when_stored=True)
            if isinstance(e, Cast) and isinstance(e.value, Cast) and e.value.value.dtype is e.dtype is DType.FLOAT32:
                inner = e.value.value
                if e.value.when_stored and isinstance(inner, Load):
                    return inner
            return None

        return rewrite(value, leaf, lambda i: self._index(i, env))

    def _input(self, name: str) -> str:
        buffer = self.inputs.get(name)
        if buffer is None:
            t = self.types[name]
            buffer = Buffer(
                f"in{len(self.inputs)}", tuple(self._canonical(s) for s in t.shape),
                tuple(self._canonical(s) for s in t.strides), t.dtype, align=PARAM_ALIGN,
            )  # fmt: skip
            self.inputs[name] = buffer
        return buffer.name

    def _output(self, m: FusionNode, name: str, t: TensorType, k: int) -> Output:
        env = self._places(m)
        indices = tuple(self._canonical(env[a]) for a in m.axes)
        buffer = Buffer(
            f"out{k}", tuple(self._canonical(s) for s in t.shape), tuple(self._canonical(s) for s in t.strides),
            t.dtype, align=PARAM_ALIGN,
        )  # fmt: skip
        return Output(buffer, self.results[name], indices)
