"""Texts from prompts: which prompt is entered when, which token comes next, and what it took.

Prompts are entered as others finish, a chunk at a time between two tokens of those at work, so that nobody waits for a
long one (continuous batching: Yu et al. 2022, "Orca"; pages: Kwon et al. 2023, "PagedAttention").
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .caches import PagedRows, Room, StaticRows
from .config import read_config
from .errors import GenerateError
from .exported import export_decoder
from .model import Decoder
from .quantized import quantized
from .sampling import Sampling
from .steps import Steps
from .tokens import TextStream, Tokenizer, load_tokenizer
from .weights import load_decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of the answer to prompt number ``prompt``. ``text`` is what it adds to the answer, "" where a character
    is not whole yet or the token ends the answer; ``finished`` is "stop" or "length" with the last."""

    prompt: int
    token: int
    text: str
    finished: str = ""


@dataclass(slots=True)
class GenerationStats:
    """What one call of ``generate`` took. Times are in seconds."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    compile_seconds: float = 0.0
    weight_bytes: int = 0
    cache_bytes: int = 0

    @property
    def prompt_rate(self) -> float:
        """Tokens of prompts a second, without compiling."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens of answers a second, all prompts together, without compiling and the first token of each."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(slots=True)
class _Request:
    number: int
    tokens: list[int]
    limit: int
    text: TextStream
    numbers: torch.Generator
    slot: int = -1
    entered: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def uniform(self) -> float:
        return float(torch.rand((), generator=self.numbers))


