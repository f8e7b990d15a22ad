"""Attention in plain operations through torch.compile: one kernel, the same numbers as in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_mlc


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = _positions(q, k)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return torch.softmax(torch.where(n <= m, scores, float("-inf")), -1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.mT / 20) * 20, -1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    return softcap(q, k, v)


def rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softcap(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fn", [causal, softcap, grouped, rows_first], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_kernel(fn: Callable[..., Tensor], dynamic: bool) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(fn, backend="mlc", dynamic=dynamic)
    for length in (70, 33) if dynamic else (70,):
        shape = (1, length, 4, 16) if fn is rows_first else (1, 4, length, 16)
        inputs = [torch.randn(shape) for _ in range(3)]
        expected = fn(*(x.double() for x in inputs))
        torch.testing.assert_close(compiled(*inputs).double(), expected, rtol=1e-5, atol=1e-5)
    (graph,) = torch_mlc.explain(fn, *inputs).graphs
    (kernel,) = graph.kernels
    assert "decompose_online" in kernel.schedule


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q * 0.5) @ k.mT / 4, -1) @ v


def plain_rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fn", [plain, plain_rows_first], ids=lambda f: f.__name__)
def test_long_sequences_of_wide_heads_are_the_library_s(fn: Callable[..., Tensor]) -> None:
    """By cost, which the report tells; shorter rows and half types are kernels of ours."""
    torch.manual_seed(0)
    shapes = [(1, n, 2, 128) if fn is plain_rows_first else (1, 2, n, 128) for n in (769, 80, 80)]
    inputs = [torch.randn(shape) for shape in shapes]
    compiled = torch.compile(fn, backend="mlc")
    expected = fn(*(x.double() for x in inputs))
    torch.testing.assert_close(compiled(*inputs).double(), expected, rtol=1e-5, atol=1e-5)
    (graph,) = torch_mlc.explain(fn, *inputs).graphs
    assert [lib.reason.partition(":")[0] for lib in graph.libraries] == ["attention"]
    assert "in torch's: 2 x 769 x 80 x 128" in graph.libraries[0].reason
    few = [x[:, :, :64] if fn is plain else x[:, :64].bfloat16() for x in inputs]
    assert not torch_mlc.explain(fn, *few).graphs[0].libraries


def decoded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads that share keys, as a cache of them is read."""
    k, v = (x[:, :2, :-3].repeat_interleave(2, 1) for x in (k, v))
    return softcap(q, k, v)


