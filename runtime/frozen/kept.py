"""Programs that are given values which were computed at an earlier call.

Values belong to the tensors that they were made of. A model that is called with other parameters (another module of the
same class, a parameter that was replaced) has values of its own. Parameters that were written since are an error: the
caller promised that they would not be.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import MlcError
from .recipe import Recipe

_Key = tuple[int, ...]


class FrozenError(MlcError, RuntimeError):
    """A parameter or buffer that ``options={"freeze": True}`` took for unchanging was changed; the text names it."""


@dataclass(frozen=True, slots=True, eq=False)
class _KeptValues:
    """Values, and the sources that they were made of as they were then: their versions, which every write counts, and
    addresses."""

    values: list[Tensor]
    versions: list[int]
    places: list[int]
    owners: list[weakref.ref[Tensor]]


class FrozenProgram:
    """A boxed program that is called with its inputs alone, and gets the values of a recipe behind them.

    Threads share the values; whoever comes first computes them.
    """

    def __init__(self, program: Callable[[list[Any]], Any], recipe: Recipe, name: str) -> None:
        self.program, self.recipe, self.name = program, recipe, name
        self._boxed_call = True
        self._kept: dict[_Key, _KeptValues] = {}
        self._lock = threading.Lock()
        _ALL.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        sources = [inputs[k] for k in self.recipe.sources]
        kept = self._kept.get(tuple(map(id, sources)))
        if kept is None:
            kept = self._made(sources)
        elif _versions(sources) != kept.versions or [t.data_ptr() for t in sources] != kept.places:
            raise self._changed(sources, kept)
        inputs.extend(kept.values)
        return self.program(inputs)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, of all sets of sources."""
        return sum(_held(v) for kept in list(self._kept.values()) for v in kept.values)

    def _made(self, sources: Sequence[Tensor]) -> _KeptValues:
        key = tuple(map(id, sources))
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                return known
            # As they are before they are read: a write in the meantime is told of at the next call.
            versions, places = _versions(sources), [t.data_ptr() for t in sources]
            values = self.recipe.values(sources)
            if any(v.is_cuda for v in values):
                torch.cuda.synchronize()  # other streams may read them next
            program, owners = weakref.ref(self), []

            def forget(_: object) -> None:
                # The number of an object that is gone may be that of another one.
                if (of := program()) is not None:
                    of._kept.pop(key, None)

            owners = [weakref.ref(t, forget) for t in sources]
            made = self._kept[key] = _KeptValues(values, versions, places, owners)
            return made

    def _changed(self, sources: Sequence[Tensor], kept: _KeptValues) -> FrozenError:
        now = zip(_versions(sources), (t.data_ptr() for t in sources), kept.versions, kept.places, strict=True)
        names = [n for n, (v, p, was, at) in zip(self.recipe.names, now, strict=True) if (v, p) != (was, at)]
        return FrozenError(
            f"{self.name}: {', '.join(names)} changed after values were computed of it, which "
            'options={"freeze": True} (MLC_FREEZE=1) promises not to happen. To mend: call torch._dynamo.reset() after '
            "parameters or buffers were changed, so that the model is compiled again, or compile it without freeze."
        )


def _versions(sources: Sequence[Tensor]) -> list[int]:
    """How often each was written. Tensors that were made in inference mode do not count that."""
    try:
        return [t._version for t in sources]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in sources]


def _held(value: Tensor) -> int:
    """Bytes of a value's memory. oneDNN tells those of its layouts, which may be padded."""
    if value.layout is torch.strided:
        return value.untyped_storage().nbytes()
    return int(torch.ops.mkldnn._nbytes(value))


_ALL: weakref.WeakSet[FrozenProgram] = weakref.WeakSet()


def frozen_bytes() -> int:
    """Bytes of values that programs of this process keep beside parameters, on all devices."""
    return sum(program.nbytes for program in list(_ALL))


__all__ = ["FrozenError", "FrozenProgram", "frozen_bytes"]
