"""What is known of the arguments of a program's launches when it is exported: where pointers begin, and how far indices
reach. It decides which variants of a GPU's kernels there have to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from ...kernel import ALIGNMENT, INDEX_MAX
from ..steps.kernel_use import Grid
from ..steps.program import HostProgram
from ..steps.resolved import Pointer, PointTo, Rename, RunKernel
from ..steps.step import HostStep, MakeView
from .results import CopyOver, TakeResult


@dataclass(frozen=True, slots=True)
class PointersOf:
    """Of all launches of a kernel: which pointers may be ``odd``, no multiple of 16 bytes; whether indices may reach
    beyond 32 bits (``far``); and the ``sizes`` of each launch, in those of its program."""

    odd: tuple[bool, ...]
    far: bool
    sizes: tuple[tuple[sympy.Expr, ...], ...]

    def and_(self, other: PointersOf) -> PointersOf:
        """Of the launches of both."""
        odd = tuple(a or b for a, b in zip(self.odd, other.odd, strict=True))
        return PointersOf(odd, self.far or other.far, (*self.sizes, *other.sizes))


def pointers_of(program: HostProgram, odd: frozenset[str], grids: Mapping[str, Grid]) -> dict[str, PointersOf]:
    """By kernel, what is known of its launches in a planned program, of which the inputs ``odd`` may begin anywhere.
    ``grids`` are those of the kernels. The arena and weights begin at multiples of 16 bytes."""
    found = _Odd(set(odd))
    told: dict[str, PointersOf] = {}
    for step in program.steps:
        found.step(step)
        if isinstance(step, RunKernel):
            name = step.use.kernel
            pointers = tuple(p.name in found.names for p in step.pointers)
            sizes = tuple(sympy.sympify(s) for s in step.sizes)
            high = program.table.bounds(grids[name].reach_of(sizes))[1]
            here = PointersOf(pointers, high is None or high > INDEX_MAX, (sizes,))
            told[name] = told[name].and_(here) if name in told else here
    return told


@dataclass(slots=True)
class _Odd:
    """The names of what may begin at any address."""

    names: set[str] = field(default_factory=set)

    def step(self, step: HostStep) -> None:
        match step:
            case TakeResult(name):
                self.names.add(name)
            case PointTo(name, base, offset):
                self.put(name, base in self.names or not is_multiple(offset))
            case MakeView(name, kind, source, offset):
                self.put(name, source in self.names or not is_multiple(offset * kind.dtype.itemsize))
            case Rename(name, Pointer(source)):
                self.put(name, source in self.names)
            case CopyOver(name, target):
                self.put(name, target in self.names)

    def put(self, name: str, odd: bool) -> None:
        (self.names.add if odd else self.names.discard)(name)


def is_multiple(nbytes: sympy.Expr, of: int = ALIGNMENT) -> bool:
    """Whether a number of bytes is provably a multiple, for all sizes."""
    terms = sympy.expand(nbytes).as_coefficients_dict()
    return all(c.is_Integer and c % of == 0 and t.is_integer is not False for t, c in terms.items())
