"""The nest as a Triton program: which loop is a program id, which a tile axis, which a loop, and how wide indices
are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

from ...ir.expr.symbols import Size
from ...ir.expr.value import Expr, IndexValue, Load, children, is_value, symbol
from ...ir.nest.hints import APART, NARROW_ROWS, TENSORIZE
from ...ir.nest.loops import AxisKind, Block, Buffer, Loop, LoopKind, LoopNest, Scope, Update, blocks, walk_nodes
from ...ir.target import Target
from ..kernel import INDEX_MAX, EmitError
from .index import Ranges
from .types import Types
from .writer import Dims

Conjunct: TypeAlias = tuple[sympy.Expr, sympy.Expr]

# Columns of the least tile that tensor cores multiply.
LEAST_COLUMNS = 16
_GRID = {LoopKind.BLOCK_X: 0, LoopKind.BLOCK_Y: 1, LoopKind.BLOCK_Z: 2}
_LOOPS = (LoopKind.SERIAL, LoopKind.UNROLLED)


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block in canonical loop symbols, which are the same for loops of sibling trees that are the same tile axis.

    ``bounds`` are the conjuncts of its predicate; ``reduced`` the loop symbols that carry its reduction axes.
    ``elements`` are conjuncts that loops of the reduction decided, each of one iteration by now: for all lanes alike
    they say whether there is an element. ``copy`` tells the iterations of loops written out apart in which it makes
    results of its own.
    """

    block: Block
    axes: dict[sympy.Symbol, sympy.Expr]
    bounds: tuple[Conjunct, ...]
    spatial: Dims
    reduced_tile: Dims
    reduced_serial: Dims
    carriers: frozenset[sympy.Symbol]
    # The two operands of a block that is one ``tl.dot``: what each of them is over.
    operands: tuple[BlockInfo, ...] = ()
    copy: tuple[sympy.Expr, ...] = ()
    elements: tuple[Conjunct, ...] = ()
    # Whether this is one of those operands.
    is_operand: bool = False

    @property
    def place(self) -> tuple[str, tuple[sympy.Expr, ...]]:
        """The block, and which of its copies."""
        return self.block.name, self.copy

    @property
    def tile(self) -> Dims:
        return self.spatial | self.reduced_tile

    def at(self, loop: sympy.Symbol, iteration: sympy.Expr) -> BlockInfo:
        """The block in one iteration of a loop."""
        here = {loop: iteration}
        axes = {v: e.xreplace(here) for v, e in self.axes.items()}
        left = {s for e in axes.values() for s in e.free_symbols}
        bounds, elements = _divided(self.bounds, here, {loop} & self.reduced_serial, left)
        return replace(
            self,
            axes=axes,
            bounds=bounds,
            elements=(*self.elements, *elements),
            reduced_serial=self.reduced_serial - {loop},
            operands=tuple(o.at(loop, iteration) for o in self.operands),
            copy=self.copy if loop in self.reduced_serial else (*self.copy, iteration),
        )


def _divided(
    bounds: Iterable[Conjunct],
    mapping: Mapping[sympy.Symbol, sympy.Expr],
    summed: Set[sympy.Symbol],
    left: Set[sympy.Symbol],
) -> tuple[tuple[Conjunct, ...], tuple[Conjunct, ...]]:
    """Bounds with expressions in the place of loops; apart from the others those that loops in ``summed`` decided and
    of which no loop in ``left`` is left."""
    kept: list[Conjunct] = []
    decided: list[Conjunct] = []
    for lhs, rhs in bounds:
        new = lhs.xreplace(mapping), rhs.xreplace(mapping)
        gone = summed & (lhs.free_symbols | rhs.free_symbols) and not left & (new[0].free_symbols | new[1].free_symbols)
        (decided if gone else kept).append(new)
    return tuple(kept), tuple(decided)


