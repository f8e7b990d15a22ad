"""The weights of a model, each memory once, whatever the functions call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen.export.library import Weight
from ...ir.expr.dtypes import DType
from .errors import ExportError
from .program import ModelProgram

# A tensor's memory, and how it looks at that.
_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class WeightTable:
    """``names`` gives each weight, by the function and what that calls it, the name that it has in the model."""

    names: dict[tuple[str, str], str] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    _places: dict[_Place, str] = field(default_factory=dict)

    def enter(self, program: ModelProgram) -> None:
        """Take in the weights of a function that are not known yet."""
        for name in program.weights.values():
            if (program.name, name) not in self.names:
                self.names[program.name, name] = self._name_of(program.name, name, program.tensors[name])
        self.written |= {self.names[program.name, name] for name in program.written}

    def _name_of(self, function: str, name: str, tensor: Tensor) -> str:
        place = (
            tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        )  # fmt: skip
        if tensor.numel() and place in self._places:
            return self._places[place]
        other = self.tensors.get(name)
        if other is not None and _is_same(other, tensor):  # of the same model, read from another file
            return name
        known = name if other is None else f"{function}.{name}"
        while known in self.tensors:
            known += "_"
        self.tensors[known], self._places[place] = tensor, known
        return known

    def frozen(self, program: ModelProgram) -> dict[str, str]:
        """The inputs of a function's graph that are weights which no function writes to, and what it calls them."""
        return {g: n for g, n in program.weights.items() if self.names[program.name, n] not in self.written}

    def used(self, programs: Sequence[ModelProgram]) -> tuple[Weight, ...]:
        """Those that the graphs still read, in order. Raises ExportError for state that shares memory."""
        names = dict.fromkeys(self.names[p.name, name] for p in programs for name in p.weights.values())
        self._check_memory(names)
        found = []
        for name in names:
            tensor = self.tensors[name]
            if not _is_dense(tensor):
                raise ExportError(
                    f"the weight {name} has the strides {tensor.stride()} for the shape {tuple(tensor.shape)}, which "
                    "leave gaps or overlap: call .contiguous() on it before torch.export"
                )
            found.append(
                Weight(name, DType.from_torch(tensor.dtype), tuple(tensor.shape), tensor.stride(), name in self.written)
            )
        return tuple(found)

    def arrays(self, weights: Sequence[Weight]) -> Mapping[str, np.ndarray[Any, Any]]:
        """The elements, of the shapes and strides of the weights."""
        return {w.name: _array(self.tensors[w.name], w) for w in weights}

    def _check_memory(self, names: Mapping[str, None]) -> None:
        storages: dict[int, list[str]] = {}
        for name in names:
            storages.setdefault(self.tensors[name].untyped_storage()._cdata, []).append(name)
        for several in storages.values():
            if len(several) > 1 and not self.written.isdisjoint(several):
                state = next(n for n in several if n in self.written)
                raise ExportError(
                    f"{state}, which calls write to, shares memory with {', '.join(n for n in several if n != state)}, "
                    "and a library has memory of its own for each: let the model write to one tensor and view it"
                )


def _is_dense(tensor: Tensor) -> bool:
    """Whether strides leave no gap in memory, and no two elements share a place."""
    inside = 1
    for stride, extent in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != inside:
            return False
        inside *= extent
    return True


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.shape == b.shape
        and _memory(a).tobytes() == _memory(b).tobytes()
    )


def _array(tensor: Tensor, weight: Weight) -> np.ndarray[Any, Any]:
    flat = _memory(tensor).view(weight.dtype.numpy)
    strides = [s * weight.dtype.itemsize for s in weight.strides]
    return np.lib.stride_tricks.as_strided(flat, weight.shape, strides)


def _memory(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor that leaves no gaps, in the order of memory: the tensor's own, where it is on the host."""
    plain = tensor.resolve_neg().detach().cpu()
    flat = plain.as_strided((plain.numel(),), (1,)) if _is_dense(plain) else plain.reshape(-1)
    return flat.view(torch.uint8).numpy()
