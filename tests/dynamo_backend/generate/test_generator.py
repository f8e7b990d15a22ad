"""Prompts together and alone, caches, admission, sampling, and how many graphs it takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch._dynamo.utils import counters

from torch_mlc import Generator
from torch_mlc.dynamo_backend.generate.errors import GenerateError
from torch_mlc.dynamo_backend.generate.model import Decoder, causal
from torch_mlc.dynamo_backend.generate.tokens import Characters

PROMPTS = ["to be", "x", "the quality of mercy is not strained", "a b c", "romeo romeo wherefore art thou", "zz"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def without_cache(model: Decoder, tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens, all of the text computed anew for each."""
    given = list(tokens)
    for _ in range(count):
        here = torch.tensor(given)[None]
        states = model(here, torch.arange(len(given))[None], causal)
        given.append(int(model.logits(states[0, -1]).argmax()))
    return given[len(tokens) :]


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_two_graphs_serve_all_lengths_and_answers_do_not_depend_on_neighbours(
    decoder: Decoder, characters: Characters, cache: str
) -> None:
    expected = [without_cache(decoder, characters.encode(p), 12) for p in PROMPTS]
    before = counters["stats"]["unique_graphs"]
    generator = Generator(decoder, characters, batch=3, length=64, cache=cache, chunk=8, page=8)
    found: list[list[int]] = [[] for _ in PROMPTS]
    for piece in generator.generate(PROMPTS, max_new_tokens=12):
        found[piece.prompt].append(piece.token)
    assert found == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert [p.token for p in generator.generate(prompt, max_new_tokens=12)] == answer
    assert counters["stats"]["unique_graphs"] - before == 2


def test_prompts_are_admitted_as_others_finish(decoder: Decoder, characters: Characters) -> None:
    """Two slots: the third prompt begins when the short first one has ended, not when all have."""
    generator = Generator(decoder, characters, batch=2, length=64, chunk=4, backend="eager")
    limits = generator.generate([p[:4] for p in PROMPTS[:2]] + ["ab"], max_new_tokens=5)
    order = [p.prompt for p in limits]
    assert sorted(order) == sorted([0, 1, 2] * 5)
    assert order.index(2) > max(k for k, n in enumerate(order) if n == 0)
    # Prompts of several chunks do not keep those at work from going on.
    long, short = "a" * 40, "b"
    order = [p.prompt for p in generator.generate([short, long], max_new_tokens=10)]
    assert order[:5] == [0] * 5


def test_pages_are_given_back_and_waited_for(decoder: Decoder, characters: Characters) -> None:
    few = Generator(decoder, characters, batch=3, length=32, cache="paged", page=8, pages=4, backend="eager")
    many = Generator(decoder, characters, batch=3, length=32, cache="paged", page=8, backend="eager")
    prompts = [p[:8] for p in PROMPTS]
    for _ in range(2):
        assert few.texts(prompts, max_new_tokens=16) == many.texts(prompts, max_new_tokens=16)
    pieces = few.generate(prompts, max_new_tokens=16)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert few.texts(prompts, max_new_tokens=16) == many.texts(prompts, max_new_tokens=16)
    with pytest.raises(GenerateError, match="take 4 pages of 8; the cache has 3"):
        Generator(decoder, characters, length=32, cache="paged", page=8, pages=3, backend="eager").texts(
            ["a" * 16], max_new_tokens=16
        )


def test_draws_follow_the_seed_and_not_the_neighbours(decoder: Decoder, characters: Characters) -> None:
    generator = Generator(decoder, characters, batch=3, length=64, chunk=8)
    settings = {"max_new_tokens": 10, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
    first = generator.texts(PROMPTS, seed=1, **settings)
    assert first == generator.texts(PROMPTS, seed=1, **settings)
    assert first != generator.texts(PROMPTS, seed=2, **settings)
    eager = Generator(decoder, characters, batch=2, length=64, chunk=8, backend="eager")
    assert first == eager.texts(PROMPTS, seed=1, **settings)
    assert first[0] == generator.texts(PROMPTS[:1], seed=1, **settings)[0]
    # One token that may be drawn is the likeliest.
    likeliest = eager.texts(PROMPTS, max_new_tokens=6)
    assert likeliest == generator.texts(PROMPTS, max_new_tokens=6, temperature=1.0, top_k=1)
    assert likeliest == generator.texts(PROMPTS, max_new_tokens=6, temperature=1.0, top_p=1e-6)


def test_a_stop_token_ends_an_answer(decoder: Decoder, characters: Characters) -> None:
    tokens = without_cache(decoder, characters.encode("to be"), 12)
    stop = tokens[5]
    end = tokens.index(stop)
    generator = Generator(decoder, characters, length=64, backend="eager", stop=[stop])
    pieces = list(generator.generate("to be", max_new_tokens=12))
    assert [p.token for p in pieces] == tokens[: end + 1]
    assert [p.finished for p in pieces] == [""] * end + ["stop"]
    assert "".join(p.text for p in pieces) == characters.decode(tokens[:end])


def test_figures(decoder: Decoder, characters: Characters) -> None:
    generator = Generator(decoder, characters, batch=2, length=64, chunk=8, backend="eager")
    generator.texts(PROMPTS[:3], max_new_tokens=7)
    stats = generator.stats
    # The first step of each graph compiles, and is not among them.
    assert stats.decoded_tokens >= 3 * 6 - 2 and stats.prompt_tokens >= sum(map(len, PROMPTS[:3])) - 8
    assert stats.decode_rate > 0 and stats.prompt_rate > 0
    assert all(a < b for a, b in pairwise(stats.first_token_seconds))
    weights = sum(p.numel() * 4 for p in decoder.parameters()) + decoder.frequencies.numel() * 4
    assert stats.weight_bytes == weights
    assert stats.cache_bytes == 2 * decoder.config.layers * 2 * 2 * (64 + 8) * 8 * 4


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ("a" * 60, {"max_new_tokens": 5}, r"prompt 0 has 60 tokens; with 5 new ones.*length=65"),
        ("", {}, "prompt 0 is empty"),
        ("A", {}, "the model knows no 'A'"),
        ([[3, 99]], {}, "holds the token 99; the model knows 0 to 27"),
        ([[-1]], {}, "holds the token -1"),
        ("a", {"temperature": -0.5}, "temperature is -0.5; it is 0, for the likeliest"),
        ("a", {"temperature": float("nan")}, "temperature is nan"),
        ("a", {"top_k": -1}, "top_k is -1"),
        ("a", {"top_p": 0.0}, "top_p is 0.0"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_wrong_requests_are_told_before_anything_runs(
    decoder: Decoder, characters: Characters, prompt: object, settings: dict[str, object], says: str
) -> None:
    generator = Generator(decoder, characters, length=64, backend="eager")
    with pytest.raises(GenerateError, match=says):
        generator.generate(prompt, **{"max_new_tokens": 4, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"batch": 0}, "batch is 0"), ({"cache": "ring"}, "cache is 'ring'"), ({"chunk": -1}, "chunk is -1")],
)
def test_wrong_settings(decoder: Decoder, characters: Characters, settings: dict[str, object], says: str) -> None:
    with pytest.raises(GenerateError, match=says):
        Generator(decoder, characters, **settings)  # type: ignore[arg-type]
