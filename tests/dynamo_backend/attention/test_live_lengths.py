"""Attention to a cache costs what is alive of it: loops over keys end where lengths that are read say."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_mlc

BATCH, HEADS, GROUPS, LENGTH, WIDTH, PAGE = 3, 4, 2, 300, 16, 10
# The first position, the last, and those about the ends of tiles of 64 and 128 keys, for three rows of a batch at once.
BORDERS = ((0, 1, 299), (63, 64, 65), (126, 127, 128), (0, 0, 0), (255, 256, 31))


def seen(k: Tensor, positions: Tensor) -> Tensor:
    """[batch, queries, keys]"""
    return torch.arange(k.shape[2]) <= positions[:, :, None]


def softmax_over(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    batch, heads, queries, width = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, width)
    scores = (grouped @ k[:, :, None].mT) * width**-0.5
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return (torch.softmax(scores, -1) @ v[:, :, None]).reshape(q.shape)


def static(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return softmax_over(q, k, v, seen(k, positions))


def window(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    near = torch.arange(k.shape[2]) > positions[:, :, None] - 70
    return softmax_over(q, k, v, seen(k, positions) & near)


def builtin(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(k, positions)[:, None], enable_gqa=True)


def layers(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Two layers share a mask."""
    mask = seen(k, positions)
    return softmax_over(softmax_over(q, k, v, mask).sin(), k, v, mask)


def positions_of(last: tuple[int, ...], queries: int) -> Tensor:
    """The last position of each row, and those before it: no less than 0."""
    return (torch.tensor(last)[:, None] - torch.arange(queries).flip(0)).clamp(min=0)


def cache() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(BATCH, GROUPS, LENGTH, WIDTH), torch.randn(BATCH, GROUPS, LENGTH, WIDTH)


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("fn", [static, window, builtin, layers], ids=lambda f: f.__name__)
def test_lengths_at_borders(fn: Callable[..., Tensor], queries: int) -> None:
    k, v = cache()
    q = torch.randn(BATCH, HEADS, queries, WIDTH)
    compiled = torch.compile(fn, backend="mlc")
    for last in BORDERS:
        positions = positions_of(last, queries)
        expected = fn(q.double(), k.double(), v.double(), positions)
        torch.testing.assert_close(compiled(q, k, v, positions).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("fn", [static, window, layers], ids=lambda f: f.__name__)
def test_a_block_ahead_of_the_loop_tells_where_it_ends(fn: Callable[..., Tensor], queries: int, target: str) -> None:
    k, v = cache()
    q = torch.randn(BATCH, HEADS, queries, WIDTH)
    report = torch_mlc.explain(fn, q, k, v, positions_of((5, 6, 7), queries), target=target)
    kernels = [x for x in report.kernels if "decompose_online" in x.schedule]
    assert kernels and not report.graphs[0].libraries
    for kernel in kernels:
        assert "_live" in kernel.source
        ends = set(re.findall(r"# (\w+_live\w*_end)", kernel.source))
        assert target == "cpu" or len(ends) == (2 if fn is window else 1)


def test_nothing_is_read_behind_the_tile_of_the_last_position() -> None:
    """NaN in what is left out is not seen, in keys and in values; eager multiplies such values by zero."""
    k, v = cache()
    for x in (k, v):
        x[:, :, 130:] = torch.nan
    q = torch.randn(BATCH, HEADS, 1, WIDTH)
    for fn in (static, builtin):
        positions = positions_of((3, 100, 127), 1)
        result = torch.compile(fn, backend="mlc")(q, k, v, positions)
        expected = fn(q.double(), k[:, :, :128].double(), v[:, :, :128].double(), positions)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing_are_eager_s() -> None:
    """A position below zero: NaN of a softmax, zeros of torch's own op."""
    k, v = cache()
    q, positions = torch.randn(BATCH, HEADS, 1, WIDTH), torch.tensor([[-1], [4], [-7]])
    for fn in (static, builtin):
        torch.testing.assert_close(
            torch.compile(fn, backend="mlc")(q, k, v, positions), fn(q, k, v, positions), equal_nan=True
        )


def test_lengths_of_any_integer_type_and_any_size() -> None:
    k, v = cache()
    q = torch.randn(BATCH, HEADS, 1, WIDTH)
    for dtype in (torch.int32, torch.int64):
        largest = torch.iinfo(dtype).max
        positions = torch.tensor([[largest], [12], [LENGTH + 5]], dtype=dtype)
        expected = static(q.double(), k.double(), v.double(), positions)
        result = torch.compile(static, backend="mlc")(q, k, v, positions)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


# --- pages and integers -----------------------------------------------------------------------------------------------


def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (k, v))
    return static(q, k, v, positions)


