"""Steps dealt to programs: every step is somebody's, and there is room for all sums."""

from __future__ import annotations

from itertools import product

import pytest
import sympy

from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.scheduler.passes.products.stream_k import run_of

T, K = (sympy.Symbol(s, integer=True, nonnegative=True) for s in ("s0", "s1"))


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("programs", [1, 3, 8])
def test_there_is_room_for_every_sum(programs: int, least: int) -> None:
    """With sizes that are known, exactly as much as is needed; with others, enough whatever they turn out to be."""
    table = SymbolTable((Size(T, least, 64, 1, 4), Size(K, least, 64, 1, 4)))
    varying = run_of(T, K, programs, table)
    for tiles, steps in product((1, 2, 3, 7, 8, 9, 17), (1, 2, 5, 8, 13)):
        here = {T: sympy.Integer(tiles), K: sympy.Integer(steps)}
        known = run_of(here[T], here[K], programs, SymbolTable())
        for run in (known, varying):
            per, touched, sums = (int(e.xreplace(here)) for e in (run.per, run.touched, run.sums))
            owners = [[k // per for k in range(t * steps, (t + 1) * steps)] for t in range(tiles)]
            assert max(map(max, owners)) < programs
            most_sums = max(len(set(o)) for o in owners)
            most_tiles = max(sum(g in o for o in owners) for g in range(programs))
            assert (sums, touched) == (most_sums, most_tiles) if run is known else sums >= most_sums
            assert touched >= most_tiles
