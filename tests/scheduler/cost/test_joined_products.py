"""Which products read the parts of a joined operand, and which leave joining to a kernel."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor

from tests.scheduler.cost.test_contraction_gpu import decided, empty, products
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.expr.value import Cast, IndexValue, Load, Select, call, cast, const, loads, symbol
from torch_mlc.scheduler.facts.contraction import Operand, Products
from torch_mlc.scheduler.facts.prologues import as_joined, joined_parts
from torch_mlc.scheduler.passes import eliminate_dead, simplify_algebra

I0, R0 = symbol("i0"), symbol("r0")
BF16 = DType.BFLOAT16


class Joined(torch.nn.Module):
    def forward(self, w: Tensor, *parts: Tensor) -> Tensor:
        return torch.cat(parts, 1) @ w


def with_sums(w: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.cat(parts, 1)
    return whole @ w, whole.sum(0)


def joined_rows(w: Tensor, *parts: Tensor) -> Tensor:
    return torch.cat(parts, 0) @ w


def operand(*depths: int) -> Operand:
    """The joined operand of a product of 8192 rows."""
    model, inputs = on_fake_device(Joined(), (empty(sum(depths), 768), *(empty(8192, k) for k in depths)), "cuda")
    graph = eliminate_dead(simplify_algebra(import_graph(capture(model, inputs)[0])))
    (product,) = [p for n in graph.nodes if (p := Products(graph).product(n)) is not None]
    return product.a


def parts(count: int, depth: int) -> list[Tensor]:
    return [empty(8192, depth) for _ in range(count)]


@pytest.mark.parametrize(("count", "depth"), [(2, 1024), (3, 768), (4, 512)])
def test_long_parts_are_read_by_the_product(count: int, depth: int) -> None:
    (made,), library = products(decided(Joined().forward, empty(count * depth, 768), *parts(count, depth)))
    assert not library and len({ld.buffer for v in made.values for ld in loads(v)}) == count + 1


def test_a_step_does_not_wait_for_what_is_joined() -> None:
    """It is no more work than reading the whole; masks of parts of other lengths are."""
    stepped, masked = operand(768, 768, 768).prologue, operand(760, 768, 776).prologue
    assert stepped is not None and masked is not None
    assert (stepped.parts, stepped.flops) == (3, 0)
    assert masked.parts == 1 and masked.flops > 0


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (with_sums, [empty(2304, 768), *parts(3, 768)]),  # the whole is needed in memory anyway
        (joined_rows, [empty(768, 2304), *parts(3, 768)]),  # parts of a tile's rows, not of the sum
        (Joined().forward, [empty(1152, 512), empty(8192, 1024), empty(8192, 128)]),  # nine loops
    ],
)
def test_others_are_joined_by_a_kernel(fn, given) -> None:
    opened, library = products(decided(fn, *given))
    assert len(library) == 1 and not any(len({ld.buffer for v in n.values for ld in loads(v)}) > 2 for n in opened)


def chosen(axis: sympy.Symbol, first, second) -> Select:
    return Select(call("lt", IndexValue(axis, DType.INT64), const(256, DType.INT64)), first, second)


def test_an_element_is_chosen_without_conversions_that_lose_nothing() -> None:
    a, b = Load("a", (I0, R0), BF16), Load("b", (I0, R0 - 256), BF16)
    wide = cast(chosen(R0, cast(a, DType.FLOAT32), cast(b, DType.FLOAT32)), BF16)
    found = as_joined(wide)
    assert found == chosen(R0, a, b)
    extents = {I0: sympy.Integer(8), R0: sympy.Integer(512)}
    assert joined_parts(found, R0, extents, SymbolTable()) == 2
    assert joined_parts(found, I0, extents, SymbolTable()) == 1


@pytest.mark.parametrize(
    "value",
    [
        Load("a", (I0, R0), BF16),
        Cast(Load("a", (I0, R0), DType.FLOAT32), BF16),
        chosen(R0, Load("a", (I0, R0), BF16), const(0.0, BF16)),
        Cast(chosen(R0, Load("a", (I0, R0), DType.FLOAT32), Cast(Load("b", (I0, R0), BF16), DType.FLOAT32)), BF16),
    ],
)
def test_what_is_rounded_or_filled_is_not_joined(value) -> None:
    assert as_joined(value) is None
