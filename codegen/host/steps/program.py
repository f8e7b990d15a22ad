"""The host program: what runs between the kernels of one graph, as steps that print as Python.

``host/build.py`` makes them from a graph, ``python/text.py`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import sympy

from ....ir.expr.symbols import SymbolTable
from ....ir.graph.effects import opaque_operand
from ....ir.graph.graph import TensorType
from .resolved import RunKernel
from .step import CallLibrary, HostStep, Launch, Repeat


@dataclass(frozen=True, slots=True)
class Arena:
    """One piece of memory on ``device`` in which tensors lie that nothing but launches look at, by their addresses.

    ``offsets`` gives the place in bytes of what is allocated under each name. The memory is held from step ``begin``
    through step ``end``, where steps that repeat count once, and all through their loop. It never has more than
    ``bound`` bytes, None where sizes have no limit.
    """

    device: str
    size: sympy.Expr
    offsets: Mapping[str, sympy.Expr]
    begin: int
    end: int
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The steps of one graph. ``arguments`` are the names of the caller's arguments, ``inputs`` those that are tensors.

    ``peaks`` are sizes in bytes of what the steps hold at once beyond the inputs: the greatest of them is the peak;
    there are none where steps repeat. ``table`` tells of sizes. The first ``returned`` results (None: all) are the
    caller's, the others saved for later.
    """

    name: str
    arguments: tuple[str, ...]
    inputs: Mapping[str, TensorType]
    steps: tuple[HostStep, ...]
    symbols: tuple[sympy.Symbol, ...] = ()
    peaks: tuple[sympy.Expr, ...] = ()
    arena: Arena | None = None
    table: SymbolTable = field(default_factory=SymbolTable, repr=False, compare=False)
    returned: int | None = None

    @property
    def launches(self) -> int:
        return sum(times for s, times in self.every_step() if isinstance(s, (Launch, RunKernel)))

    @property
    def library_calls(self) -> int:
        return sum(times for s, times in self.every_step() if isinstance(s, CallLibrary))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its inputs, launches and tensors."""
        given = (kind.device for kind in self.inputs.values())
        return tuple(dict.fromkeys((*given, *(d for step, _ in self.every_step() for d in step.facts.devices))))

    def every_step(self) -> Iterator[tuple[HostStep, int]]:
        """Each step as it is written, those that repeat once, and how often it runs."""
        for step in self.steps:
            if isinstance(step, Repeat):
                yield from ((s, step.times) for s in step.steps)
            else:
                yield step, 1

    def numbered(self) -> Iterator[tuple[range, HostStep]]:
        """The steps with their numbers, of which a loop has as many as steps."""
        at = 0
        for step in self.steps:
            numbers = range(at, at + (len(step.steps) if isinstance(step, Repeat) else 1))
            at = numbers.stop
            yield numbers, step

    @property
    def opaque(self) -> frozenset[str]:
        """Arguments that only a library can read, since they lie in a layout of its own."""
        found = {opaque_operand(s.node) for s, _ in self.every_step() if isinstance(s, CallLibrary)}
        loops = [s for s in self.steps if isinstance(s, Repeat)]
        taken = {n for loop in loops for name, names in loop.taken.items() if name in found for n in names}
        return frozenset(n for n in self.inputs if n in found | taken)

    @property
    def peak_bytes(self) -> sympy.Expr:
        """The most memory held at once beyond the inputs, in size symbols; workspaces inside libraries not counted."""
        return sympy.Max(*self.peaks) if self.peaks else sympy.S.Zero


@lru_cache(maxsize=8192)
def least_memory(kind: TensorType) -> int:
    """Bytes from the first element of a tensor to the last; of one whose size shows when the program runs, one byte."""
    if sympy.S.Zero in kind.shape:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(kind.shape, kind.strides, strict=True))
    return (int(last) + 1) * kind.dtype.itemsize if sympy.sympify(last).is_Integer else 1
