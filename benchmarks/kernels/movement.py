"""Patterns whose cost is in how data moves: transposes, permutes, concatenation, gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import HEADS, ROWS, KernelCase, Shape, normal, same

SQUARE: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (2048, 2048), "odd": (2047, 1999)},
    "cuda": {"aligned": (8192, 8192), "odd": (8191, 8009)},
}
# tokens, width, rows of the table
GATHER: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (4096, 1024, 8192), "odd": (4095, 1021, 8191)},
    "cuda": {"aligned": (32768, 4096, 50304), "odd": (32767, 4097, 50257)},
}


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


def permute_copy(x: Tensor) -> Tensor:
    """``[batch, seq, heads, d]`` to contiguous ``[batch, heads, seq, d]``."""
    return x.permute(0, 2, 1, 3).contiguous()


def cat_relu(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(torch.cat((x, y), dim=1))


def embedding_add(ids: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(ids, table) + positions


def flipped(shape: Shape) -> Shape:
    return shape[::-1]


def make_gather(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, width, rows = shape
    ids = torch.randint(rows, (tokens,), generator=generator)
    return ids, torch.randn((rows, width), generator=generator), torch.randn((tokens, width), generator=generator)


def gather_bytes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Of the table only the rows that are named, each once."""
    ids, table, positions = inputs
    rows = int(ids.unique().numel()) * table[0].nbytes
    return rows + ids.nbytes + positions.nbytes + sum(t.nbytes for t in outputs)


CASES = (
    KernelCase("transpose_add", transpose_add, normal(same, flipped), SQUARE),
    KernelCase("permute_copy", permute_copy, normal(same), HEADS),
    KernelCase("cat_relu", cat_relu, normal(same, same), ROWS),
    KernelCase("embedding_add", embedding_add, make_gather, GATHER, touched=gather_bytes),
)
