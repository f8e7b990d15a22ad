"""Regions against counting: what is said to be needed holds all that is touched, what is said to be made is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import pytest
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import Loop, LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.primitives.analysis.region import Region, at_least, axis_regions, below, index_region
from torch_mlc.scheduler.primitives.analysis.tree import find_block
from torch_mlc.scheduler.schedule.schedule import Schedule

SIZES = {"s0": 7, "s1": 5}
N, M = symbol("s0"), symbol("s1")
X, Y, K = symbol("x"), symbol("y"), symbol("k")
TABLE = SymbolTable((Size(N, lower=1), Size(M, lower=4, divisor=4)))


def number(e: sympy.Expr, env: Mapping[sympy.Symbol, int]) -> int:
    known = {symbol(k): v for k, v in SIZES.items()} | dict(env)
    return int(e.xreplace({s: sympy.Integer(v) for s, v in known.items()}))


def points(loops: tuple[Loop, ...]) -> Iterator[dict[sympy.Symbol, int]]:
    for values in product(*(range(number(lp.extent, {})) for lp in loops)):
        yield dict(zip((lp.var for lp in loops), values, strict=True))


@pytest.mark.parametrize("name", ["transpose", "pointwise", "column_sum", "argmax"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_axes(name: str, data: st.DataObject, nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests[name])
    for _ in range(data.draw(st.integers(0, 5))):
        loops = s.get_loops("b0")
        k = data.draw(st.integers(0, len(loops) - 1))
        try:
            match data.draw(st.sampled_from(("split", "split", "fuse", "reorder"))):
                case "split":
                    s.split(loops[k], data.draw(st.sampled_from(([None, 2], [None, 3], [2, None], [None, 2, 2]))))
                case "fuse":
                    s.fuse(*loops[k : k + 2])
                case "reorder":
                    s.reorder(*data.draw(st.permutations(loops)))
        except ScheduleError:
            continue
    block, around = find_block(s.nest, "b0", "test")
    at = data.draw(st.integers(0, len(around)))
    fixed, running = around[:at], around[at:]
    regions = axis_regions(block, {lp.var for lp in fixed}, {lp.var: lp.extent for lp in running})
    for here in points(fixed):
        touched: dict[sympy.Symbol, set[int]] = {a.var: set() for a in block.axes}
        for inner in points(running):
            env = here | inner
            if all(number(b.lhs, env) < number(b.rhs, env) for b in block.predicate):
                for axis, binding in zip(block.axes, block.bindings, strict=True):
                    touched[axis.var].add(number(binding, env))
        ran = any(touched.values())
        for axis in block.axes:
            region, extent = regions[axis.var], number(axis.extent, {})
            start = number(region.start, here)
            held = {p for p in range(start, start + number(region.extent, here)) if p < extent}
            assert touched[axis.var] <= held, (axis.var, block.bindings, region)
            if region.is_dense and not region.is_whole and ran:
                assert touched[axis.var] == held, (axis.var, block.bindings, region)


WHOLE = Region(sympy.S.Zero, N, is_whole=True)


@pytest.mark.parametrize(
    ("index", "axes", "start", "extent"),
    [
        (X, {X: Region(4 * K, sympy.Integer(4))}, 4 * K, 4),
        (X + 2, {X: Region(4 * K, sympy.Integer(4))}, 4 * K + 2, 4),
        (2 * X, {X: Region(K, sympy.Integer(3))}, 2 * K, 5),
        (9 - X, {X: Region(4 * K, sympy.Integer(4))}, 6 - 4 * K, 4),
        (3 * X + Y, {X: Region(K, sympy.S.One), Y: Region(sympy.S.Zero, sympy.Integer(3))}, 3 * K, 3),
        (X + Y, {X: Region(K, sympy.Integer(2)), Y: Region(sympy.S.Zero, N)}, K, N + 1),
        (FloorDiv(X, 4), {X: Region(K, sympy.S.One)}, FloorDiv(K, 4), 1),
        (sympy.Integer(5), {}, sympy.Integer(5), 1),
    ],
)
def test_indices(index: sympy.Expr, axes: dict[sympy.Symbol, Region], start: sympy.Expr, extent: sympy.Expr) -> None:
    region = index_region(index, sympy.Integer(100), axes)
    assert not region.is_whole
    assert sympy.expand(region.start - start) == 0 and sympy.expand(region.extent - extent) == 0


def test_an_index_that_is_not_linear_needs_all() -> None:
    assert index_region(X * Y, N, {X: WHOLE, Y: WHOLE}).is_whole
    assert index_region(X**2, N, {X: WHOLE}).is_whole


@pytest.mark.parametrize(
    ("a", "b", "proved"),
    [
        (8 * FloorDiv(N + 7, 8), N, True),
        (8 * FloorDiv(N + 6, 8), N, False),
        (8 * FloorDiv(N, 8), N, False),
        (32 * FloorDiv(FloorDiv(N + 7, 8) + 3, 4), N, True),
        (N, sympy.S.One, True),
        (N, sympy.Integer(2), False),
        (M, sympy.Integer(4), True),
        (N * M, N, False),  # true, and beyond interval arithmetic
        (N, M, False),
        (sympy.Integer(8), sympy.Integer(8), True),
    ],
)
def test_at_least(a: sympy.Expr, b: sympy.Expr, proved: bool) -> None:
    assert at_least(a, b, TABLE) is proved


@pytest.mark.parametrize(
    ("e", "bound", "extents", "proved"),
    [
        (X, N, {X: N}, True),
        (X + 1, N, {X: N}, False),
        (4 * X + Y, M, {X: FloorDiv(M, 4), Y: sympy.Integer(4)}, True),
        (4 * X + Y, 4 * N, {X: N, Y: sympy.Integer(4)}, True),
        (4 * X + Y, sympy.Integer(10), {X: sympy.Integer(3), Y: sympy.Integer(4)}, False),
        (FloorDiv(X, 8), N, {X: 8 * N}, True),
        (FloorDiv(X, 8), N, {X: 8 * N + 1}, False),
        (X - Y, N, {X: N, Y: N}, False),
    ],
)
def test_below(e: sympy.Expr, bound: sympy.Expr, extents: dict[sympy.Symbol, sympy.Expr], proved: bool) -> None:
    assert below(e, bound, extents, TABLE) is proved