class TritonProgram:
    """Everything about a nest that is decided before the first line is written."""

    def __init__(self, nest: LoopNest, target: Target) -> None:
        self.nest = nest
        self.target = target
        self.types = Types.of(target)
        self.buffers: dict[str, Buffer] = nest.buffers
        self.ranges = Ranges(nest.symbols)
        self.grid: list[sympy.Expr] = []
        # Loop variable -> the expression that it is in the program: a program id, a tile axis, a loop or zero.
        self.loops: dict[sympy.Symbol, sympy.Expr] = {}
        self.program_ids: set[sympy.Symbol] = set()
        self.serial: list[sympy.Symbol] = []
        # Tile axis -> (dimension, extent).
        self.tile: dict[sympy.Symbol, tuple[int, int]] = {}
        self.rank = 0
        # A tile axis of copies: of a product with a vector, all columns are the same.
        self.copies: sympy.Symbol | None = None
        # The tile axis over which a ``tl.dot`` reduces, along the second dimension -> the same along the first.
        self.turned: dict[sympy.Symbol, sympy.Symbol] = {}
        self._contracted = _contracted(nest)
        self._place_loops()
        self.infos = {b.name: self._info(b, outer) for b, outer in blocks(nest)}
        # What indices are computed in. Where sizes decide whether 32 bits suffice, the text has a name for it.
        self.integer = "tl.int32" if self._fits_int32() else "INDEX" if nest.symbols.sizes else "tl.int64"

    @property
    def wide(self) -> bool:
        """Whether indices may have 64 bits."""
        return self.integer != "tl.int32"

    def axis_text(self, axis: sympy.Symbol, dim: int, extent: int) -> str:
        """The line that names an axis of a tile along a dimension."""
        place = ", ".join(":" if d == dim else "None" for d in range(self.rank))
        wide = f".to({self.integer})" if self.wide else ""
        index = f"[{place}]" if self.rank > 1 else ""
        return f"{axis.name} = tl.arange(0, {extent}){wide}{index}"

    # --- loops --------------------------------------------------------------------------------------------------------

    def _place_loops(self) -> None:
        depths: dict[sympy.Symbol, int] = {}
        extents: dict[int, set[int]] = {}
        grid: dict[int, sympy.Expr] = {}
        for node, outer in walk_nodes(self.nest.body):
            if not isinstance(node, Loop):
                continue
            if node.var in self._contracted:
                self._contracted_axis(node)
            elif node.kind is LoopKind.THREAD_X:
                depths[node.var] = sum(o.kind is LoopKind.THREAD_X and o.var not in self._contracted for o in outer)
                extents.setdefault(depths[node.var], set()).add(self._tile_extent(node))
            elif node.kind in _GRID:
                self._program_id(node, outer, grid)
            elif node.kind in _LOOPS:
                if node.extent == 1:
                    self.loops[node.var] = sympy.S.Zero
                else:
                    self.loops[node.var] = canonical = symbol(f"k{len(self.serial)}")
                    self.serial.append(canonical)
                    self.ranges.loop(canonical, node.extent)
            else:
                raise EmitError(
                    f"loop {node.var} is {node.kind.value}: a GPU program has no such loop; bind it to "
                    "threadIdx.x or leave it serial"
                )
        self._grid_runs(grid)
        self.grid = [grid.get(k, sympy.S.One) for k in range(max(grid, default=0) + 1)]
        # A depth at which every loop runs once is no dimension of the tile.
        real = sorted(d for d, sizes in extents.items() if sizes != {1})
        self.rank = len(real)
        if self.rank == 1 and self._contracted:
            self.rank, self.copies = 2, symbol(f"e{LEAST_COLUMNS}")
            self.tile[self.copies] = (1, LEAST_COLUMNS)
            self.ranges.loop(self.copies, sympy.Integer(LEAST_COLUMNS))
        for node, _ in walk_nodes(self.nest.body):
            if isinstance(node, Loop) and node.var in depths:
                self._tile_axis(node, int(node.extent), depths[node.var], real, extents)

    def _grid_runs(self, grid: dict[int, sympy.Expr]) -> None:
        """A grid that may be empty stands around every block that writes an output: without programs none runs."""
        maybe_empty = [k for k, extent in grid.items() if self.nest.symbols.bounds(extent)[0] < 1]
        for block, outer in blocks(self.nest) if maybe_empty else ():
            around = {_GRID[o.kind] for o in outer if o.kind in _GRID}
            outside = [k for k in maybe_empty if k not in around]
            if outside and any(w.buffer in self.nest.outputs for w in block.writes):
                raise EmitError(
                    f"block {block.name} stands outside of the loop bound to blockIdx.{'xyz'[outside[0]]}, whose "
                    f"extent {grid[outside[0]]} may be zero: then no program would run it; bind a loop around it too"
                )

    def _tile_extent(self, loop: Loop) -> int:
        if not loop.extent.is_Integer or int(loop.extent) & (int(loop.extent) - 1) or loop.extent <= 0:
            raise EmitError(
                f"loop {loop.var} is bound to threadIdx.x and runs {loop.extent} times: "
                "a tile axis of Triton has "
                "a constant power of two; split the loop and bind the inner part"
            )
        return int(loop.extent)

    def _program_id(self, loop: Loop, outer: tuple[Loop, ...], grid: dict[int, sympy.Expr]) -> None:
        if any(o.kind not in _GRID for o in outer):
            raise EmitError(f"loop {loop.var} is bound to {loop.kind.value} inside a loop that is not")
        k = _GRID[loop.kind]
        if grid.setdefault(k, loop.extent) != loop.extent:
            raise EmitError(
                f"two loops are bound to {loop.kind.value} with extents {grid[k]} and "
                f"{loop.extent}; bring the "
                "blocks under one loop (compute_at), or make the extents equal"
            )
        canonical = symbol(f"pid_{'xyz'[k]}")
        self.program_ids.add(canonical)
        self.loops[loop.var] = canonical if loop.extent != 1 else sympy.S.Zero
        self.ranges.loop(canonical, loop.extent)

    def _tile_axis(self, loop: Loop, extent: int, depth: int, real: list[int], extents: dict[int, set[int]]) -> None:
        if depth not in real or extent == 1:
            self.loops[loop.var] = sympy.S.Zero
            return
        dim = real.index(depth)
        suffix = f"_{extent}" if len(extents[depth]) > 1 else ""
        canonical = symbol(f"t{dim}{suffix}")
        self.loops[loop.var] = canonical
        self.tile[canonical] = (dim, extent)
        self.ranges.loop(canonical, sympy.Integer(extent))

    def _contracted_axis(self, loop: Loop) -> None:
        """The axis that a ``tl.dot`` sums over: the second dimension of its left operand, the first of its right."""
        extent = self._tile_extent(loop)
        along, across = symbol(f"c{extent}"), symbol(f"d{extent}")
        self.loops[loop.var] = along
        self.turned[along] = across
        for dim, axis in ((1, along), (0, across)):
            self.tile[axis] = (dim, extent)
            self.ranges.loop(axis, sympy.Integer(extent))

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _info(self, block: Block, outer: tuple[Loop, ...]) -> BlockInfo:
        axes = {a.var: b.xreplace(self.loops) for a, b in zip(block.axes, block.bindings, strict=True)}
        reduced = {s for a in block.axes if a.kind is AxisKind.REDUCTION for s in axes[a.var].free_symbols}
        spatial = {s for a in block.axes if a.kind is not AxisKind.REDUCTION for s in axes[a.var].free_symbols}
        if reduced & self.program_ids and block.is_reduction:
            raise EmitError(
                f"block {block.name} reduces over a loop bound to blockIdx: programs "
                "cannot combine their parts; "
                "rfactor the loop first"
            )
        both = sorted(s.name for s in reduced & spatial if s in self.ranges.extents)
        if both and block.is_reduction:
            raise EmitError(
                f"block {block.name} reduces over a loop that selects its targets too; fuse loops of a "
                "reduction with one another alone"
            )
        self._one_target(block, outer, reduced, spatial)
        own = {v for v, c in self.loops.items() if c.free_symbols & reduced}
        pairs = zip(block.axes, block.bindings, strict=True)
        summed = {s for a, b in pairs if a.kind is AxisKind.REDUCTION for s in b.free_symbols}
        predicate = [(b.lhs, b.rhs) for b in block.predicate]
        bounds, elements = _divided(predicate, self.loops, summed, reduced | spatial)
        info = BlockInfo(
            block,
            axes,
            bounds,
            self.dims(spatial),
            self.dims(reduced),
            frozenset(reduced.intersection(self.serial)),
            frozenset(o.var for o in outer if o.var in own),
            elements=elements,
        )
        return self._contraction(info) if is_dot(block) else info

    def _contraction(self, info: BlockInfo) -> BlockInfo:
        """A block that is one ``tl.dot``: its state is a tile of rows and columns, its operands tiles over the axis
        that is summed."""
        rows = {s for s in info.spatial if self.tile[s][0] == 0}
        columns = {s for s in info.spatial if self.tile[s][0] == 1}
        if self.copies is not None:
            columns = {self.copies}
            info = replace(info, spatial=info.spatial | columns)
        if self.rank != 2 or len(rows) != 1 or len(columns) != 1 or len(info.reduced_tile) != 1:
            raise EmitError(
                f"block {info.block.name} is tensorized as a dot: it needs one tile axis of rows, one of columns and "
                "one of the reduction, innermost, and every other tile of the kernel two dimensions"
            )
        left = self._operand(info, frozenset(rows), {})
        right = self._operand(info, frozenset(columns), self.turned)
        return replace(info, reduced_tile=frozenset(), operands=(left, right))

    def _operand(self, info: BlockInfo, own: Dims, turned: Mapping[sympy.Symbol, sympy.Symbol]) -> BlockInfo:
        axes = {v: e.xreplace(turned) for v, e in info.axes.items()}
        bounds = [(lhs.xreplace(turned), rhs.xreplace(turned)) for lhs, rhs in info.bounds]
        over = frozenset(turned.get(s, s) for s in info.reduced_tile)
        # What bounds the other operand alone switches no lane of this one off.
        kept = [b for b in bounds if (b[0].free_symbols | b[1].free_symbols) & self.tile.keys() <= own | over]
        return replace(info, axes=axes, bounds=tuple(kept), spatial=own, reduced_tile=over, is_operand=True)

    def _one_target(
        self, block: Block, outer: tuple[Loop, ...], reduced: set[sympy.Symbol], spatial: set[sympy.Symbol]
    ) -> None:
        """An accumulator is one tile: the loop that reduces has no loop inside that selects among the targets, but
        copies of which each has its own."""
        variables = [(o.var, self.loops[o.var]) for o in outer if o.kind in _LOOPS and not self.is_apart(o)]
        at = next((k for k, (_, c) in enumerate(variables) if c.free_symbols & reduced), None)
        for var, canonical in variables[at:] if at is not None and block.is_reduction else ():
            if canonical.free_symbols & spatial:
                raise EmitError(
                    f"loop {var} over targets of block {block.name} stands inside {variables[at or 0][0]}, over which "
                    "it reduces; reorder the loops, or bind the inner one to threadIdx.x"
                )

    def is_apart(self, loop: Loop) -> bool:
        """Whether the iterations of a loop are written one after the other, each for itself: those of a loop that asks
        for it, and the parts of a visit of a row in a nest that tells visits apart."""
        asked = APART.of(loop) or NARROW_ROWS.of(self.nest)
        return asked and loop.kind is LoopKind.UNROLLED and bool(loop.extent.is_Integer)

    def dims(self, symbols: set[sympy.Symbol]) -> Dims:
        return frozenset(symbols & self.tile.keys())

    def _fits_int32(self) -> bool:
        """Whether every index of the program, in masked lanes too, and every size stay below 2**31."""
        used = {s for node, _ in walk_nodes(self.nest.body) for s in _symbols(node)}
        sizes = [s for s in self.nest.symbols.sizes if s.symbol in used or _in_strides(s, self.nest)]
        if any(s.upper is None or s.upper > INDEX_MAX for s in sizes):
            return False
        return all(self.ranges.fits_int32(e) for e in self.indices())

    def indices(self) -> list[sympy.Expr]:
        """Where blocks are in their axes and in memory, in loop symbols."""
        found: list[sympy.Expr] = []
        for info in self.infos.values():
            found += [*info.axes.values(), *(lhs for lhs, _ in info.bounds)]
            parts = [e for v in _values(info.block) for e in _distinct(v)]
            accesses = [(e.buffer, e.indices) for e in parts if isinstance(e, Load)]
            accesses += [(a.buffer, a.indices) for a in info.block.writes]
            for name, indices in accesses:
                buffer = self.buffers[name]
                if buffer.scope is Scope.GLOBAL:
                    pairs = zip(indices, buffer.strides, strict=True)
                    found.append(sympy.Add(*(i.xreplace(info.axes) * s for i, s in pairs if not is_value(i))))
            found += [e.index.xreplace(info.axes) for e in parts if isinstance(e, IndexValue)]
        return found


