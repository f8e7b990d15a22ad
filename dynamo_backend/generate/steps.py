"""The two graphs of generation: a chunk of one prompt, and one token of every prompt at work.

Shapes are fixed by the cache: the graphs serve all lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from .caches import PagedRows, StaticRows
from .model import Decoder
from .sampling import Sampling, draw

Cache: TypeAlias = StaticRows | PagedRows
# Of a cache's tensors, tokens and positions [batch, length], the place of the last token [batch], random numbers
# [batch], and what ``Sampling.settings`` are: the next tokens, int64 [batch].
Step: TypeAlias = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]


@dataclass(slots=True)
class Steps:
    """The steps of a model with a cache, compiled by ``backend`` ("eager" compiles nothing)."""

    model: Decoder
    cache: Cache
    backend: str
    _made: dict[tuple[bool, bool], Step] = field(default_factory=dict)

    def prompt(self, slot: int, tokens: Sequence[int], first: int, sampling: Sampling, uniform: float) -> int:
        """Enter tokens of a prompt, which begin at the position ``first``, into a slot: the token after them."""
        room = self.cache.room
        padded = [*tokens, *([0] * (room.chunk - len(tokens)))]
        positions = torch.arange(first, first + room.chunk)[None]
        last, drawn = torch.tensor([len(tokens) - 1]), torch.tensor([uniform])
        step = self._step(sampling, one=True)
        with torch.inference_mode():
            given = self.cache.of_slot(slot), torch.tensor([padded]), positions
            return int(step(*given, last, drawn, sampling.settings())[0])

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sampling: Sampling, uniform: Sequence[float]
    ) -> list[int]:
        """The token after each of ``tokens``, which are at ``positions`` of all slots."""
        one = torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None]
        last = torch.zeros(len(tokens), dtype=torch.int64)
        step = self._step(sampling, one=False)
        with torch.inference_mode():
            return step(self.cache.of_all(), *one, last, torch.tensor(uniform), sampling.settings()).tolist()

    def _step(self, sampling: Sampling, one: bool) -> Step:
        key = (sampling.greedy, one)
        if key not in self._made:
            step = _written(self.model, self.cache, sampling.greedy)
            if self.backend != "eager":
                step = torch.compile(step, backend=self.backend, dynamic=False, fullgraph=True)
            self._made[key] = step
        return self._made[key]


def _written(model: Decoder, cache: Cache, greedy: bool) -> Step:
    def step(
        tensors: Sequence[Tensor], tokens: Tensor, positions: Tensor, last: Tensor, uniform: Tensor,
        settings: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        states = model(tokens, positions, cache.attend(tensors, positions))
        rows = torch.arange(states.shape[0], device=states.device)
        logits = model.logits(states[rows, last] if states.shape[1] > 1 else states[:, 0])
        return logits.argmax(-1) if greedy else draw(logits, settings, uniform)

    return step
