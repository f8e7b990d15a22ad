"""Small models as people write them: what benchmarks lack, each with some way of its own to use tensors.

A model takes what ``inputs`` gives for a size ``n`` (a batch or a length), float tensors in float32; its results are
tensors. Nothing in them was written for a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """``sizes`` are those that one compilation is run at."""

    build: Callable[[], nn.Module]
    inputs: Inputs
    sizes: tuple[int, int] = (3, 5)


class SelectiveScan(nn.Module):
    """A gated state space whose recurrence is a cumulative sum in the logarithm (Mamba's, over a short sequence)."""

    def __init__(self, width: int = 24, states: int = 4) -> None:
        super().__init__()
        self.states = states
        self.enter = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.select = nn.Linear(width, width + 2 * states)
        self.rate = nn.Parameter(torch.rand(width, states))
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[1:]
        u, gate = self.enter(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        step, b, c = self.select(u).split([width, self.states, self.states], -1)
        step = F.softplus(step).unsqueeze(-1)
        decay = torch.exp(torch.cumsum(-step * torch.exp(self.rate), 1))
        states = decay * torch.cumsum(step * b.unsqueeze(2) * u.unsqueeze(-1) / decay.clamp_min(1e-6), 1)
        return self.leave((states * c.unsqueeze(2)).sum(-1) * F.silu(gate))


class Experts(nn.Module):
    """The best two of four experts for each token, and the loss that balances them."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 32) / 4)
        self.down = nn.Parameter(torch.randn(experts, 32, width) / 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        odds = self.gate(tokens).softmax(-1)
        best, chosen = odds.topk(2, -1)
        share = torch.zeros_like(odds).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        hidden = F.gelu(torch.einsum("td,edf->etf", tokens, self.up))
        out = torch.einsum("etf,efd->etd", hidden, self.down)
        balance = ((share > 0).float().mean(0) * odds.mean(0)).sum()
        return (out * share.t().unsqueeze(-1)).sum(0).view_as(x), balance


class GraphAttention(nn.Module):
    """Messages along edges, a softmax over the edges of each node, and a gated update."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.weigh = nn.Linear(2 * width, 1)
        self.update = nn.GRUCell(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        source, target = edges
        pairs = torch.cat([x[source], x[target]], -1)
        scores = self.weigh(pairs).squeeze(-1)
        top = scores.new_full((x.shape[0],), -1e9).scatter_reduce(0, target, scores, "amax")
        odds = torch.exp(scores - top[target])
        total = odds.new_zeros(x.shape[0]).index_add(0, target, odds)
        weights = odds / total[target].clamp_min(1e-9)
        messages = torch.relu(self.message(pairs)) * weights.unsqueeze(-1)
        return self.update(torch.zeros_like(x).index_add(0, target, messages), x)


class Residual(nn.Module):
    """Group norms, convolutions, and a scale and shift of the moment in time."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, given), nn.GroupNorm(4, made)])
        self.convs = nn.ModuleList([nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)])
        self.moment = nn.Linear(16, 2 * made)
        self.skip = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x: Tensor, moment: Tensor) -> Any:
        h = self.convs[0](F.silu(self.norms[0](x)))
        scale, shift = self.moment(F.silu(moment))[..., None, None].chunk(2, 1)
        h = self.norms[1](h) * (1 + scale) + shift
        return self.skip(x) + self.convs[1](F.silu(h))


class Diffusion(nn.Module):
    """A U-Net of one level with attention over pixels; a square image is as wide as a size says."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.middle, self.up = Residual(width, width), Residual(16, 16), Residual(width + 16, width)
        self.halve = nn.Conv2d(width, 16, 3, stride=2, padding=1)
        self.norm, self.qkv, self.mix = nn.GroupNorm(4, 16), nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.moment = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))

    def attend(self, x: Tensor) -> Tensor:
        batch, width, rows, columns = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, rows * columns).unbind(1)
        weights = (torch.einsum("bhcn,bhcm->bhnm", q, k) / math.sqrt(width // self.heads)).softmax(-1)
        out = torch.einsum("bhnm,bhcm->bhcn", weights, v)
        return x + self.mix(out.reshape(batch, width, rows, columns))

    def forward(self, x: Tensor, time: Tensor) -> Any:
        rates = torch.exp(-math.log(10000) * torch.arange(8, dtype=x.dtype) / 8)
        angles = time[:, None].to(x.dtype) * rates
        moment = self.moment(torch.cat([angles.sin(), angles.cos()], -1))
        fine = self.down(self.enter(x), moment)
        coarse = self.attend(self.middle(self.halve(fine), moment))
        coarse = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return self.leave(self.up(torch.cat([coarse, fine], 1), moment))


class BucketedAttention(nn.Module):
    """Attention with a learned bias by distance (T5's buckets) and padded keys."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.bias = nn.LayerNorm(width), nn.Embedding(16, heads)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k, v = heads
        place = torch.arange(length)
        apart = place[None] - place[:, None]
        near = apart.abs()
        far = 4 + (torch.log(near.float().clamp_min(1) / 4) / math.log(16) * 4).long()
        bucket = torch.where(near < 4, near, far.clamp_max(7)) + (apart > 0) * 8
        scores = q @ k.transpose(-1, -2) + self.bias(bucket).permute(2, 0, 1).unsqueeze(0)
        weights = scores.masked_fill(padded[:, None, None, :], float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Codebook(nn.Module):
    """The nearest of some vectors for each pixel, with a straight-through gradient, and how often each was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 8, 4, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.book = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enter(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 8)
        apart = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.book.t() + self.book.pow(2).sum(1)
        chosen = apart.argmin(1)
        near = self.book[chosen].view_as(z)
        loss = F.mse_loss(near, z.detach()) + 0.25 * F.mse_loss(z, near.detach())
        out = self.leave((z + (near - z).detach()).permute(0, 3, 1, 2))
        return out, loss, torch.bincount(chosen, minlength=12)


class Rays(nn.Module):
    """Colours along rays: sines of positions, densities, and products of what the samples before let through."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(27, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = (x[..., None] * 2.0 ** torch.arange(4, dtype=x.dtype) * math.pi).flatten(-2)
        found = self.leave(torch.relu(self.enter(torch.cat([x, angles.sin(), angles.cos()], -1))))
        density, colour = F.softplus(found[..., 0]), torch.sigmoid(found[..., 1:])
        opaque = 1 - torch.exp(-density * 0.3)
        clear = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-6], -1), -1)[:, :-1]
        weights = opaque * clear
        depth = (weights * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)).sum(1)
        return (weights[..., None] * colour).sum(1), weights.sum(1), depth


class Windows(nn.Module):
    """Attention inside windows of an image that is shifted round, with a bias by place and a mask at the seam."""

    def __init__(self, width: int = 16, heads: int = 2, window: int = 4) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.1)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("place", apart[..., 0] * (2 * window - 1) + apart[..., 1])

    def parted(self, x: Tensor) -> Tensor:
        batch, rows, columns, width = x.shape
        w = self.window
        parts = x.view(batch, rows // w, w, columns // w, w, width).permute(0, 1, 3, 2, 4, 5)
        return parts.reshape(-1, w * w, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, width = x.shape
        w, half, area = self.window, self.window // 2, self.window**2
        parts = self.parted(torch.roll(self.norm(x), (-half, -half), (1, 2)))
        q, k, v = self.qkv(parts).reshape(-1, area, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seam = x.new_zeros(1, rows, columns, 1)
        seam[:, -half:] += 1
        seam[:, :, -half:] += 2
        side = self.parted(seam).squeeze(-1)
        mask = (side[:, None] - side[:, :, None]).ne(0).to(x.dtype) * -100
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads) + self.table[self.place].permute(2, 0, 1)
        scores = scores.view(batch, -1, self.heads, area, area) + mask[None, :, None]
        weights = scores.view(-1, self.heads, area, area).softmax(-1)
        out = self.out((weights @ v).transpose(1, 2).reshape(-1, area, width))
        whole = out.view(batch, rows // w, columns // w, w, w, width).permute(0, 1, 3, 2, 4, 5)
        return x + torch.roll(whole.reshape(batch, rows, columns, width), (half, half), (1, 2))


class Excited(nn.Module):
    """A wide depthwise convolution, an inverted bottleneck, channels weighed by their means, batch statistics."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.squeeze, self.excite = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)
        self.batch = nn.BatchNorm2d(width, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))) * self.scale
        x = x + y.permute(0, 3, 1, 2)
        weights = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        # The statistics take each weight out again: without the second product its gradient is only rounding noise.
        return F.hardswish(self.batch(x * weights) * weights + x)


