"""Memory that nothing is written to: torch fills it where algorithms are to be deterministic, and so do programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "empty": lambda x: torch.empty(3, 2, dtype=x.dtype),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((2, 3), (1, 2), dtype=x.dtype),
    "empty_permuted": lambda x: torch.empty_permuted((2, 3), (1, 0), dtype=x.dtype),
    "new_empty": lambda x: x.new_empty(4),
    "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (2, 1)),
    "resize": lambda x: torch.ops.aten.resize(x, [9]),
    "resize of nothing": lambda x: torch.ops.aten.resize(x[:0], [3]),
    "resize to fewer": lambda x: torch.ops.aten.resize(x, [2]),
    "resize_": lambda x: x.clone().resize_(3, 4),
}
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.fixture
def filling() -> Iterator[None]:
    """Deterministic algorithms; which torch's flag for filling goes with."""
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = filled


@pytest.mark.usefixtures("filling")
@pytest.mark.parametrize("name", MAKERS)
def test_it_is_filled_as_eager_s(name: str) -> None:
    def make(*given: Tensor) -> list[Any]:
        return [MAKERS[name](x) for x in given]

    given = [torch.arange(4).to(dtype) for dtype in TYPES]
    torch.testing.assert_close(torch.compile(make, backend="mlc")(*given), make(*given), equal_nan=True)


@pytest.mark.usefixtures("filling")
def test_a_program_is_one_for_each_way() -> None:
    """In the cache, too."""
    x = torch.ones(2)
    for filled in (False, True, False):
        deterministic.fill_uninitialized_memory = filled
        torch._dynamo.reset()
        made = torch.compile(lambda x: torch.empty_like(x) * 0 + x, backend="mlc")(x)
        assert bool(made.isnan().all()) or not filled
