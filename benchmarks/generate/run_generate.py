"""Suite ``generate``: a language model's steps, a chunk of a prompt and one token of each answer, with the same weights
under every peer. What a step has to read, over its time, stands beside the rate at which this machine reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_mlc.dynamo_backend.generate.caches import PagedRows, Room, StaticRows
from torch_mlc.dynamo_backend.generate.config import DecoderConfig
from torch_mlc.dynamo_backend.generate.model import Decoder
from torch_mlc.dynamo_backend.generate.sampling import Sampling
from torch_mlc.dynamo_backend.generate.steps import Cache, Steps

from ..models.spec import Size
from ..peers import Peer, added
from ..schema import CaseResult, PeerResult
from ..stats import spread
from ..timing import TimingSettings, measure

# Of float32, 0.6 GB and 4.4 GB of weights: beyond every cache. That of tests is not.
SHAPES: dict[Size, DecoderConfig] = {
    "tiny": DecoderConfig(vocabulary=96, width=64, layers=1, heads=4, kv_heads=2, head_width=16, hidden=128),
    "small": DecoderConfig(vocabulary=32000, width=1024, layers=8, heads=16, kv_heads=4, head_width=64, hidden=2816),
    "full": DecoderConfig(vocabulary=32000, width=2048, layers=22, heads=32, kv_heads=4, head_width=64, hidden=5632),
}
LENGTH, CHUNK = 2048, 64


@dataclass(frozen=True, slots=True)
class GenerateCase:
    """A step of so many answers whose last tokens are at ``position``; of a chunk of a prompt with ``chunk``."""

    name: str
    batch: int = 1
    position: int = 0
    cache: str = "static"
    chunk: bool = False

    @property
    def variant(self) -> str:
        return f"{CHUNK} tokens" if self.chunk else f"{self.batch} at {self.position} of {LENGTH}, {self.cache}"


CASES = {
    c.name: c
    for c in (
        GenerateCase("prompt", chunk=True),
        GenerateCase("decode_short", position=100),
        GenerateCase("decode_long", position=LENGTH - 8),
        GenerateCase("decode_paged", position=100, cache="paged"),
        GenerateCase("decode_batch", batch=8, position=100),
    )
}


def read_rate(device: str, clock: str) -> float:
    """Bytes that this machine reads in a second of the clock: the sum of a tensor larger than any cache, the median of
    seven."""
    big = torch.ones(1 << 27, dtype=torch.float32, device=device)
    samples = measure({"read": lambda: big.sum()}, TimingSettings(device, rounds=7, clock=clock))
    return big.nbytes / spread(samples["read"].seconds).median


def build(size: Size, dtype: torch.dtype, device: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(SHAPES[size]).to(device, dtype).eval().requires_grad_(False)


def nbytes_of(model: Decoder, case: GenerateCase) -> int:
    """What a step has to read: weights but for the table of tokens, and what is alive of the cache."""
    config = model.config
    weights = sum(p.nbytes for p in model.parameters()) - model.embed_tokens.weight.nbytes
    alive = CHUNK if case.chunk else case.batch * (case.position + 1)
    kind = model.embed_tokens.weight.element_size()
    return weights + 2 * config.layers * alive * config.kv_heads * config.head_width * kind


def run_generate(
    case: GenerateCase, size: Size, peers: Sequence[Peer], dtype: torch.dtype, timing: TimingSettings, rate: float
) -> CaseResult:
    """One kind of step under every peer. A peer that fails, or whose tokens are not eager's, has its error in its
    result and is not timed."""
    model = build(size, dtype, timing.device)
    nbytes = nbytes_of(model, case)
    result = CaseResult(
        case.name, case.variant, "inference", str(dtype).removeprefix("torch."), nbytes, None, nbytes / rate
    )
    room = Room(case.batch, LENGTH, CHUNK)
    # Peers have the cache in turn: what a step writes is the same each time.
    kind = StaticRows if case.cache == "static" else PagedRows
    cache: Cache = kind(model.config, room, dtype, timing.device)
    slots = [cache.take(LENGTH) for _ in range(case.batch)]
    assert None not in slots
    torch.manual_seed(1)
    for t in cache.tensors:
        t.normal_()
    calls: dict[str, Callable[[], object]] = {}
    expected: object = None
    for peer in peers:
        outcome = result.peers[peer.name] = PeerResult()
        call = _call(Steps(model, cache, peer.backend), case, model.config.vocabulary)
        before, start = peer.counts(), time.perf_counter()
        try:
            tokens = call()
        except Exception as error:
            # Any failure of a backend is a result of the benchmark, and the other peers still have theirs.
            outcome.error = f"{type(error).__name__}: {error}"
            continue
        outcome.first_call_s = time.perf_counter() - start
        outcome.counts["forward"] = added(before, peer.counts())
        expected = tokens if expected is None else expected
        if tokens != expected and dtype is torch.float32:
            outcome.error = f"the tokens {tokens} are not those of {peers[0].name}: {expected}"
            continue
        calls[peer.name] = call
    for name, samples in measure(calls, timing).items():
        result.peers[name].samples = samples.seconds
        result.peers[name].calls_per_sample = samples.calls
    torch._dynamo.reset()
    return result


def _call(steps: Steps, case: GenerateCase, vocabulary: int) -> Callable[[], object]:
    greedy = Sampling()
    if case.chunk:
        tokens = [k % vocabulary for k in range(7, 7 + CHUNK)]
        return lambda: steps.prompt(0, tokens, 0, greedy, 0.0)
    last = [(11 * k + 5) % vocabulary for k in range(case.batch)]
    return lambda: steps.decode(last, [case.position] * case.batch, greedy, [0.0] * case.batch)