class Warped(nn.Module):
    """An image under an affine map of itself, made larger, pooled, and laid out as windows."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.conv = nn.Linear(16, 6), nn.Conv2d(2, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        theta = self.map(F.adaptive_avg_pool2d(x, (2, 4)).flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3).to(x)
        rows, columns = (torch.linspace(-1, 1, n, dtype=x.dtype) for n in x.shape[2:])
        places = torch.stack([*torch.meshgrid(columns, rows, indexing="xy"), x.new_ones(x.shape[2:])], -1)
        grid = torch.einsum("hwp,bcp->bhwc", places, theta)
        y = F.grid_sample(x, grid, align_corners=False, padding_mode="border")
        larger = F.interpolate(y, size=(9, 11), mode="bicubic", align_corners=False)
        return F.pixel_shuffle(self.conv(y), 2), larger, F.max_pool2d(y, 3, 2, 1), F.unfold(y, 3)


class Spectral(nn.Module):
    """A product with the low frequencies of an image (Fourier neural operator)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.conv = nn.Parameter(torch.randn(4, 4, 5, 3, 2) / 4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", waves[:, :, :5, :3], torch.view_as_complex(self.weight))
        made = torch.zeros_like(waves)
        made[:, :, :5, :3] = low
        return F.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + self.conv(x))


