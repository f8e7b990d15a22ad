"""The host program: what runs between the kernels of one graph, as steps that print as Python.

``host/build.py`` makes them from a graph, ``python/text.py`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import sympy

from ....ir.expr.value import symbol
from ....ir.graph.graph import GraphOutput, Library, TensorType


@dataclass(frozen=True, slots=True)
class Grid:
    """The programs of a GPU kernel by dimension, in the sizes that it takes, whose names in order are ``symbols``; and
    how far its indices reach, where that decides its variant (``KernelSource.reach``)."""

    extents: tuple[sympy.Expr, ...]
    symbols: tuple[str, ...]
    reach: sympy.Expr | None = None

    def of(self, sizes: Sequence[sympy.Expr]) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
        """Three extents, of a launch with these sizes."""
        known = self._known(sizes)
        x, y, z = (*(e.xreplace(known) for e in self.extents), *[sympy.S.One] * (3 - len(self.extents)))
        return x, y, z

    def reach_of(self, sizes: Sequence[sympy.Expr]) -> sympy.Expr:
        """How far indices reach in a launch with these sizes; zero where that decides nothing."""
        return sympy.S.Zero if self.reach is None else self.reach.xreplace(self._known(sizes))

    def _known(self, sizes: Sequence[sympy.Expr]) -> dict[sympy.Symbol, sympy.Expr]:
        return {symbol(name): size for name, size in zip(self.symbols, sizes, strict=True)}


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How calls of a tensor function reach compiled code.

    ``kernel`` is the variable of the code (equal functions share one), ``sizes`` which of the call's sizes it takes, in
    its order. Code is called with an address for each tensor, then the sizes; or, where not ``by_pointer`` (ATen ops in
    a kernel's place, GPU kernels that copy what lies where they cannot read it), with the tuple of tensors and that of
    sizes. Code over a ``table`` is called with the number of rows first, and then tensors and sizes row by row. Code
    for a GPU, which has a ``grid``, takes the index of the device before all addresses.
    """

    kernel: str
    sizes: tuple[int, ...]
    by_pointer: bool = True
    table: bool = False
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class BindSize:
    """``symbol`` is dimension ``dim`` of the tensor ``source``, or its stride where ``stride``; or the integer
    ``source``."""

    symbol: sympy.Symbol
    source: str
    dim: int | None = None
    stride: bool = False
    # The value read is ``scale * symbol + shift``.
    scale: int = 1
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory for a result, not initialised."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Reuse:
    """``name`` takes over the memory of ``source``, which nobody reads any more and whose type is the same."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class WriteOver:
    """``name`` is the memory of ``target``, an input or what dies here, that the launch after this one writes over."""

    name: str
    target: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel: ``tensors`` are inputs then outputs, those that are inputs once.

    A kernel over a table does the work of ``count`` calls: tensors and sizes are those of one call after the other.
    """

    use: KernelUse
    tensors: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]
    device: str
    comment: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class CallLibrary:
    """Call an op (``target`` as in ``Library``) and bind its results.

    ``over`` is the operand in whose memory the one result is made, "" for none.
    """

    node: Library
    comment: str = ""
    over: str = ""


@dataclass(frozen=True, slots=True)
class CheckLayout:
    """Bring a library's result, or an argument, into the layout that the graph was compiled for, should it have
    another. ``op`` is the user's own op that gives it, whose fake kernel may have promised something else."""

    name: str
    type: TensorType
    op: str = ""


@dataclass(frozen=True, slots=True)
class MakeView:
    """``name`` looks at the memory of ``source`` from ``offset`` elements in; to autograd as well where ``tracked``."""

    name: str
    type: TensorType
    source: str
    offset: sympy.Expr
    tracked: bool = False


@dataclass(frozen=True, slots=True)
class LimitMemory:
    """Refuse to go on, with ``message``, where what the program is to hold at once, the greatest of ``peaks`` in bytes,
    is above ``limit``."""

    peaks: tuple[sympy.Expr, ...]
    limit: int
    message: str


@dataclass(frozen=True, slots=True)
class Free:
    """Forget tensors; their memory goes with the last name for it."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """The results."""

    values: tuple[GraphOutput, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``steps`` again and again: those of one of the layers that are alike, under the names that it has there.

    ``taken`` are inputs of the program by their names in the steps, and ``kept`` what leaves it: what each is called
    outside, time by time. What is ``carried`` has three names: before each time the first becomes what the second was,
    which the steps or the next of these pairs set anew, and before all of them the second becomes what the third is.
    """

    steps: tuple[Step, ...]
    times: int
    taken: Mapping[str, tuple[str, ...]]
    kept: Mapping[str, tuple[str, ...]]
    carried: tuple[tuple[str, str, str], ...]


Step: TypeAlias = (
    BindSize
    | Allocate
    | Reuse
    | WriteOver
    | Launch
    | CallLibrary
    | CheckLayout
    | MakeView
    | LimitMemory
    | Free
    | Repeat
    | Return
)


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
    there are none where steps repeat. ``begins`` says at which step each node of the graph begins, and where all end.
    """

    name: str
    arguments: tuple[str, ...]
    inputs: Mapping[str, TensorType]
    steps: tuple[Step, ...]
    symbols: tuple[sympy.Symbol, ...] = ()
    peaks: tuple[sympy.Expr, ...] = ()
    arena: Arena | None = None
    begins: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @property
    def launches(self) -> int:
        return sum(times for s, times in self.every_step() if isinstance(s, Launch))

    @property
    def library_calls(self) -> int:
        return sum(times for s, times in self.every_step() if isinstance(s, CallLibrary))

    def every_step(self) -> Iterator[tuple[Step, int]]:
        """Each step as it is written, those that repeat once, and how often it runs."""
        for step in self.steps:
            if isinstance(step, Repeat):
                yield from ((s, step.times) for s in step.steps)
            else:
                yield step, 1

    def numbered(self) -> Iterator[tuple[range, Step]]:
        """The steps with their numbers, of which a loop has as many as steps."""
        at = 0
        for step in self.steps:
            numbers = range(at, at + (len(step.steps) if isinstance(step, Repeat) else 1))
            at = numbers.stop
            yield numbers, step

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
