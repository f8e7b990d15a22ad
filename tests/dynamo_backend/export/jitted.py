"""An assembled model in this process: its IR as it stands, called with plain addresses, guards asked in Python."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_mlc.codegen.export.library import ExportedFunction
from torch_mlc.dynamo_backend.export.assemble import Assembled
from torch_mlc.runtime.cpu import LoadedObject, compile_object, load_object

_GUARD = 64  # bytes behind the arena and each result that nobody may touch


@dataclass
class Jitted:
    """Functions of a model, with one context's state."""

    assembled: Assembled
    code: LoadedObject = field(init=False)
    weights: list[Tensor] = field(init=False)
    status: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.int64))

    def __post_init__(self) -> None:
        model = self.assembled.model
        texts = [f.text.replace("define hidden", "define") for f in model.functions]
        data = compile_object([*texts, *(k.text for k in model.kernels)], model.target)
        self.code = load_object(data, [f.entry for f in model.functions])
        self.weights = [_memory(self.assembled.weights[w.name]) for w in model.weights]

    def function(self, name: str) -> ExportedFunction:
        return next(f for f in self.assembled.model.functions if f.name == name)

    def call(self, *tensors: Tensor, name: str = "forward", fails: bool = False) -> list[Tensor]:
        """The results; where the call ``fails``, ``status`` tells of it."""
        function = self.function(name)
        sizes = {s: tensors[i].shape[d] for s, (i, d) in function.symbols.items()}

        def value(expr: Any) -> int:
            return int(expr.xreplace(sizes))

        for guard in function.guards:
            assert guard.condition.xreplace(sizes) == True, guard.sentence  # noqa: E712
        for given, spec in zip(tensors, function.inputs, strict=True):
            assert tuple(given.shape) == tuple(map(value, spec.shape)), (spec, given.shape)
            strides = zip(given.stride(), map(value, spec.strides), given.shape, strict=True)
            assert all(a == b or n == 1 for a, b, n in strides) or not given.numel(), (spec, given.stride())
        for s, (low, high) in function.ranges.items():
            assert low <= sizes[s] and (high is None or sizes[s] <= high), (s, sizes[s])
        kinds = [(spec.dtype.torch, tuple(map(value, spec.shape))) for spec in function.results]
        blocks = [_guarded(torch.empty(shape, dtype=kind).nbytes) for kind, shape in kinds]
        arena = _guarded(value(function.arena))
        self.status.zero_()
        pointers = [_array([t.data_ptr() for t in ts]) for ts in (tensors, blocks, self.weights)]
        entry = ctypes.CFUNCTYPE(ctypes.c_int32, *(ctypes.c_void_p,) * 6)(self.code.addresses[function.entry])
        failed = entry(*pointers, _array(list(sizes.values())), arena.data_ptr(), self.status.data_ptr())
        assert bool(failed) is fails, self.status
        for block in (*blocks, arena):
            assert bool((block[-_GUARD:] == 7).all()), "something was written behind the end"
        made = zip(kinds, blocks, strict=True)
        return [b[:-_GUARD].view(kind).view(shape).clone() for (kind, shape), b in made]


def _guarded(nbytes: int) -> Tensor:
    block = torch.full((nbytes + _GUARD + 64,), 7, dtype=torch.uint8)
    skip = -block.data_ptr() % 64
    return block[skip : skip + nbytes + _GUARD]


def _memory(array: Any) -> Tensor:
    rows = np.lib.stride_tricks.as_strided(array, (array.size,), (array.itemsize,)).view(np.uint8)
    return _guarded(array.nbytes)[: array.nbytes].copy_(torch.from_numpy(rows))


def _array(values: list[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)