class Spectrogram(nn.Module):
    """Normalised log power of a signal's short-time spectrum, and the signal made of it again."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.hann_window(32, dtype=x.dtype)
        waves = torch.stft(x, 32, 8, window=window, return_complex=True)
        power = torch.log(waves.abs() ** 2 + 1e-3)
        power = (power - power.mean(-1, keepdim=True)) / (power.std(-1, keepdim=True) + 1e-5)
        return power, torch.istft(waves * 2, 32, 8, window=window, length=x.shape[-1])


class Chain(nn.Module):
    """Best paths and likelihoods of a hidden Markov model, and a transport plan by alternating normalisation."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.steps, self.start = nn.Parameter(torch.randn(states, states)), nn.Parameter(torch.randn(states))

    def forward(self, emitted: Tensor) -> tuple[Tensor, ...]:
        likely = best = self.start + emitted[:, 0]
        back = []
        for t in range(1, 5):
            best, came = (best.unsqueeze(2) + self.steps).max(1)
            best = best + emitted[:, t]
            back.append(came)
            likely = torch.logsumexp(likely.unsqueeze(2) + self.steps, 1) + emitted[:, t]
        cost = torch.cdist(emitted[:, 0], emitted[:, 1])
        rows, columns = torch.zeros_like(cost[:, 0]), torch.zeros_like(cost[0])
        for _ in range(4):
            rows = -torch.logsumexp(columns - cost, 1)
            columns = -torch.logsumexp(rows[:, None] - cost, 0)
        return likely.logsumexp(1), torch.stack(back, 1), (torch.exp(rows[:, None] + columns - cost) * cost).sum()


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _padded(n: int) -> Tensor:
    return torch.arange(9) >= torch.linspace(3, 9, n).long()[:, None]


ARCHITECTURES = {
    "selective scan": Architecture(SelectiveScan, lambda n: (_randn(2, n, 24),), (7, 12)),
    "experts": Architecture(Experts, lambda n: (_randn(n, 6, 16),)),
    "graph attention": Architecture(
        GraphAttention, lambda n: (_randn(n, 12), torch.randint(0, n, (2, 4 * n))), (9, 14)
    ),
    "diffusion": Architecture(Diffusion, lambda n: (_randn(2, 3, n, n), torch.randint(0, 1000, (2,))), (8, 12)),
    "bucketed attention": Architecture(BucketedAttention, lambda n: (_randn(n, 9, 16), _padded(n))),
    "codebook": Architecture(Codebook, lambda n: (_randn(n, 3, 8, 8),)),
    "rays": Architecture(Rays, lambda n: (_randn(n, 6, 3),)),
    "windows": Architecture(Windows, lambda n: (_randn(n, 8, 12, 16),)),
    "excited": Architecture(Excited, lambda n: (_randn(n, 8, 7, 9),)),
    "warped": Architecture(Warped, lambda n: (_randn(n, 2, 8, 10),)),
    "spectral": Architecture(Spectral, lambda n: (_randn(n, 4, 12, 10),)),
    "spectrogram": Architecture(Spectrogram, lambda n: (_randn(n, 200),)),
    "chain": Architecture(Chain, lambda n: (_randn(n, 5, 4),)),
}
