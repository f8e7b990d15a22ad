"""What a run of a model gives, as one vector: differences of runs are differences of these, and add up exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# What names of gradients begin with.
GRADIENT = "gradient of "


@dataclass(frozen=True, slots=True)
class Results:
    """The tensors that one run gave, by name: results ("result", "result[0]", "result['loss']") and gradients."""

    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(result: Any, gradients: Mapping[str, Tensor | None] = {}) -> Results:
        """The tensors among a result, in memory of their own, and gradients."""
        found: dict[str, Tensor] = {}
        for path, leaf in pytree.tree_flatten_with_path(result)[0]:
            if isinstance(leaf, Tensor):
                found[f"result{pytree.keystr(path)}"] = leaf.detach().clone()
        found |= {f"{GRADIENT}{name}": g.detach().clone() for name, g in gradients.items() if g is not None}
        return Results(found)


@dataclass(frozen=True, slots=True)
class Distance:
    """How large a difference is: ``norm`` of the vector; the largest error of one element of a tensor (``name``),
    ``absolute``, as a share of the tensor's largest magnitude, and in units of the last place of that magnitude;
    ``elements`` that differ where there is no difference to take (integers, truth values, NaN and infinities)."""

    norm: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0
    ulp: float = 0.0
    name: str = ""
    elements: int = 0


class ResultSpace:
    """The vectors of runs of one model: every floating element that is finite in both ends, each tensor in units of
    its largest magnitude in the last of them. Anything else is counted.

    A tensor that is next to zero beside others, as the gradient of a bias in front of a norm, is nothing but rounding.
    So a unit is at least the root of the type's epsilon of the largest among results, or among gradients.
    """

    def __init__(self, first: Results, last: Results) -> None:
        # The type of the first is that of the model.
        self.first, self.last = first, last
        self.names = tuple(n for n in last.tensors if n in first.tensors)
        if len(self.names) != len(last.tensors) or len(last.tensors) != len(first.tensors):
            missing = set(first.tensors) ^ set(last.tensors)
            raise AssertionError(f"two runs of one model give other tensors: {sorted(missing)}")
        self._masks: dict[str, Tensor] = {}
        self._scales: dict[str, float] = {}
        for name in self.names:
            want, got = last.tensors[name], first.tensors[name]
            if _has_numbers(want):
                self._masks[name] = torch.isfinite(want) & torch.isfinite(got)
                seen = _wide(want)[self._masks[name]]
                self._scales[name] = seen.abs().max().item() if seen.numel() else 0.0
        for gradients in (False, True):
            of = [n for n in self._scales if n.startswith(GRADIENT) is gradients]
            largest = max((self._scales[n] for n in of), default=0.0)
            for name in of:
                least = math.sqrt(torch.finfo(first.tensors[name].dtype).eps) * largest
                self._scales[name] = max(self._scales[name], least) or 1.0

    def vector(self, results: Results) -> Tensor:
        """A run in this space, float64 on the CPU; what is not finite there has the last end's value."""
        parts = []
        for name, mask in self._masks.items():
            got, want = _wide(results.tensors[name]), _wide(self.last.tensors[name])
            there = torch.where(torch.isfinite(got), got, want)
            parts.append((there[mask] / self._scales[name]).flatten().cpu())
        flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        return torch.view_as_real(flat).flatten() if flat.is_complex() else flat

    def counted(self, results: Results, other: Results) -> int:
        """Elements in which two runs differ without a difference that the vectors have."""
        count = 0
        for name in self.names:
            a, b = results.tensors[name], other.tensors[name]
            same = (a == b) | ((a != a) & (b != b))
            if name in self._masks:
                same |= self._masks[name] & torch.isfinite(a) & torch.isfinite(b)
            count += int((~same).sum().item())
        return count

    def is_same(self, results: Results, other: Results) -> bool:
        """Whether two runs gave the same, NaN being NaN."""
        size = self.size(results, other)
        return size.norm == 0 and size.elements == 0

    def products(self, ends: Sequence[tuple[Results, Results]], whole: float) -> tuple[tuple[float, ...], ...]:
        """The products of some differences, each with each, as shares of the square of the ``whole`` norm."""
        if not whole:
            return ()
        parts = torch.stack([(self.vector(a) - self.vector(b)).to(torch.float32) / whole for a, b in ends])
        return tuple(tuple(row) for row in (parts @ parts.T).tolist())

    def size(self, results: Results, other: Results) -> Distance:
        """How far two runs are apart."""
        worst = Distance()
        for name, mask in self._masks.items():
            a, b = _wide(results.tensors[name]), _wide(other.tensors[name])
            gap = torch.where(mask & torch.isfinite(a) & torch.isfinite(b), (a - b).abs(), 0.0)
            largest = gap.max().item() if gap.numel() else 0.0
            scale = self._scales[name]
            if largest / scale > worst.relative:
                worst = Distance(
                    0.0, largest, largest / scale, largest / _unit(self.first.tensors[name].dtype, scale), name
                )
        norm = torch.linalg.vector_norm(self.vector(results) - self.vector(other)).item()
        return Distance(norm, worst.absolute, worst.relative, worst.ulp, worst.name, self.counted(results, other))


def share(part: Tensor, whole: Tensor) -> float:
    """How much of a difference a part of it is: its projection. The shares of parts that add up to it add up to 1."""
    square = torch.dot(whole, whole).item()
    return torch.dot(part, whole).item() / square if square else 0.0


def total_elements(tensors: Sequence[Tensor]) -> int:
    """Elements of all tensors."""
    return sum(t.numel() for t in tensors)


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _unit(dtype: torch.dtype, magnitude: float) -> float:
    """The distance of two neighbours of a type at a magnitude."""
    return float(torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(magnitude)))
