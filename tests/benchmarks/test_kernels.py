"""Every kernel case runs at a small shape of its rank, in the dtypes of the suite, and equals itself in float64."""

import pytest
import torch

from benchmarks.accuracy import normalised_errors
from benchmarks.kernels.case import VARIANTS
from benchmarks.kernels.registry import KERNELS
from benchmarks.run_kernels import named, outputs_of

SMALL = {2: (12, 18), 3: (9, 14, 20), 4: (2, 6, 4, 8), 5: (2, 4, 3, 6, 8)}


@pytest.mark.parametrize("name", list(KERNELS))
def test_case_equals_float64(name: str) -> None:
    case = KERNELS[name]
    rank = len(case.shapes["cpu"]["aligned"])
    inputs = case.inputs("aligned", "cpu", torch.float32, SMALL[rank])
    result = case.function(*inputs)
    exact = case.function(*(t.double() if t.is_floating_point() else t for t in inputs))
    assert max(normalised_errors(named(result), named(exact)).values()) < 1e-5
    assert case.compulsory_bytes(inputs, outputs_of(result)) > 0
    half = case.function(*case.inputs("aligned", "cpu", torch.bfloat16, SMALL[rank]))
    assert {name: t.shape for name, t in named(half).items()} == {name: t.shape for name, t in named(result).items()}


@pytest.mark.parametrize("name", list(KERNELS))
def test_odd_sizes_are_odd(name: str) -> None:
    for device, shapes in KERNELS[name].shapes.items():
        assert set(shapes) == set(VARIANTS)
        # Rows of bytes that cuBLAS multiplies are multiples of eight.
        by = 16 if device == "cuda" and name.startswith("dynamic_int8") else 2
        assert any(extent % by for extent in shapes["odd"])
        assert all(extent % 8 == 0 for extent in shapes["aligned"])


def test_a_gather_counts_only_the_rows_it_touches() -> None:
    case = KERNELS["embedding_add"]
    ids, table, positions = torch.tensor([1, 1, 3]), torch.zeros(100, 8), torch.zeros(3, 8)
    out = case.function(ids, table, positions)
    assert case.compulsory_bytes((ids, table, positions), (out,)) == 2 * 32 + 3 * 8 + 3 * 32 + 3 * 32
