"""Keys and values of the tokens so far: a row of a fixed length for each prompt at work, or pages that prompts share.

A step writes the keys of its tokens and attends to what lies at their positions and before. Both are plain PyTorch over
tensors that live as long as the cache; what lies behind a position is never looked at. The last row of pages, or of
positions, takes what padded tokens of a chunk write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import DecoderConfig
from .errors import GenerateError
from .model import Attend


@dataclass(frozen=True, slots=True)
class Room:
    """What a cache is for: prompts at work at once, positions of each, tokens of a chunk of a prompt."""

    slots: int
    length: int
    chunk: int


class StaticRows:
    """[slots, kv_heads, length, width] for keys and for values of each layer."""

    kind = "static"

    def __init__(self, config: DecoderConfig, room: Room, dtype: torch.dtype, device: str = "cpu") -> None:
        self.config, self.room = config, room
        shape = (room.slots, config.kv_heads, room.length + room.chunk, config.head_width)
        self.tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * config.layers)]
        self._free = list(range(room.slots))

    def take(self, tokens: int) -> int | None:
        """A slot for a prompt and its answer of so many tokens together; None where all are taken."""
        return self._free.pop(0) if self._free else None

    def give_back(self, slot: int) -> None:
        self._free = sorted((*self._free, slot))

    def of_slot(self, slot: int) -> list[Tensor]:
        """What the graph of prompts reads and writes for one slot."""
        return [t[slot : slot + 1] for t in self.tensors]

    def of_all(self) -> list[Tensor]:
        """What the graph of decoding reads and writes."""
        return self.tensors

    def attend(self, tensors: Sequence[Tensor], positions: Tensor) -> Attend:
        """Attention of tokens at ``positions`` [batch, length] by the tensors of a graph."""
        window = self.config.window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = tensors[2 * layer], tensors[2 * layer + 1]
            rows = torch.arange(q.shape[0], device=q.device)[:, None]
            keys[rows, :, positions] = k.transpose(1, 2)
            values[rows, :, positions] = v.transpose(1, 2)
            return attention(q, keys, values, positions, window)

        return attend


class PagedRows:
    """[pages, page, kv_heads, width] for keys and for values of each layer; a table of the pages of each slot.

    Page 0 belongs to nobody: what idle slots and padded tokens write goes there.
    """

    kind = "paged"

    def __init__(
        self, config: DecoderConfig, room: Room, dtype: torch.dtype, device: str = "cpu", page: int = 16,
        pages: int | None = None,
    ) -> None:  # fmt: skip
        self.config, self.room, self.page = config, room, page
        self.columns = -(-(room.length + room.chunk) // page)
        count = 1 + (room.slots * -(-room.length // page) if pages is None else pages)
        shape = (count, page, config.kv_heads, config.head_width)
        self.tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * config.layers)]
        self.table = torch.zeros((room.slots, self.columns), dtype=torch.int64, device=device)
        self._free = list(range(1, count))
        self._slots = list(range(room.slots))

    def take(self, tokens: int) -> int | None:
        """A slot with pages for a prompt and its answer of so many tokens together; None where there is not enough.

        Raises: GenerateError where there never will be.
        """
        wanted = -(-tokens // self.page)
        if wanted > self.tensors[0].shape[0] - 1:
            raise GenerateError(
                f"a prompt and its answer of {tokens} tokens take {wanted} pages of {self.page}; the cache has "
                f"{self.tensors[0].shape[0] - 1}. Make it larger, or max_new_tokens smaller"
            )
        if not self._slots or wanted > len(self._free):
            return None
        slot = self._slots.pop(0)
        own, self._free = self._free[:wanted], self._free[wanted:]
        self.table[slot] = 0
        self.table[slot, :wanted] = torch.tensor(own)
        return slot

    def give_back(self, slot: int) -> None:
        self._free = sorted((*self._free, *(p for p in self.table[slot].tolist() if p)))
        self.table[slot] = 0
        self._slots = sorted((*self._slots, slot))

    def of_slot(self, slot: int) -> list[Tensor]:
        """What the graph of prompts reads and writes for one slot."""
        return [self.table[slot : slot + 1], *self.tensors]

    def of_all(self) -> list[Tensor]:
        """What the graph of decoding reads and writes."""
        return [self.table, *self.tensors]

    def attend(self, tensors: Sequence[Tensor], positions: Tensor) -> Attend:
        """Attention of tokens at ``positions`` [batch, length] by the tensors of a graph."""
        window, page = self.config.window, self.page
        table = tensors[0]
        place = table.gather(1, positions // page), positions % page

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pools = tensors[2 * layer + 1], tensors[2 * layer + 2]
            whole = []
            for pool, new in zip(pools, (k, v), strict=True):
                pool[place] = new.transpose(1, 2)
                whole.append(pool[table].flatten(1, 2).transpose(1, 2))
            return attention(q, whole[0], whole[1], positions, window)

        return attend


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Queries [batch, heads, length, width] at ``positions`` [batch, length] with keys and values [batch, kv_heads,
    all, width] of positions 0, 1, …: each sees its own position and those before, or as many of them as ``window``."""
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    here = torch.arange(k.shape[2], device=q.device)
    seen = here <= positions[:, :, None]
    if window is not None:
        seen = seen & (here > positions[:, :, None] - window)
    grouped = q.reshape(batch, groups, heads // groups, length, width)
    scores = (grouped @ k[:, :, None].mT).float() * width**-0.5
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1).to(v.dtype)
    return (weights @ v[:, :, None]).reshape(batch, heads, length, width)