def paged_integers(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, positions: Tensor
) -> Tensor:
    return paged(q, k.to(q.dtype) * k_scale[..., None], v.to(q.dtype) * v_scale[..., None], table, positions)


def integers(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor, positions: Tensor) -> Tensor:
    return static(q, k.to(q.dtype) * k_scale[..., None], v.to(q.dtype) * v_scale[..., None], positions)


def pools(dtype: torch.dtype) -> list[Tensor]:
    shape = (95, PAGE, GROUPS, WIDTH)
    return [torch.randint(-127, 128, shape, dtype=dtype) if dtype is torch.int8 else torch.randn(shape) for _ in "kv"]


@pytest.mark.parametrize("queries", [1, 3, 20])
def test_keys_in_pages(queries: int) -> None:
    torch.manual_seed(0)
    k, v = pools(torch.float32)
    table = torch.randperm(95)[: BATCH * LENGTH // PAGE].view(BATCH, -1)
    q, compiled = torch.randn(BATCH, HEADS, queries, WIDTH), torch.compile(paged, backend="mlc")
    for last in BORDERS:
        positions = positions_of(last, queries)
        expected = paged(q.double(), k.double(), v.double(), table, positions)
        torch.testing.assert_close(compiled(q, k, v, table, positions).double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_of_integers() -> None:
    torch.manual_seed(0)
    shape = (BATCH, GROUPS, LENGTH)
    k, v = (torch.randint(-127, 128, (*shape, WIDTH), dtype=torch.int8) for _ in "kv")
    scales = [torch.rand(shape) / 100 for _ in "kv"]
    q, compiled = torch.randn(BATCH, HEADS, 1, WIDTH), torch.compile(integers, backend="mlc")
    for last in BORDERS:
        positions = positions_of(last, 1)
        expected = integers(q.double(), k, v, *(s.double() for s in scales), positions)
        torch.testing.assert_close(compiled(q, k, v, *scales, positions).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_pages_and_integers_are_read_where_they_lie(target: str) -> None:
    """No copy of the cache: the kernel of attention reads the pools by their table."""
    q, positions = torch.randn(BATCH, HEADS, 1, WIDTH), positions_of((5, 6, 7), 1)
    table = torch.randperm(95)[: BATCH * LENGTH // PAGE].view(BATCH, -1)
    shape = (BATCH, GROUPS, LENGTH)
    kept = [torch.zeros((*shape, WIDTH), dtype=torch.int8), torch.zeros((*shape, WIDTH), dtype=torch.int8)]
    for fn, given in (
        (paged, (*pools(torch.float32), table, positions)),
        (integers, (*kept, torch.rand(shape), torch.rand(shape), positions)),
    ):
        report = torch_mlc.explain(fn, q, *given, target=target)
        (kernel,) = [x for x in report.kernels if "decompose_online" in x.schedule]
        assert "_live" in kernel.source and not report.graphs[0].libraries
        assert len(report.kernels) == 1


def test_a_page_that_is_not_there_is_an_error() -> None:
    k, v = pools(torch.float32)
    table = torch.full((BATCH, LENGTH // PAGE), 95)
    q, positions = torch.randn(BATCH, HEADS, 1, WIDTH), positions_of((5, 6, 7), 1)
    with pytest.raises(IndexError):
        torch.compile(paged, backend="mlc")(q, k, v, table, positions)
