"""Joined axes as digits: parts of several lengths are whole numbers of one step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import sympy
import torch
from torch import Tensor

from tests.scheduler.passes.products.test_decompose_contractions import answer, imported, opened
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, const, symbol, walk
from torch_mlc.scheduler.facts.digits import refine

R0 = symbol("r0")


def joined(*parts: int) -> tuple[Expr, dict[sympy.Symbol, sympy.Expr]]:
    """An element of a concat of parts, and its axis."""
    ends = [sum(parts[: k + 1]) for k in range(len(parts))]
    value: Expr = Load(f"p{len(parts) - 1}", (R0 - (ends[-2] if len(parts) > 1 else 0),), DType.FLOAT32)
    for k in reversed(range(len(parts) - 1)):
        before = call("lt", IndexValue(R0, DType.INT64), const(ends[k], DType.INT64))
        value = Select(before, Load(f"p{k}", (R0 - ends[k] + parts[k],), DType.FLOAT32), value)
    return value, {R0: sympy.Integer(ends[-1])}


@pytest.mark.parametrize(
    ("parts", "digits"),
    [((128, 128, 128), [3, 128]), ((768, 384), [3, 384]), ((128, 256, 128), [4, 128]), ((256, 512), [3, 256])],
)
def test_parts_are_steps_of_one_length(parts: tuple[int, ...], digits: list[int]) -> None:
    value, axes = joined(*parts)
    found, moved = refine(value, axes, {}, SymbolTable())
    assert list(map(int, found.values())) == digits
    asked = {e.index for e in walk(moved) if isinstance(e, IndexValue)}
    assert asked == {R0}, "the first digit alone says which part an element is of"


@pytest.mark.parametrize("parts", [(96, 32, 32), (130, 260, 7), (128, 4096, 128)])
def test_short_or_many_steps_are_none(parts: tuple[int, ...]) -> None:
    value, axes = joined(*parts)
    assert refine(value, axes, {}, SymbolTable()) == (axes, value)


def test_a_symbolic_extent_has_no_common_step() -> None:
    value, _ = joined(128, 256, 128)
    axes = {R0: symbol("s0") * 128}
    assert refine(value, axes, {}, SymbolTable((Size(symbol("s0"), 1),)))[0] == axes


@pytest.mark.parametrize("parts", [(128, 128, 128), (128, 384), (256, 128, 256)])
def test_a_product_of_a_joined_operand_is_that_product(parts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    whole, w = torch.randn(5, sum(parts)), torch.randn(sum(parts), 3)
    ends = [0, *(sum(parts[: k + 1]) for k in range(len(parts)))]
    given = [whole[:, a:b].contiguous() for a, b in pairwise(ends)]

    def product(w: Tensor, *given: Tensor) -> Tensor:
        return torch.cat(given, 1) @ w

    graph = opened(imported(product, w, *given), inlined=True)
    torch.testing.assert_close(answer(graph, [w, *given]).double(), whole.double() @ w.double(), rtol=1e-5, atol=1e-4)