def is_dot(block: Block) -> bool:
    """Whether a block is to be one matrix product of tiles."""
    return TENSORIZE.of(block) == "dot"


def _contracted(nest: LoopNest) -> set[sympy.Symbol]:
    """The tile axes over which the blocks that are matrix products reduce."""
    found: set[sympy.Symbol] = set()
    for block, outer in blocks(nest):
        if is_dot(block):
            pairs = zip(block.axes, block.bindings, strict=True)
            reduced = {s for a, b in pairs if a.kind is AxisKind.REDUCTION for s in b.free_symbols}
            found |= {lp.var for lp in outer if lp.kind is LoopKind.THREAD_X and lp.var in reduced}
    return found


def _values(block: Block) -> list[Expr]:
    """Every expression of the block's body, indices of stores that are values included."""
    found: list[Expr] = [v for s in block.body for v in (s.values if isinstance(s, Update) else (s.value,))]
    return found + [i for a in block.writes for i in a.indices if is_value(i)]  # type: ignore[misc]


def _distinct(expr: Expr) -> list[Expr]:
    """Every sub-expression once; expressions share parts, and a walk of the tree would visit those over and over."""
    seen: dict[int, Expr] = {}
    stack = [expr]
    while stack:
        e = stack.pop()
        if id(e) not in seen:
            seen[id(e)] = e
            stack.extend(children(e))
    return list(seen.values())


def _symbols(node: Loop | Block) -> set[sympy.Symbol]:
    if isinstance(node, Loop):
        return node.extent.free_symbols
    return {s for a in node.axes for s in a.extent.free_symbols} | {
        s for b in node.predicate for s in (b.lhs.free_symbols | b.rhs.free_symbols)
    }


def _in_strides(size: Size, nest: LoopNest) -> bool:
    return any(size.symbol in s.free_symbols for b in nest.params for s in (*b.strides, *b.shape))
