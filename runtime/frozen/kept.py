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
from ..log import logger
from .discard import can_discard, counted, discard, is_discarded, version_of
from .recipe import Recipe

_LOG = logger(__name__)

_Key = tuple[int, ...]


class FrozenError(MlcError, RuntimeError):
    """A parameter or buffer that ``options={"freeze": True}`` took for unchanging was changed, or is needed after its
    memory was given back; the text names it."""


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

    Threads share the values; whoever comes first computes them, and gives back, where the recipe says so, the memory of
    sources that nobody reads after that.
    """

    def __init__(self, program: Callable[[list[Any]], Any], recipe: Recipe, name: str) -> None:
        self.program, self.recipe, self.name = program, recipe, name
        self._boxed_call = True
        self._kept: dict[_Key, _KeptValues] = {}
        self._lock = threading.Lock()
        # The number of discarded tensors for which inputs were checked last.
        self._checked = 0
        _ALL.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        if self.recipe.plain and self._checked != counted.discards:
            self._check(inputs)
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
            self._refuse_discarded(sources, self.recipe.names)
            values = self.recipe.values(sources)
            if any(v.is_cuda for v in values):
                torch.cuda.synchronize()  # other streams may read them next
            program, owners = weakref.ref(self), []

            def forget(_: object) -> None:
                # The number of an object that is gone may be that of another one.
                if (of := program()) is not None:
                    of._kept.pop(key, None)

            owners = [weakref.ref(t, forget) for t in sources]
            self._give_back(sources, places)
            made = self._kept[key] = _KeptValues(values, versions, places, owners)
            return made

    def _give_back(self, sources: Sequence[Tensor], places: list[int]) -> None:
        """Give back the memory of sources that are spent, and note where they are now."""
        given = 0
        for k in self.recipe.spent:
            if can_discard(sources[k]) and not is_discarded(sources[k]):
                given += discard(sources[k])
                places[k] = sources[k].data_ptr()
        if given:
            _LOG.info("%s: %.1f MiB of plain weights given back", self.name, given / (1 << 20))

    def _check(self, inputs: Sequence[Any]) -> None:
        """Once after others have given memory back: whether it was that of a tensor that this program reads."""
        seen = counted.discards
        self._refuse_discarded([inputs[k] for k, _ in self.recipe.plain], [name for _, name in self.recipe.plain])
        self._checked = seen

    def _refuse_discarded(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        gone = [name for t, name in zip(tensors, names, strict=True) if is_discarded(t)]
        if gone:
            raise FrozenError(
                f"{self.name} reads {', '.join(gone)}, whose memory another graph of the model has given back, as "
                'options={"freeze_discard": True} (MLC_FREEZE_DISCARD=1) says. A model has one graph where it is '
                "called with the same sizes each time and has no graph break. To mend: load the weights again "
                "(load_state_dict) and compile without freeze_discard."
            )

    def _changed(self, sources: Sequence[Tensor], kept: _KeptValues) -> FrozenError:
        now = zip(_versions(sources), (t.data_ptr() for t in sources), kept.versions, kept.places, strict=True)
        names = [n for n, (v, p, was, at) in zip(self.recipe.names, now, strict=True) if (v, p) != (was, at)]
        return FrozenError(
            f"{self.name}: {', '.join(names)} changed after values were computed of it, which "
            'options={"freeze": True} (MLC_FREEZE=1) promises not to happen. To mend: call torch._dynamo.reset() after '
            "parameters or buffers were changed, so that the model is compiled again, or compile it without freeze."
        )


def _versions(sources: Sequence[Tensor]) -> list[int]:
    """How often each was written."""
    try:
        return [t._version for t in sources]
    except RuntimeError:
        return [version_of(t) for t in sources]


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
