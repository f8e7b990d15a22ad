"""The choice of the next token: the likeliest, or one drawn among the likely, in the graph that makes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import GenerateError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the likeliest; ``top_k`` 0 and ``top_p`` 1 leave none out.

    Raises: GenerateError for numbers out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise GenerateError(f"temperature is {self.temperature}; it is 0, for the likeliest token, or more")
        if self.top_k < 0:
            raise GenerateError(f"top_k is {self.top_k}; it is 0, for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise GenerateError(f"top_p is {self.top_p}; it is above 0, and 1 for all tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def settings(self) -> list[Tensor]:
        """Temperature, top_k and top_p as data of a graph, which serves all of them."""
        return [torch.tensor(self.temperature), torch.tensor(self.top_k), torch.tensor(self.top_p)]

    def numbers(self, seed: int) -> torch.Generator:
        """The random numbers of one prompt, whatever runs beside it."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + seed)


def draw(logits: Tensor, settings: Sequence[Tensor], uniform: Tensor) -> Tensor:
    """Tokens, int64 [batch], of logits [batch, vocabulary] and uniform numbers [batch] in [0, 1).

    Settings are those of ``Sampling.settings``. Among the ``top_k`` likeliest tokens, the fewest are left that have
    ``top_p`` of the probability together. Source of the latter: Holtzman et al. 2020, "The Curious Case of Neural Text
    Degeneration".
    """
    temperature, top_k, top_p = settings
    ordered, tokens = torch.sort(logits, dim=-1, descending=True)
    places = torch.arange(logits.shape[-1], device=logits.device)
    kept = torch.where((top_k > 0) & (places >= top_k), -torch.inf, ordered / temperature)
    shares = torch.softmax(kept, -1)
    up_to = shares.cumsum(-1)
    shares = torch.where(up_to - shares < top_p, shares, 0.0)
    up_to = shares.cumsum(-1)
    place = (up_to <= uniform[:, None] * up_to[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
    return tokens.gather(-1, place[:, None])[:, 0]
