"""Small models whose lock files are part of the tests, and machines of fixed figures that they are made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_mlc.ir.target import Target


def _cpu(arch: str, cores: int, vector_bytes: int, features: str) -> Target:
    return Target("cpu", arch, cores, vector_bytes, 32 << 10, 1 << 20, warp=1, max_threads=1, features=features)


# What LLVM needs to know of them; no library that this machine may have or lack.
TARGETS = {
    "avx2": _cpu("x86-64-v3", 4, 32, "+avx,+avx2,+fma,+f16c"),
    "avx512": _cpu("x86-64-v4", 4, 64, "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl"),
}
GPU = "cuda:sm_90"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A layer of a transformer, attention written out."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.after(x))


class Stack(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.log_softmax(self.head(x), -1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.point = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.point(F.relu(self.norm(self.stem(x))))).mean((2, 3))


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight.to(x.dtype)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)

    def forward(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(words[:, :-1])).flatten(0, 1), words[:, 1:].flatten())


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def column_sums(x: Tensor) -> Tensor:
    return (x * x).sum(0).sqrt()


def running_mean(x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)


def either(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: torch.softmax(t, -1), lambda t: t.relu() + 1, (x,))


def broken(x: Tensor) -> Tensor:
    y = torch.softmax(x, -1)
    torch._dynamo.graph_break()
    return (y * 2).sum(-1)


@dataclass(frozen=True, slots=True)
class LockModel:
    """``make`` gives the model and its inputs."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]
    training: bool = False
    dynamic: bool | None = None
    gpu: bool = False


MODELS = {
    "mlp": LockModel(lambda: (Mlp(), (torch.randn(16, 32),)), gpu=True),
    "mlp_training": LockModel(lambda: (Mlp(), (torch.randn(16, 32),)), training=True),
    "stack": LockModel(lambda: (Stack(), (torch.randn(2, 8, 32),))),
    "stack_training": LockModel(lambda: (Stack(1), (torch.randn(2, 8, 32),)), training=True),
    "convolutions": LockModel(lambda: (Convolutions().eval(), (torch.randn(2, 3, 16, 16),))),
    "rms_norm_bfloat16": LockModel(lambda: (RmsNorm(), (torch.randn(33, 256, dtype=torch.bfloat16),)), gpu=True),
    "words": LockModel(lambda: (Words(), (torch.randint(0, 100, (4, 9)),)), training=True),
    "softmax": LockModel(lambda: (softmax, (torch.randn(64, 1000),)), gpu=True),
    "softmax_sizes": LockModel(lambda: (softmax, (torch.randn(64, 1000),)), dynamic=True),
    "column_sums": LockModel(lambda: (column_sums, (torch.randn(4096, 64),)), gpu=True),
    "running_mean": LockModel(lambda: (running_mean, (torch.randn(8, 100),))),
    "either": LockModel(lambda: (either, (torch.randn(8, 16),))),
    "broken": LockModel(lambda: (broken, (torch.randn(8, 16),))),
}
