"""Where the results of an exported program lie: in the caller's memory, where kernels write them; and copies as steps.

A result that is a whole allocation of the program's and lies as the caller's memory does (row-major, but for what loops
carry) takes that memory in its place. What else is returned (an input, a part of something, a layout of another kind,
the same tensor twice) is copied at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ....ir.graph.graph import Library, Node, Ref, TensorType
from ....ir.graph.rename import Naming
from ...kernel import EmitError
from ..memory.liveness import storage_bytes
from ..steps.program import HostProgram
from ..steps.step import Allocate, CallLibrary, Facts, HostStep, MakeView, Repeat, Return, Reuse, WriteOver

COPY = "aten::copy_.default"


@dataclass(frozen=True, slots=True)
class TakeResult(HostStep):
    """``name`` is the caller's memory for the result at ``position``."""

    name: str
    type: TensorType
    position: int

    def told(self) -> Facts:
        return Facts(makes=(self.name,), devices=(self.type.device,))


@dataclass(frozen=True, slots=True)
class CopyResult(HostStep):
    """Copy what ``source`` of a type is to the caller's memory for the result at ``position``, of these strides."""

    source: str
    type: TensorType
    position: int
    strides: tuple[sympy.Expr, ...]

    def told(self) -> Facts:
        return Facts(reads=(self.source,), sizes=(*self.type.shape, *self.type.strides, *self.strides))


@dataclass(frozen=True, slots=True)
class CopyOver(HostStep):
    """Copy what ``source`` of a type is over ``target``, which is ``name`` from there on."""

    name: str
    target: str
    source: str
    type: TensorType
    source_type: TensorType

    def told(self) -> Facts:
        return Facts(
            reads=(self.target, self.source), makes=(self.name,), shares=((self.name, self.target),),
            sizes=(*self.type.shape, *self.type.strides, *self.source_type.strides),
        )  # fmt: skip

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, name=name(self.name), target=name(self.target), source=name(self.source))


def write_copies(program: HostProgram, types: Mapping[str, TensorType]) -> HostProgram:
    """The program with calls of torch's ``copy_`` between tensors of one kind as steps of its own."""

    def step_of(step: HostStep) -> HostStep:
        match step:
            case Repeat():
                return replace(step, steps=tuple(map(step_of, step.steps)))
            case CallLibrary(node) if copied(node, types):
                target, source = (a.name for a in node.args[:2])
                return CopyOver(node.names[0], target, source, types[target], types[source])
        return step

    return replace(program, steps=tuple(map(step_of, program.steps)))


def copied(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether a node copies elements as they are over a tensor of the same shape."""
    if not isinstance(node, Library) or node.target != COPY or not all(isinstance(a, Ref) for a in node.args[:2]):
        return False
    target, source = (types[a.name] for a in node.args[:2])
    return target.dtype == source.dtype and target.shape == source.shape


def row_major(shape: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """The strides, in elements, of dense memory in the order of the last dimension first."""
    strides: list[sympy.Expr] = []
    step: sympy.Expr = sympy.S.One
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


def place_results(
    program: HostProgram, types: Sequence[TensorType], strides: Sequence[tuple[sympy.Expr, ...]] | None = None
) -> HostProgram:
    """The program, which has no loops, with its results, of these types, in the caller's memory; nothing is returned.

    ``strides`` are those of the caller's memory, which is dense; None where it is row-major. Raises EmitError for
    results that are no tensors.
    """
    layouts = [row_major(t.shape) for t in types] if strides is None else strides
    *steps, end = program.steps
    assert isinstance(end, Return)
    found = _Memory()
    for step in steps:
        found.step(step)
    taken: dict[str, TakeResult] = {}
    copies: list[CopyResult] = []
    for position, (value, kind, layout) in enumerate(zip(end.values, types, layouts, strict=True)):
        if not isinstance(value, str):
            raise EmitError(f"{program.name}: result {position} is {value}, and no tensor")
        root = found.root.get(value, value)
        memory = found.types.get(root)
        whole = memory is not None and found.offset.get(value) == 0 and memory.dtype == kind.dtype
        if (
            whole and memory is not None and root not in taken and lies_as(kind, layout)
            and sympy.expand(storage_bytes(memory) - kind.nbytes) == 0
        ):  # fmt: skip
            taken[root] = TakeResult(root, memory, position)
        else:
            copies.append(CopyResult(value, kind, position, layout))
    placed = (taken.get(s.name, s) if isinstance(s, Allocate) else s for s in steps)
    return replace(program, steps=(*placed, *copies, Return(())), peaks=())


def lies_as(kind: TensorType, strides: Sequence[sympy.Expr]) -> bool:
    """Whether a tensor has these strides; dimensions of one element may have any."""
    wanted = zip(kind.shape, kind.strides, strides, strict=True)
    return all(n == 1 or sympy.expand(s - w) == 0 for n, s, w in wanted)


@dataclass(slots=True)
class _Memory:
    """What names look at: the allocation, and how many elements behind its begin they do."""

    root: dict[str, str] = field(default_factory=dict)
    offset: dict[str, sympy.Expr] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)

    def step(self, step: HostStep) -> None:
        match step:
            case Allocate(name, kind):
                self.root[name], self.offset[name], self.types[name] = name, sympy.S.Zero, kind
            case MakeView(name, _, source, offset):
                self.share(name, source, offset)
            case Reuse(name, source) | WriteOver(name, source) | CopyOver(name, source):
                self.share(name, source, sympy.S.Zero)

    def share(self, name: str, source: str, offset: sympy.Expr) -> None:
        if source in self.root:
            self.root[name], self.offset[name] = self.root[source], self.offset[source] + offset
