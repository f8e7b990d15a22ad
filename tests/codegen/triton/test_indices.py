"""What is proved of index expressions: a bound that kernels leave out holds in every lane."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, ModularIndexing

from torch_mlc.codegen.triton.index import Ranges
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.rules import default_schedule

S0, K0, K1 = map(symbol, ("s0", "k0", "k1"))
SIZES = range(1, 8)


def expression(rng: random.Random, depth: int) -> sympy.Expr:
    """Of two loop variables and a size; parts of it may be negative, and less where a variable is greater."""
    if depth == 0:
        return rng.choice((K0, K0, K1, S0, sympy.Integer(rng.randrange(6))))

    def part() -> sympy.Expr:
        return expression(rng, depth - 1)

    match rng.randrange(8):
        case 0 | 1:
            return part() + part()
        case 2 | 3:
            return part() - part()
        case 4:
            return rng.choice((Max, Min))(part(), part())
        case 5:
            return part() * rng.choice((2, 3, S0, FloorDiv(K1, 2), FloorDiv(K1 - 4, 2)))
        case 6:
            return rng.choice((FloorDiv, CeilDiv))(part(), rng.choice((2, 3)))
        case _:
            return ModularIndexing(expression(rng, 0), rng.choice((1, 2)), rng.choice((2, 5)))


@pytest.mark.parametrize("seed", range(3))
def test_what_is_proved_holds_in_every_lane(seed: int) -> None:
    rng, proved = random.Random(seed), 0
    for _ in range(400):
        extents = [rng.choice((S0, 2 * S0, FloorDiv(S0, 2), sympy.Integer(5))) for _ in range(2)]
        ranges = Ranges(SymbolTable((Size(S0, SIZES[0], SIZES[-1] if rng.random() < 0.5 else None),)))
        for var, extent in zip((K0, K1), extents, strict=True):
            ranges.loop(var, extent)
        lhs, rhs = expression(rng, rng.randrange(4)), rng.choice((expression(rng, 0), S0, 2 * S0, sympy.Integer(9)))
        if rhs.free_symbols & {K0, K1} or not ranges.below(lhs, rhs):
            continue
        proved += 1
        for n in SIZES:
            runs = [range(int(e.xreplace({S0: sympy.Integer(n)}))) for e in extents]
            for a, b in itertools.product(*runs):
                at = {S0: sympy.Integer(n), K0: sympy.Integer(a), K1: sympy.Integer(b)}
                assert lhs.xreplace(at) < rhs.xreplace(at), f"{lhs} < {rhs} at {at}, {extents}"
    assert proved > 40


def test_parts_of_a_join_that_is_read_backwards(agrees: Callable[..., Any]) -> None:
    """Which part an element is of falls where its number rises: the last number proves nothing."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b]).flatten().flip(0) * 2

    gms = capture(fn, (torch.zeros(3, 2), torch.zeros(3, 2)))
    retarget(gms, "cuda")
    for function in fuse(import_graph(gms[0])).functions.values():
        agrees(default_schedule(lower_to_loops(function), gpu_target("cuda:sm_90")).nest)
