"""How values are made that do not change between calls: a row of ATen ops over some of a program's inputs.

A recipe is data: names of ops, numbers, and which value each op reads. It holds no element of any parameter, so that it
may be kept on disk beside a program and used in a process that has other parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir.graph.effects import resolve_op

GETITEM = "operator::getitem"


@dataclass(frozen=True, slots=True)
class ValueRef:
    """An argument that is a value of the recipe: sources are numbered first, then the results of calls."""

    number: int


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an op, ``aten::mul.Tensor``."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResult:
    """A value that is kept: its shape and strides in elements, and its type, as they were traced. ``told`` says which
    op and line of the model it is of, ``calls`` how many ops of the model are not computed again for it."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    told: str
    calls: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        elements = 1
        for n in self.size:
            elements *= n
        return elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Recipe:
    """``sources`` are positions among a program's inputs, ``names`` what the model calls them.

    Where memory is to be given back, ``spent`` are the sources (by their number) that the program itself does not read,
    and ``plain`` the parameters and buffers (by their position among its inputs, with their names) that it does.
    """

    sources: tuple[int, ...]
    names: tuple[str, ...]
    calls: tuple[OpCall, ...]
    results: tuple[KeptResult, ...]
    spent: tuple[int, ...] = ()
    plain: tuple[tuple[int, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all values that are kept."""
        return sum(r.nbytes for r in self.results)

    def values(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The results, of the sources in their order. Neither is written to, and no result shares memory with one."""
        last = self._last_reads()
        values: dict[int, Any] = dict(enumerate(given))
        # Kept values are plain tensors, whatever mode the first call is in.
        with torch.inference_mode(False), torch.no_grad():
            for k, call in enumerate(self.calls, len(self.sources)):
                args, kwargs = _filled((call.args, dict(call.kwargs)), values)
                values[k] = operator.getitem(*args) if call.op == GETITEM else resolve_op(call.op)(*args, **kwargs)
                for number in last.get(k, ()):
                    del values[number]
            return [_laid_out(values[r.number], r) for r in self.results]

    def _last_reads(self) -> dict[int, list[int]]:
        """By the number of a call, the values that are read there for the last time and not kept."""
        kept = {r.number for r in self.results}
        at: dict[int, int] = {}
        for k, call in enumerate(self.calls, len(self.sources)):
            at.update((number, k) for number in _read((call.args, call.kwargs)) if number not in kept)
        found: dict[int, list[int]] = {}
        for number, k in at.items():
            found.setdefault(k, []).append(number)
        return found


def _laid_out(value: Tensor, traced: KeptResult) -> Tensor:
    """A value with the strides that it was traced with; one in a library's own layout as it is."""
    assert tuple(value.shape) == traced.size and value.dtype is traced.dtype, f"{traced.told} gave {value.shape}"
    if value.layout is not torch.strided or value.stride() == traced.stride:
        return value
    return torch.empty_strided(traced.size, traced.stride, dtype=value.dtype, device=value.device).copy_(value)


def _filled(arg: Any, values: Mapping[int, Any]) -> Any:
    match arg:
        case ValueRef():
            return values[arg.number]
        case tuple() | list():
            return type(arg)(_filled(a, values) for a in arg)
        case dict():
            return {k: _filled(a, values) for k, a in arg.items()}
    return arg


def _read(arg: Any) -> set[int]:
    match arg:
        case ValueRef():
            return {arg.number}
        case tuple() | list():
            return {n for a in arg for n in _read(a)}
        case Mapping():
            return {n for a in arg.values() for n in _read(a)}
    return set()
