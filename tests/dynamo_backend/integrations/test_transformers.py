"""transformers' ``generate`` as it is, and, where it is not installed, what it does to a compiler: caches of its own
that a compiled forward writes in place, sizes that change from prompt to prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS = 50, 32, 4


class GrowingCache:
    """Keys and values that grow by concatenation, as a dynamic cache's do."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = k if self.keys is None else torch.cat((self.keys, k), -2)
        self.values = v if self.values is None else torch.cat((self.values, v), -2)
        return self.keys, self.values


class FixedCache:
    """Keys and values of a fixed length, with the number of those that are alive, as a static cache's are."""

    def __init__(self, length: int, batch: int = 1) -> None:
        shape = (batch, HEADS, length, WIDTH // HEADS)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.length = torch.tensor(0)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(k.shape[-2]) + self.length
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        self.length.add_(k.shape[-2])
        return self.keys, self.values


class Small(nn.Module):
    """One layer, greedy: the protocol and not the size is what is tested."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor, cache: GrowingCache | FixedCache) -> Tensor:
        batch, length = tokens.shape
        parts = self.qkv(self.tokens(tokens)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        k, v = cache.update(parts[1], parts[2])
        mask = torch.arange(k.shape[-2]) <= positions[:, None]
        y = F.scaled_dot_product_attention(parts[0], k, v, attn_mask=mask)
        return self.head(y.transpose(1, 2).reshape(batch, length, WIDTH))[:, -1].argmax(-1)


def answer(step: object, tokens: Tensor, count: int, cache: GrowingCache | FixedCache, prompt: object) -> list[int]:
    """A prompt by one function, each token after it by another."""
    length = tokens.shape[1]
    found = [prompt(tokens, torch.arange(length), cache)]  # type: ignore[operator]
    for k in range(count - 1):
        found.append(step(found[-1][:, None], torch.tensor([length + k]), cache))  # type: ignore[operator]
    return [int(t) for t in found]


def requests() -> list[tuple[Tensor, int]]:
    torch.manual_seed(1)
    lengths = torch.randint(3, 60, (20,)).tolist()
    # A token of padding in a prompt would have transformers pass a mask.
    return [(torch.randint(1, VOCABULARY, (1, n)), 2 + n % 7) for n in lengths]


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_twenty_prompts_take_two_graphs(cache: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Small().eval().requires_grad_(False)
    made = (lambda: FixedCache(80)) if cache == "static" else GrowingCache
    # A cache of a fixed length changes nothing but its contents; one that grows has sizes that vary.
    compiled = torch.compile(model, backend="mlc", dynamic=cache == "dynamic", fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        for tokens, count in requests():
            expected = answer(model, tokens, count, made(), model)
            assert answer(compiled, tokens, count, made(), model) == expected
    assert counters["stats"]["unique_graphs"] - before <= 2


def padded_mask(pads: Sequence[int], positions: Tensor, length: int, additive: bool) -> Tensor:
    """The mask of a batch whose prompts begin behind so many tokens of padding, over a cache of a fixed length: bool,
    or what is added to scores."""
    keys, first = torch.arange(length), torch.tensor(pads)
    seen = (keys <= positions[:, None]) & (keys >= first[:, None])[:, None, None, :]
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min) if additive else seen


class Padded(Small):
    """The same for a batch of prompts, with the mask from outside."""

    def forward(self, tokens: Tensor, positions: Tensor, cache: FixedCache, mask: Tensor) -> Tensor:  # type: ignore[override]
        batch, length = tokens.shape
        parts = self.qkv(self.tokens(tokens)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        k, v = cache.update(parts[1], parts[2])
        y = F.scaled_dot_product_attention(parts[0], k, v, attn_mask=mask)
        return self.head(y.transpose(1, 2).reshape(batch, length, WIDTH))


@pytest.mark.parametrize("additive", [False, True])
def test_prompts_that_are_padded_on_the_left(additive: bool) -> None:
    """Rows of padding see nothing, and what they give goes into the cache, where nobody reads it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, length = Padded().eval().requires_grad_(False), 40
    compiled = torch.compile(model, backend="mlc", dynamic=False, fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    for pads in ((0, 3, 9), (5, 0, 1), (11, 11, 0)):
        caches, start = [FixedCache(length, batch=3) for _ in range(2)], 0
        for count in (12, 1, 1, 1):
            tokens, positions = torch.randint(0, VOCABULARY, (3, count)), torch.arange(start, start + count)
            mask = padded_mask(pads, positions, length, additive)
            wanted, found = (f(tokens, positions, c, mask) for f, c in zip((model, compiled), caches, strict=True))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            start += count
        torch.testing.assert_close(caches[1].keys, caches[0].keys)
    assert counters["stats"]["unique_graphs"] - before == 2


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_transformers_as_it_is(cache: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    compiling = transformers.CompileConfig(backend="mlc", mode=None, dynamic=cache == "dynamic" or None)
    compiling._compile_all_devices = True
    settings = {"cache_implementation": "static", "compile_config": compiling}
    if cache == "dynamic":
        settings = {}
    before = counters["stats"]["unique_graphs"]
    plain = model.forward
    for tokens, count in requests():
        model.forward = plain
        expected = model.generate(tokens, max_new_tokens=count, do_sample=False)
        if cache == "dynamic":
            model.forward = torch.compile(plain, backend="mlc", dynamic=True)
        assert torch.equal(model.generate(tokens, max_new_tokens=count, do_sample=False, **settings), expected)
    assert counters["stats"]["unique_graphs"] - before <= 2
