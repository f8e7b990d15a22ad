"""A chain as a tensor function: its rows, what it streams over, and the stages of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.index import simplify
from ...ir.expr.monoid import ATTENTION, SUM, WEIGHTED
from ...ir.expr.role import Role
from ...ir.expr.value import Cast, Expr, Load, always_rounded, cast, loads, rewrite, symbol
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.graph.graph import CallTensor, Compute, Origin, Reduction, node_values
from ..facts.fusion_nodes import simplify_value
from .chain import Chain, is_contraction, is_total, row_axes, told
from .outlined import Parameters, function_name


@dataclass(slots=True)
class ChainFunctionWriter:
    """Writes a chain as a tensor function: rows are the axes of the scores but the last, which is the inner one;
    features and what a contraction sums over are dimensions of their stages alone."""

    chain: Chain
    parameters: Parameters
    extents: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    # The axes of each node, and the dimensions that a reduction combines, as dimensions of the function.
    axes: dict[str, tuple[sympy.Symbol, ...]] = field(default_factory=dict)
    over: dict[str, tuple[sympy.Symbol, ...]] = field(default_factory=dict)
    # The axes of prologues' own nodes over those dimensions.
    places: dict[str, dict[sympy.Symbol, sympy.Expr]] = field(default_factory=dict)
    kinds: dict[str, DType] = field(default_factory=dict)
    # The dimensions of the function that stand for those of the domain.
    digits: dict[int, sympy.Symbol] = field(default_factory=dict)

    def build(self) -> tuple[TensorFunction, CallTensor]:
        s = self.chain
        rows, inner, extra = self._dimensions()
        made = [n for m in s.nodes for n in m.names]
        self.results = {n: f"t{k}" for k, n in enumerate(made)}
        stages = tuple(self._stage(m) for m in s.nodes)
        outputs = tuple(self._output(n, k) for k, n in enumerate(s.outputs))
        canonical = self.parameters.canonical
        dims = [tuple(Dim(v, canonical(self.extents[v])) for v in part) for part in (rows, inner, extra)]
        sizes, table = self.parameters.sizes()
        inputs = self.parameters.inputs
        origins: tuple[Origin, ...] = tuple(dict.fromkeys(o for m in s.nodes for o in m.origins))
        name = function_name(s.starts[0].monoid.name, origins, words=3)
        function = TensorFunction(name, dims[0], dims[1], tuple(inputs.values()), outputs, stages, table, dims[2])
        types = tuple(self.parameters.types[n] for n in s.outputs)
        return function, CallTensor(tuple(s.outputs), types, function.name, tuple(inputs), sizes, origins)

    def _dimensions(self) -> tuple[list[sympy.Symbol], list[sympy.Symbol], list[sympy.Symbol]]:
        """Rows, inner and extra dimensions; and, on the way, every node's axes in terms of them."""
        s, start = self.chain, self.chain.starts[0]
        rows: list[sympy.Symbol] = []
        extra: list[sympy.Symbol] = []
        inner = [symbol(f"r{k}") for k in range(len(start.reduce_axes))]
        self.extents |= dict(zip(inner, start.reduce_shape, strict=True))
        grids: dict[str, dict[sympy.Symbol, sympy.Symbol]] = {}
        for each in s.starts:
            if is_total(each) and each is not start:
                # It is told of the same points as the first start, by axes in the same order.
                points = zip(told(each)[0].indices, told(start)[0].indices, strict=True)
                grid = {a: grids[start.names[0]][b] for a, b in points}  # type: ignore[index]
                grids[each.names[0]] = grid
                self.axes[each.names[0]] = tuple(grid[a] for a in each.axes)
                self.over[each.names[0]] = tuple(grid[a] for a in each.reduce_axes)
                continue
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
        at = s.nodes.index(s.starts[-1])
        for k in range(s.nodes.index(start) - 1, -1, -1):
            m = s.nodes[k]
            if m.names[0] in s.prologues:
                continue
            reader, load = next((r, ld) for r in s.nodes[k + 1 : at + 1] for v in node_values(r) for ld in loads(v)
                                if ld.buffer in m.names)  # fmt: skip
            env = grids.get(reader.names[0]) or dict(zip(reader.axes, self.axes[reader.names[0]], strict=True))
            self.axes[m.names[0]] = tuple(i.xreplace(env) for i in load.indices)
            if isinstance(m, Reduction):
                own = [symbol(f"x{len(extra) + k}") for k in range(len(m.reduce_axes))]
                extra += own
                self.extents |= dict(zip(own, m.reduce_shape, strict=True))
                self.over[m.names[0]] = tuple(own)
        for name, places in s.prologues.items():
            m = next(m for m in s.nodes if name in m.names)
            assert isinstance(m, Reduction)
            own = [symbol(f"x{len(extra) + k}") for k in range(len(m.reduce_axes))]
            extra += own
            self.extents |= dict(zip(own, m.reduce_shape, strict=True))
            self.axes[name], self.over[name] = tuple(rows), tuple(own)
            self.places[name] = {a: i.xreplace(grids[start.names[0]]) for a, i in places.items()}
        single = [grids[start.names[0]][a] for a in start.axes if not s.bindings[start.names[0]][a]]
        for m in s.nodes[at + 1 :]:
            dims = (self.digits[d] for a in m.axes for d in s.bindings[m.names[0]][a])
            self.axes[m.names[0]] = (*dims, *(v for v in single if v in rows or len(s.column_starts) == 1))
        return rows, inner, extra

    # --- stages -------------------------------------------------------------------------------------------------------

    def _stage(self, m: Compute | Reduction) -> Stage:
        name = m.names[0]
        env = self._places(m)
        own = {*self.axes[name], *self.over.get(name, ())}
        values = tuple(self._value(v, env, own) for v in self.chain.values.get(name, self._through_views(m)))
        if isinstance(m, Compute) and isinstance(values[0], Cast) and values[0].when_stored:
            # The value stays in float32; where it leaves the kernel it is rounded.
            values = (values[0].value,) if values[0].value.dtype is DType.FLOAT32 else values
        values = tuple(map(always_rounded, values))
        self.kinds.update(zip(m.names, (v.dtype for v in values), strict=True))
        axes = self.axes[name]
        monoid = m.monoid if isinstance(m, Reduction) else None
        if monoid is WEIGHTED:
            monoid = SUM  # here a sum like any other
        results = tuple(self.results[n] for n in m.names)
        return Stage(results, values, True, monoid, m.origins, axes, self.over.get(name), role=self._role(m))

    def _role(self, m: Compute | Reduction) -> Role | None:
        """What a stage does for attention; None where the chain reads scores that others make."""
        s = self.chain
        if not any(isinstance(n, Reduction) and is_contraction(n) for n in s.nodes[: s.nodes.index(s.starts[0])]):
            return None
        if m in s.starts:
            assert isinstance(m, Reduction)
            if is_total(m):
                return Role.WEIGHT_TOTAL
            return Role.STATE if m.monoid is ATTENTION else Role.WEIGHTED_SUM
        if m.names[0] in s.prologues:
            return Role.ROW_TOTAL
        if s.nodes.index(m) > s.nodes.index(s.starts[-1]):
            return Role.RESULT
        return Role.SCORE if isinstance(m, Reduction) else Role.WEIGHT

    def _places(self, m: Compute | Reduction) -> dict[sympy.Symbol, sympy.Expr]:
        """The axes of a node over the dimensions of the function."""
        name = m.names[0]
        binding = self.chain.bindings.get(name)
        if binding is None or isinstance(m, Reduction):
            env = self.places.get(name) or dict(zip(m.axes, self.axes[name], strict=True))
            if isinstance(m, Reduction):
                env = env | dict(zip(m.reduce_axes, self.over[name], strict=True))
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
        return tuple(self.chain.views.resolve(v, extents) for v in node_values(m))

    def _value(self, value: Expr, env: dict[sympy.Symbol, sympy.Expr], own: set[sympy.Symbol]) -> Expr:
        """A value of a node whose dimensions are ``own``, over dimensions of the function."""
        makers = {n: m for m in self.chain.nodes for n in m.names}

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load):
                return None
            made = makers.get(e.buffer)
            if made is None:
                return Load(self.parameters.input(e.buffer), e.indices, e.dtype)
            # What is alike for all features is read at the first by what has no features.
            at = tuple(v if v in own else sympy.S.Zero for v in self.axes[made.names[0]])
            return cast(Load(self.results[e.buffer], at, self.kinds[e.buffer]), e.dtype, when_stored=True)

        # A row of one element keeps its name: it is the row of a tile.
        extents = {v: e for v, e in self.extents.items() if e != 1}

        def index(i: sympy.Expr) -> sympy.Expr:
            moved = i.xreplace(env) if i.free_symbols else i
            return self.parameters.canonical(simplify(moved, extents, self.chain.graph.symbols))

        return simplify_value(rewrite(value, leaf, index))

    def _output(self, name: str, k: int) -> Output:
        node = next(m for m in self.chain.nodes if name in m.names)
        env = self._places(node)
        indices = tuple(self.parameters.canonical(env[a]) for a in node.axes)
        return Output(self.parameters.buffer(f"out{k}", self.parameters.types[name]), self.results[name], indices)