class Generator:
    """A language model with its tokenizer and a cache for ``batch`` prompts of up to ``length`` tokens with their
    answers.

    ``cache`` is "static" (a row of ``length`` for each prompt at work) or "paged" (pages of ``page`` tokens that
    prompts share, ``pages`` of them). Prompts are entered ``chunk`` tokens at a time. ``backend`` is that of
    ``torch.compile``, or "eager". Two graphs are compiled, for chunks of prompts and for tokens of answers, whatever
    the lengths. ``stop`` are tokens that end an answer; by default those of the model.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, *, batch: int = 1, length: int = 0, cache: str = "static",
        chunk: int = 64, page: int = 16, pages: int | None = None, backend: str = "mlc",
        stop: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        config = model.config
        length = length or min(config.context, 4096)
        for name, value in (("batch", batch), ("length", length), ("chunk", chunk), ("page", page)):
            if value < 1:
                raise GenerateError(f"{name} is {value}; it is 1 or more")
        if cache not in ("static", "paged"):
            raise GenerateError(f"cache is {cache!r}; it is 'static' or 'paged'")
        self.model, self.tokenizer, self.length = model, tokenizer, length
        self.stop = frozenset(config.stop if stop is None else stop)
        room = Room(batch, length, min(chunk, length))
        dtype = model.embed_tokens.weight.dtype
        self._cache = (
            StaticRows(config, room, dtype)
            if cache == "static"
            else PagedRows(config, room, dtype, page=page, pages=pages)
        )
        self._steps = Steps(model, self._cache, backend)
        self._warm: set[tuple[bool, bool]] = set()
        self.stats = GenerationStats()

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, dtype: str = "auto", quantize: str | None = None, **settings: object
    ) -> Generator:
        """The model of a folder of Hugging Face's form: ``config.json``, ``*.safetensors``, ``tokenizer.json``.

        ``dtype`` is "float32", "bfloat16", "float16", or "auto" for that of the folder; ``quantize`` "int4" or "int8"
        for products of such weights. ``settings`` are those of the class. Raises: GenerateError.
        """
        folder = Path(folder)
        config = read_config(folder)
        name = config.dtype if dtype == "auto" else dtype
        if name not in DTYPES:
            raise GenerateError(f"dtype is {name!r}; there are {', '.join(DTYPES)}")
        tokenizer = load_tokenizer(folder)
        model = quantized(load_decoder(folder, config, DTYPES[name]), quantize)
        return cls(model, tokenizer, **settings)  # type: ignore[arg-type]

    def generate(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], max_new_tokens: int = 128,
        temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
    ) -> Iterator[Piece]:  # fmt: skip
        """The answers to prompts (texts, or lists of tokens), token by token, as they come.

        What a prompt is answered does not depend on the others. Raises: GenerateError, before anything is computed, for
        a prompt that is empty, too long for the cache, or holds a token that the model does not know.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        given: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        if max_new_tokens < 1:
            raise GenerateError(f"max_new_tokens is {max_new_tokens}; it is 1 or more")
        requests = [self._request(k, p, max_new_tokens, sampling) for k, p in enumerate(given)]
        weights = {id(t): t.numel() * t.element_size() for t in (*self.model.parameters(), *self.model.buffers())}
        self.stats = GenerationStats(
            weight_bytes=sum(weights.values()),
            cache_bytes=sum(t.numel() * t.element_size() for t in self._cache.tensors),
            first_token_seconds=[0.0] * len(requests),
        )
        return self._answers(deque(requests), sampling)

    def texts(self, prompts: Sequence[str], **settings: object) -> list[str]:
        """The whole answers, in the order of the prompts; ``settings`` are those of ``generate``."""
        answers = [""] * len(prompts)
        for piece in self.generate(prompts, **settings):  # type: ignore[arg-type]
            answers[piece.prompt] += piece.text
        return answers

    def export(self, folder: str | Path, *, targets: Sequence[str] = ("host",)) -> Path:
        """Write the model as a library that answers prompts without torch (docs/generate.md); returns the folder.

        It has a static cache of this ``length`` for one prompt, and takes the likeliest tokens. ``targets`` are
        processors as for ``torch_mlc.export``. Raises: GenerateError, ExportError.
        """
        return export_decoder(self.model, self.tokenizer, self._cache.room, self.stop, folder, targets)

    def _request(self, number: int, prompt: str | Sequence[int], limit: int, sampling: Sampling) -> _Request:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        known = self.model.config.vocabulary
        odd = next((t for t in tokens if not 0 <= t < known), None)
        if odd is not None:
            raise GenerateError(
                f"prompt {number} holds the token {odd}; the model knows 0 to {known - 1}. Does the tokenizer belong "
                "to the model?"
            )
        if not tokens:
            raise GenerateError(f"prompt {number} is empty: give at least one token to go on from")
        if len(tokens) + limit > self.length:
            raise GenerateError(
                f"prompt {number} has {len(tokens)} tokens; with {limit} new ones that is more than the {self.length} "
                f"of the cache. Make the cache longer (length={len(tokens) + limit}), max_new_tokens smaller, or the "
                "prompt shorter"
            )
        return _Request(number, tokens, limit, TextStream(self.tokenizer), sampling.numbers(number))

    # --- admission ----------------------------------------------------------------------------------------------------

    def _answers(self, waiting: deque[_Request], sampling: Sampling) -> Iterator[Piece]:
        begun = time.perf_counter()
        at_work: list[_Request] = []
        entering: deque[_Request] = deque()
        try:
            while waiting or entering or at_work:
                while waiting:
                    slot = self._cache.take(len(waiting[0].tokens) + waiting[0].limit)
                    if slot is None:
                        break
                    waiting[0].slot = slot
                    entering.append(waiting.popleft())
                if entering and (token := self._enter(entering[0], sampling)) is not None:
                    request = entering.popleft()
                    at_work.append(request)
                    compiling = self.stats.compile_seconds
                    self.stats.first_token_seconds[request.number] = time.perf_counter() - begun - compiling
                    yield self._piece(request, token, at_work)
                if at_work:
                    for request, token in self._decode(at_work, sampling):
                        yield self._piece(request, token, at_work)
        finally:
            for request in (*at_work, *entering):
                self._cache.give_back(request.slot)

    def _enter(self, request: _Request, sampling: Sampling) -> int | None:
        """Enter the next chunk of a prompt; the first token of the answer with the last."""
        part = request.tokens[request.entered : request.entered + self._cache.room.chunk]
        is_last = request.entered + len(part) == len(request.tokens)
        uniform = request.uniform if is_last and not sampling.greedy else 0.0
        started = time.perf_counter()
        token = self._steps.prompt(request.slot, part, request.entered, sampling, uniform)
        seconds = self._compiled((sampling.greedy, True), time.perf_counter() - started)
        if seconds:
            self.stats.prompt_tokens += len(part)
            self.stats.prompt_seconds += seconds
        request.entered += len(part)
        return token if is_last else None

    def _decode(self, at_work: Sequence[_Request], sampling: Sampling) -> list[tuple[_Request, int]]:
        """The next token of every prompt at work."""
        slots = self._cache.room.slots
        # Slots that nobody is at work in write behind all positions, where nobody reads.
        tokens, positions, uniform = [0] * slots, [self.length] * slots, [0.0] * slots
        for r in at_work:
            tokens[r.slot] = r.answer[-1]
            positions[r.slot] = len(r.tokens) + len(r.answer) - 1
            uniform[r.slot] = 0.0 if sampling.greedy else r.uniform
        started = time.perf_counter()
        found = self._steps.decode(tokens, positions, sampling, uniform)
        seconds = self._compiled((sampling.greedy, False), time.perf_counter() - started)
        if seconds:
            self.stats.decoded_tokens += len(at_work)
            self.stats.decode_seconds += seconds
        return [(r, found[r.slot]) for r in list(at_work)]

    def _compiled(self, graph: tuple[bool, bool], seconds: float) -> float:
        """The seconds of a step; 0 for the first of a graph, which are those of its compilation."""
        if graph in self._warm:
            return seconds
        self._warm.add(graph)
        self.stats.compile_seconds += seconds
        return 0.0

    def _piece(self, request: _Request, token: int, at_work: list[_Request]) -> Piece:
        request.answer.append(token)
        stopped = token in self.stop
        finished = "stop" if stopped else "length" if len(request.answer) == request.limit else ""
        text = "" if stopped else request.text.add(token)
        if finished:
            text += request.text.end()
            at_work.remove(request)
            self._cache.give_back(request.slot)
        return Piece(request.number, token, text, finished)
