"""Pairs of points and of boxes, of which a reduction over two or four numbers is followed by one over rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .case import KernelCase, Shape

# Points of one set and of the other; of boxes also.
PAIRS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (2048, 2048), "odd": (2047, 1999)},
    "cuda": {"aligned": (16384, 16384), "odd": (16381, 16127)},
}


def nearest_points(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Squares of the distances to the nearest point of the other set (Chamfer), ``a [n, 3], b [m, 3]``."""
    distance = (a[:, None] - b).square().sum(-1)
    return distance.amin(1), distance.amin(0)


def box_overlap(a: Tensor, b: Tensor) -> Tensor:
    """The largest share that boxes ``[n, 4]`` have of one of ``[m, 4]``: intersection over union."""
    return _overlaps(a, b).amax(1)


def soft_suppression(boxes: Tensor, scores: Tensor) -> Tensor:
    """Scores of boxes, the best first, lowered by how much better ones cover each. Source: Wang et al. 2020, "SOLOv2",
    section on Matrix NMS."""
    scores, order = scores.sort(descending=True)
    shares = _overlaps(boxes[order], boxes[order]).triu(1)
    covered = shares.amax(0)
    return scores * torch.exp((covered[:, None].square() - shares.square()) * 2.0).amin(0)


def _overlaps(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.maximum(a[:, None, :2], b[:, :2]), torch.minimum(a[:, None, 2:], b[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(-1), (b[:, 2:] - b[:, :2]).prod(-1)
    return shared / (area_a[:, None] + area_b - shared)


def _points(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(torch.randn(n, 3, generator=generator) for n in shape)


def _boxes(count: int, generator: torch.Generator) -> Tensor:
    corner, size = (torch.rand(count, 2, generator=generator) for _ in range(2))
    return torch.cat((corner, corner + 0.05 + 0.2 * size), 1)


def _two_sets(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(_boxes(n, generator) for n in shape)


def _scored(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Scores that half types tell apart, each once where there are few."""
    scores = torch.randperm(shape[0], generator=generator) / shape[0]
    return _boxes(shape[0], generator), scores


CASES = (
    KernelCase("nearest_points", nearest_points, _points, PAIRS),
    KernelCase("box_overlap", box_overlap, _two_sets, PAIRS),
    KernelCase("soft_suppression", soft_suppression, _scored, PAIRS),
)
