"""Stream-K: a product's steps, those of all tiles of its results laid end to end, dealt evenly to a fixed number of
programs.

Tiles that are a few more than a GPU has multiprocessors take as long as twice those. So a program gets a run of steps
instead of tiles: it ends a tile that another began, makes others whole, and begins one that another ends. Programs do
not combine results, as nowhere on GPUs: each writes a sum for every tile that it touches, and a second reduction adds
the one to few sums of a tile, in the order of the programs, and goes on from there. Both are plain sums over index
expressions: what a schedule does about them (a loop that runs from where the program begins to where it ends) follows
from comparisons of positions. Source: Osama et al. 2023, "Stream-K".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.product import factors, product_of
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Cast, Expr, Select, call, const, free_symbols, substitute_index, symbol
from ....ir.function.function import Dim
from ....ir.graph.graph import Compute, Node, Reduction
from ...facts.contraction import StreamK
from ...functions.split_kernel import Split, below, combined, partial
from ..canonical.names import fresh_name

# Sums of a tile that are written out.
MOST_WRITTEN = 8


@dataclass(frozen=True, slots=True)
class Run:
    """How steps are dealt: ``tiles`` of ``steps`` each, ``per`` steps a program, which touches at most ``touched``
    tiles; a tile is touched by at most ``sums`` programs."""

    tiles: sympy.Expr
    steps: sympy.Expr
    per: sympy.Expr
    touched: sympy.Expr
    sums: sympy.Expr

    def tile(self, program: sympy.Expr) -> sympy.Expr:
        """The first tile that a program touches."""
        return FloorDiv(program * self.per, self.steps)

    def program(self, step: sympy.Expr) -> sympy.Expr:
        """The program that does a step."""
        return FloorDiv(step, self.per)


def run_of(tiles: sympy.Expr, steps: sympy.Expr, programs: int, table: SymbolTable) -> Run:
    """The steps of some tiles dealt to programs; exact where sizes are known, else with the room that any may need."""
    if tiles.is_Integer and steps.is_Integer:
        count, each = int(tiles), int(steps)
        per = -(-count * each // programs)
        ends = [(g * per, min((g + 1) * per, count * each) - 1) for g in range(programs) if g * per < count * each]
        touched = max(last // each - first // each + 1 for first, last in ends)
        sums = max((t * each + each - 1) // per - t * each // per + 1 for t in range(count))
        return Run(tiles, steps, *(sympy.Integer(n) for n in (per, touched, sums)))
    total = tiles * steps
    some = table.bounds(total)[0] >= 1
    per = FloorDiv(total + programs - 1, sympy.Integer(programs)) if some else FloorDiv(total, programs) + 1
    return Run(tiles, steps, per, _parts(tiles, programs) + 1, _parts(steps - 1, per) + 1)


def _parts(extent: sympy.Expr, size: sympy.Expr | int) -> sympy.Expr:
    return FloorDiv(sympy.expand(extent + size - 1), sympy.sympify(size))


def dealt(node: Reduction, stream: StreamK, taken: set[str], table: SymbolTable) -> list[Node]:
    """A sum of products over one axis as sums of runs of steps, and the sum of those.

    The first has the axes program, tile (of those that the program touches, where they may be several), row and column
    of the tile. The name of its result is added to ``taken``.
    """
    (depth,), (k,) = node.reduce_shape, node.reduce_axes
    *batch, rows, columns = node.types[0].shape
    *outer, m, n = node.axes
    rows_of, columns_of = _parts(rows, stream.rows), _parts(columns, stream.columns)
    grid = rows_of * columns_of
    some = table.bounds(depth)[0] >= 1
    steps = _parts(depth, stream.step) if some else FloorDiv(depth, sympy.Integer(stream.step)) + 1
    run = run_of(sympy.expand(sympy.Mul(*batch) * grid), steps, stream.programs, table)
    extents = [e for e in (stream.programs, run.touched, stream.rows, stream.columns) if e is not run.touched or e != 1]
    shape = tuple(sympy.sympify(e) for e in extents)
    axes = tuple(symbol(f"i{j}") for j in range(len(shape)))
    g, *others, r, c = axes
    step, own = symbol("r0"), symbol("r1")
    tile = run.tile(g) + sum(others)
    place = {
        m: ModularIndexing(tile, columns_of, rows_of) * stream.rows + r,
        n: ModularIndexing(tile, sympy.S.One, columns_of) * stream.columns + c,
        k: step * stream.step + own,
        **{axis: FloorDiv(tile, grid) for axis in outer},
    }
    at = sympy.expand(tile * run.steps + step)
    mine = [_below(g * run.per, at + 1), _below(at, (g + 1) * run.per), _below(at, run.tiles * run.steps)]
    ends = {m: (rows, stream.rows), n: (columns, stream.columns), k: (depth, stream.step)}
    tails = {v: _below(place[v], e) for v, (e, size) in ends.items() if not table.is_divisible(e, size)}
    (value,) = node.values
    parts = [
        _guarded(f, place, [*mine, *(t for v, t in tails.items() if v in free_symbols(f))]) for f in factors(value)
    ]
    (name,) = (fresh_name(f"{name}_runs", taken) for name in node.names)
    dims = tuple(map(Dim, axes, shape))
    split = Split(dims[:-2], (Dim(step, run.steps), Dim(own, sympy.Integer(stream.step))), place, tuple(mine))
    runs = partial(node, (name,), split, dims[-2:], (product_of(parts),))
    return [runs, _added(node, runs, run, stream, (rows_of, columns_of))]


def _added(node: Reduction, runs: Reduction, run: Run, stream: StreamK, grid: tuple[sympy.Expr, sympy.Expr]) -> Node:
    """The sums of the programs that touched an element's tile, in their order; written out where they are few, so that
    an element is made of them as of anything else that is read."""
    *outer, m, n = node.axes
    tile = FloorDiv(m, sympy.Integer(stream.rows)) * grid[1] + FloorDiv(n, sympy.Integer(stream.columns))
    tile += sympy.Mul(*grid) * (outer[0] if outer else 0)
    q = symbol("r0")
    first = sympy.expand(tile * run.steps)
    program = run.program(first) + q
    last = run.program(sympy.expand(first + run.steps - 1))
    one = sympy.S.One
    within = [] if run.touched == 1 else [sympy.expand(tile - run.tile(program))]
    lanes = [ModularIndexing(v, one, sympy.Integer(e)) for v, e in ((m, stream.rows), (n, stream.columns))]
    where = (program, *within, *lanes)
    total = combined(node, runs, [Dim(q, run.sums)], where, _below(program, last + 1))
    if not run.sums.is_Integer or int(run.sums) > MOST_WRITTEN:
        return total
    (value,) = total.values
    terms = [substitute_index(value, {q: sympy.Integer(j)}) for j in range(int(run.sums))]
    first_term = terms[0].if_true if isinstance(terms[0], Select) else terms[0]  # a tile has a first program
    sums = reduce(lambda a, b: call("add", a, b), terms[1:], first_term)
    return Compute(node.names[0], node.types[0], node.axes, sums, node.origins)


def _below(index: sympy.Expr, limit: sympy.Expr) -> Expr:
    return below(sympy.expand(index), sympy.expand(limit))


def _guarded(factor: Expr, place: dict[sympy.Symbol, sympy.Expr], conditions: list[Expr]) -> Expr:
    """A factor in the places of the run, zero outside of it; conversions stay outside, as products see through
    them."""
    if isinstance(factor, Cast):
        return replace(factor, value=_guarded(factor.value, place, conditions))
    value = substitute_index(factor, place)
    for condition in reversed(conditions):
        value = Select(condition, value, const(0, value.dtype))
    return value