@pytest.mark.parametrize("fn", [softcap, decoded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dynamic", [False, True])
def test_few_rows(fn: Callable[..., Tensor], rows: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(fn, backend="mlc", dynamic=dynamic)
    for length in (1100, 70) if dynamic else (1100,):
        inputs = [torch.randn(1, 4, n, 16) for n in (rows, length, length)]
        expected = fn(*(x.double() for x in inputs))
        torch.testing.assert_close(compiled(*inputs).double(), expected, rtol=1e-5, atol=1e-5)
    (graph,) = torch_mlc.explain(fn, *inputs).graphs
    assert [k.rule for k in graph.kernels] == ["cpu_attention_rows"] and not graph.libraries


def test_one_row_of_one_head() -> None:
    inputs = [torch.randn(1, 1, length, 16) for length in (1, 70, 70)]
    result = torch.compile(softcap, backend="mlc")(*inputs)
    torch.testing.assert_close(result.double(), softcap(*(x.double() for x in inputs)), rtol=1e-5, atol=1e-5)
    (graph,) = torch_mlc.explain(softcap, *inputs).graphs
    assert [k.rule for k in graph.kernels] == ["cpu_attention_rows"]


def of_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_s_own_attention_is_generated_where_that_is_faster(dtype: torch.dtype, rows: int, dynamic: bool) -> None:
    """Decoding, and a causal mask over more keys than queries; in the layout of a projection."""
    torch.manual_seed(0)
    compiled = torch.compile(of_torch, backend="mlc", dynamic=dynamic)
    for length in (1100, 70) if dynamic else (1100,):
        inputs = [torch.randn(2, n, 4, 32).to(dtype).transpose(1, 2) for n in (rows, length, length)]
        expected = of_torch(*(x.double() for x in inputs), rows > 1)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        result = compiled(*inputs, rows > 1)
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
        assert result.shape == expected.shape and result.dtype is dtype
    inputs = [torch.randn(2, n, 4, 32).to(dtype).transpose(1, 2) for n in (rows, 1100, 1100)]
    (graph,) = torch_mlc.explain(of_torch, *inputs, rows > 1).graphs
    assert [k.rule for k in graph.kernels] == ["cpu_attention_rows" if rows == 1 else "cpu_attention"]


def test_torch_s_own_attention_stays_where_it_is_faster_and_trains() -> None:
    inputs = [torch.randn(1, 2, 1024, 128) for _ in range(3)]
    (graph,) = torch_mlc.explain(of_torch, *inputs, False).graphs
    (call,) = graph.libraries
    assert "in our loops" in call.reason and "1024 x 1024 x 128" in call.reason
    given = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in given]
    torch.compile(of_torch, backend="mlc")(*given, True).square().sum().backward()
    of_torch(*exact, True).square().sum().backward()
    for x, y in zip(given, exact, strict=True):
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-5)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_s_own_attention_with_a_mask_is_generated(dtype: torch.dtype, queries: int, dynamic: bool) -> None:
    """Of bools or of numbers that are added, for all heads or for each; rows that see nothing are zeros, as eager's."""
    torch.manual_seed(0)
    loops = {"libraries": "none"}
    compiled = torch.compile(masked, backend="mlc", dynamic=dynamic, options=loops)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for keys in (70, 37) if dynamic else (70,):
        inputs = [torch.randn(2, 4, n, 16).to(dtype) for n in (queries, keys, keys)]
        unseen = torch.rand(2, 4, queries, keys) < 0.5
        unseen[0, 1, 0] = True
        added = torch.randn(queries, keys).masked_fill(unseen[0, 1], -torch.inf)
        for mask in (unseen, unseen[:, :1], added.to(dtype)):
            expected = masked(*(x.double() for x in inputs), mask.double() if mask.is_floating_point() else mask)
            torch.testing.assert_close(compiled(*inputs, mask).double(), expected, rtol=tolerance, atol=tolerance)
            assert not torch_mlc.explain(masked, *inputs, mask, options=loops).graphs[0].libraries


def test_a_mask_of_positions_hides_keys_from_our_loops_and_one_in_memory_does_not() -> None:
    q, k, v = (torch.randn(1, 4, n, 64) for n in (512, 2048, 2048))
    position = torch.arange(512)

    def within(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        return masked(q, k, v, torch.arange(2048)[None] <= position[:, None])

    def choice(report: torch_mlc.Report) -> str:
        (found,) = (d for d in report.graphs[0].decisions if d.kind == "attention")
        return found.reason

    report = torch_mlc.explain(within, q, k, v, position)
    assert choice(report).endswith("512 x 2048 x 64, a mask of positions") and not report.graphs[0].libraries
    given = torch.arange(2048)[None] <= position[:, None]
    assert choice(torch_mlc.explain(masked, q, k, v, given)).endswith("512 x 2048 x 64, a mask")


def test_rows_whose_scores_are_infinite_are_those_of_torch_s_own_attention() -> None:
    q, k, v = (torch.rand(1, 2, n, 8) for n in (4, 70, 70))
    q[0, 0, 0, 0], q[0, 1, 1, 0], k[0, 0, 3, 1] = -torch.inf, torch.inf, torch.nan
    mask = torch.zeros(4, 70)
    mask[2], mask[3, 5] = -torch.inf, torch.inf
    found = torch.compile(masked, backend="mlc")(q, k, v, mask)
    torch.testing.assert_close(found, masked(q, k, v, mask), equal_nan=True)
    found = torch.compile(of_torch, backend="mlc")(q, k, v, False)
    torch.testing.assert_close(found, of_torch(q, k, v, False), equal_nan=True)
