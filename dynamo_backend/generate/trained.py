"""A small decoder that learns the demo's text on the spot, a token a character, so that nothing has to be
downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..demo.text import batches, load_corpus
from .config import DecoderConfig
from .model import Decoder, DecoderLayer, causal
from .tokens import Characters

BATCH, LENGTH, PEAK_RATE = 12, 128, 3e-3
# What is told between: the step, and the loss in nats a character.
Told = Callable[[int, float], None]


def small_config(vocabulary: int) -> DecoderConfig:
    """About 0.8 M parameters, which learn in a minute or two on two CPU cores."""
    return DecoderConfig(
        vocabulary=vocabulary, width=128, layers=4, heads=4, kv_heads=2, head_width=32, hidden=344, context=1024,
        rope_theta=1000.0, tied=True,
    )  # fmt: skip


def train_decoder(
    steps: int, seed: int, backend: str = "mlc", told: Told = lambda step, loss: None
) -> tuple[Decoder, Characters]:
    """A decoder trained for so many steps by ``backend``, with its tokenizer; equal seeds give equal weights."""
    corpus = load_corpus()
    torch.manual_seed(seed)
    model = Decoder(small_config(len(corpus.alphabet)))
    _initialise(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.1)
    positions = torch.arange(LENGTH)[None]

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model.logits(model(tokens, positions, causal))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    step = loss_of if backend == "eager" else torch.compile(loss_of, backend=backend, dynamic=False)
    warm, data = max(1, steps // 10), batches(corpus.training, BATCH, LENGTH, seed, "cpu")
    for k in range(steps):
        along = max(0, k - warm) / max(1, steps - warm)
        rate = PEAK_RATE * (min(1.0, (k + 1) / warm) if k < warm else 0.55 + 0.45 * math.cos(math.pi * along))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = step(*next(data))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told(k + 1, loss.item())
    return model.eval().requires_grad_(False), Characters(corpus.alphabet)


def _initialise(model: Decoder) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
    # What is added to the residual adds up over the layers.
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(out.weight, std=0.05 / math.sqrt(2 * model.config.layers))
