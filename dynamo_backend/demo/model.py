"""A small GPT, written by hand in plain PyTorch: what a user of torch.compile would write."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROTARY_BASE = 1000.0
INITIAL_SPREAD = 0.05  # of a width this small; 0.02, usual for wide models, learns more slowly here


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model; the defaults train in minutes on two CPU cores."""

    vocabulary: int
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, length, width] (Su et al., RoFormer, 2021)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(ROTARY_BASE) / half))
    angles = torch.arange(length, device=x.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(parts[0]), rotate(parts[1]), parts[2], is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Decoder over characters, with rotary positions and the embedding tied to the output.

    `forward(tokens, targets)`, both int64 [batch, length], gives the mean cross-entropy in nats;
    `next_logits(tokens)` gives float32 [batch, vocabulary] for the character after the last.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=INITIAL_SPREAD / (2 * shape.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_SPREAD)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.hidden(tokens), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def next_logits(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens)[:, -1], self.tokens.weight)
