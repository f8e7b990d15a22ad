"""Attention modules as people write them, compiled for this machine, against eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torch_mlc
from torch_mlc.dynamo_backend.reports.model_report import Report

HEADS, WIDTH = 4, 64
STRICT = {"strict": True}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Decoder(nn.Module):
    """Grouped-query attention with rotary positions, a soft cap, a sliding window and an output projection."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.groups, self.size = groups, WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, self.size).transpose(1, 2)
        k, v = (y.view(b, t, self.groups, self.size).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        angle = torch.arange(t)[:, None] / 100 ** (torch.arange(self.size // 2) / self.size)
        cos, sin = (f(torch.cat((angle, angle), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (y.repeat_interleave(HEADS // self.groups, 1) for y in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        scores = torch.tanh(scores / 5) * 5
        i = torch.arange(t)
        far = (i[None] > i[:, None]) | (i[:, None] - i[None] > 9)
        scores = scores.masked_fill(far, float("-inf"))
        p = torch.softmax(scores.float(), -1).to(x.dtype)
        return self.out((p @ v).transpose(1, 2).reshape(b, t, WIDTH))


class Encoder(nn.Module):
    """A fused projection, a key padding mask that is added, and dropout that does nothing in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = (1.0 - keep[:, None, None, :].to(x.dtype)) * -10000.0
        p = self.drop(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 4 + mask, -1))
        return self.out(torch.matmul(p, v).permute(0, 2, 1, 3).flatten(2))


def inputs(module: nn.Module, batch: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = torch.randn(batch, length, WIDTH).to(dtype)
    return (x, torch.rand(batch, length) < 0.8) if isinstance(module, Encoder) else (x,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_modules_agree_with_eager(kind: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    args = inputs(module, 2, 37, torch.float32)
    expected = module.double()(*(a.double() if a.is_floating_point() else a for a in args))
    module, args = module.to(dtype), tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    with torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(module, backend="mlc", options=STRICT)(*args)
        close = (
            1e-5 if dtype is torch.float32 else max(2e-2, 2 * (module(*args).double() - expected).abs().max().item())
        )
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)


def test_one_program_serves_lengths_and_batches() -> None:
    torch.manual_seed(1)
    module = Decoder().eval()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="mlc", options=STRICT, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 24), (3, 41), (5, 7)):
            args = inputs(module, batch, length, torch.float32)
            torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_scores_are_never_in_memory(kind: Callable[[], nn.Module]) -> None:
    module = kind().eval()
    report = torch_mlc.explain(module, *inputs(module, 2, 512, torch.float32), options={"cache": False})
    assert any(k.rule == "cpu_attention" for k in report.kernels), str(report)
    assert not any("bmm" in c.op for g in report.graphs for c in g.libraries), str(report)
    scores = 2 * HEADS * 512 * 512 * 4
    assert report.graphs[0].typical_peak < scores / 4


def test_training_keeps_gradients() -> None:
    torch.manual_seed(2)
    module: Any = Decoder()
    x = torch.randn(2, 20, WIDTH)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    torch._dynamo.reset()
    torch.compile(module, backend="mlc", options=STRICT)(x).square().sum().backward()
    for p, want in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-4)


def test_a_report_says_why_attention_stays_apart() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(q @ k.mT, -1)
        return p @ v, p

    text = str(torch_mlc.explain(both, *(torch.randn(2, 32, 16) for _ in range(3)), options={"cache": False}))
    assert "attention stays apart" in text and "is an output of the graph" in text


def on_a_gpu(size: int) -> Report:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(64, device=q.device)
        scores = torch.tanh(q @ k.mT / 20) * 20
        return torch.softmax(scores.masked_fill(i[None] > i[:, None], float("-inf")), -1) @ v

    inputs = [torch.randn(2, 4, 64, size).bfloat16() for _ in range(3)]
    return torch_mlc.explain(attend, *inputs, target="cuda:sm_90", options={"cache": False})


def test_on_a_gpu_heads_of_any_usual_size_open() -> None:
    report = on_a_gpu(64)
    assert [k.rule for k in report.kernels] == ["gpu_attention"] and not report.fallbacks, str(report)
    assert not report.graphs[0].libraries


def test_on_a_gpu_heads_that_fill_no_tile_stay_apart() -> None:
    assert "heads of 8 and 8 elements; a tile holds 16 to 256" in str(on_a_gpu(8))


# --- FlexAttention ----------------------------------------------------------------------------------------------------


def flex_inputs(groups: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(2, 32, h, 16, generator=g) for h in (HEADS, groups, groups)]


def test_flex_attention_with_a_score_mod_and_groups() -> None:
    slope = torch.linspace(0.1, 1, HEADS)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s / 20) * 20 + slope[h] * (j - i)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return flex_attention(q, k, v, score_mod=score, enable_gqa=True)  # type: ignore[return-value]

    agree_in_one_kernel(attend, *flex_inputs(2))


def test_flex_attention_gives_zeros_where_the_mask_leaves_nothing() -> None:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 9) & (i > 4)

    blocks = create_block_mask(mask, None, None, 32, 32, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=blocks)  # type: ignore[return-value]

    result = agree_in_one_kernel(attend, *flex_inputs(HEADS))
    assert (result[:, :, :5] == 0).all()


@pytest.mark.parametrize("shape", [(2, 0, 5, 8), (0, 2, 5, 8), (2, 3, 0, 8)], ids=str)
def test_flex_attention_of_nothing(shape: tuple[int, ...]) -> None:
    """Torch's own, which is not compiled, divides by the number of heads."""

    def attend(x: Tensor) -> Tensor:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + i - j)  # type: ignore[return-value]

    assert torch.compile(attend, backend="mlc", fullgraph=True)(torch.randn(shape)).shape == shape


def test_flex_attention_on_a_gpu_that_is_not_here() -> None:
    """The user's functions are traced where their constants can be."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, s * 0.5, -torch.inf)

    def attend(x: Tensor) -> Tensor:
        return flex_attention(x, x, x, score_mod=score)  # type: ignore[return-value]

    for dynamic in (False, True):
        report = torch_mlc.explain(attend, torch.randn(2, 4, 64, 32), dynamic=dynamic, target="cuda:sm_90")
        assert [k.rule for k in report.kernels] == ["gpu_attention"] and not report.fallbacks, str(report)


def test_flex_attention_scales_by_a_size_that_varies() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(*(t.transpose(1, 2) for t in (q, k, v)))  # type: ignore[return-value]

    run = torch.compile(attend, backend="mlc", dynamic=True, fullgraph=True)
    for rows, width in ((32, 16), (48, 24), (20, 8)):
        given = [torch.randn(2, rows, HEADS, width) for _ in range(3)]
        torch.testing.assert_close(run(*given), attend(*given), rtol=1e-5, atol=1e-5)


def agree_in_one_kernel(attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(attend, backend="mlc", options=STRICT)(*inputs)
        expected = attend(*inputs)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert result.stride() == expected.stride()
    report = torch_mlc.explain(attend, *inputs, options={"cache": False})
    assert [k.rule for k in report.kernels] == ["cpu_attention"], str(report)
    assert not report.graphs[0].libraries
    return result
