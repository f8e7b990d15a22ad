"""A host program in the form that both printers write down: Python text and machine code.

Decided here, once: which names are addresses in the arena and which are tensors, when the arena is taken and let go of,
where the memory of arguments is looked at, what a kernel is called with, on which GPU, and which sizes are computed
before which step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ....ir.graph.graph import TensorType
from .program import HostProgram, least_memory
from .resolved import DropArena, Forget, HoldArena, Let, LookAt, Pointer, PointTo, Rename, Row, RunKernel, Take
from .step import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    Free,
    HostStep,
    Item,
    Launch,
    MakeView,
    Repeat,
    Return,
    Reuse,
    WriteOver,
)
from .unseen import unseen


def resolve(program: HostProgram) -> HostProgram:
    """The program with resolved steps, in the same order, and without an arena beside them; itself where they are."""
    if isinstance(program.steps[0], Take):
        return program
    return replace(program, steps=tuple(_Resolver(program).run()), arena=None)


def with_sizes(steps: Iterable[HostStep], known: dict[sympy.Basic, str] | None = None) -> Iterator[HostStep]:
    """Resolved steps, each behind the sizes that it is the first to compute with."""
    known = {} if known is None else known
    for step in steps:
        if isinstance(step, Repeat):
            yield replace(step, steps=tuple(with_sizes(step.steps, known)))
            continue
        for size in step.facts.sizes:
            if isinstance(size, sympy.Basic) and not (size.is_Integer or size.is_Symbol) and size not in known:
                known[size] = f"n{len(known)}_"
                yield Let(known[size], size)
        yield step


def each(name: str) -> str:
    """The list of the arguments that steps take one by one under a name."""
    return f"{name} each"


def every(name: str) -> str:
    """The list of what leaves steps that repeat under a name."""
    return f"{name} all"


@dataclass(slots=True)
class _Resolver:
    program: HostProgram
    # Names that are addresses, and arguments whose memory was looked at.
    addresses: set[str] = field(default_factory=set)
    looked_at: set[str] = field(default_factory=set)
    # What lies in lists: arguments that repeating steps take, and what leaves those.
    items: dict[str, Item] = field(default_factory=dict)
    gpu: str = ""
    unseen: frozenset[str] = frozenset()
    # Arguments without an address.
    opaque: frozenset[str] = frozenset()

    def run(self) -> Iterator[HostStep]:
        steps = [s for s, _ in self.program.every_step()]
        devices = {s.device for s in steps if isinstance(s, Launch)} - {"cpu"}
        self.gpu = devices.pop() if len(devices) == 1 else ""
        self.unseen, self.opaque = unseen(self.program), self.program.opaque
        take = self.take(steps)
        yield take
        yield from self.look_at_all(steps, take.least)
        yield from with_sizes(self.steps())

    def steps(self) -> Iterator[HostStep]:
        arena = self.program.arena
        for numbers, step in self.program.numbered():
            if arena is not None and arena.begin in numbers:
                yield HoldArena(arena.size, arena.device, arena.bound)
            if isinstance(step, Repeat):
                yield self.repeat(step)
            else:
                yield from self.step(step)
            if arena is not None and arena.end in numbers:
                yield DropArena()

    def repeat(self, loop: Repeat) -> HostStep:
        steps = tuple(s for step in loop.steps for s in self.step(step))
        for name, names in loop.kept.items():
            self.items |= {n: Item(every(name), k) for k, n in enumerate(names)}
        return replace(loop, steps=steps)

    def step(self, step: HostStep) -> Iterator[HostStep]:
        match step:
            case Allocate(name) if self.program.arena is not None and name in self.program.arena.offsets:
                yield self.place(name, "", self.program.arena.offsets[name])
            case MakeView(name, kind, source, offset) if source in self.addresses:
                yield self.place(name, source, offset * kind.dtype.itemsize)
            case Reuse(name, source) | WriteOver(name, source):
                yield from self.look_at(step)
                pointer = self.pointer(source)
                if pointer.is_address:
                    self.addresses.add(name)
                yield Rename(name, pointer, takes_over=isinstance(step, Reuse))
            case Launch():
                yield from self.look_at(step)
                yield self.launch(step)
            case Allocate(name, kind):
                yield replace(step, rounded=self.is_rounded(name, kind))
            case CallLibrary(node):
                yield from self.look_at(step)
                kinds = zip(node.names, node.types, strict=True) if step.blocks else ()
                rounded = tuple(n for n, t in kinds if t is not None and self.is_rounded(n, t))
                yield replace(step, rounded=rounded)
            case MakeView():
                yield from self.look_at(step)
                yield step
            case Free(names):
                yield Forget(tuple(map(self.pointer, names)))
            case BindSize(source=str(source)):
                yield replace(step, source=self.items.get(source, source))
            case Return(values):
                yield Return(tuple(self.items.get(v, v) if isinstance(v, str) else v for v in values))
            case _:
                yield step

    def is_rounded(self, name: str, kind: TensorType) -> bool:
        """Whether memory is as large as fits others of near sizes: where sizes vary, and only the program sees it."""
        return name in self.unseen and not kind.nbytes.is_Integer

    def place(self, name: str, base: str, offset: sympy.Expr) -> PointTo:
        self.addresses.add(name)
        return PointTo(name, base, offset)

    def pointer(self, name: str) -> Pointer:
        return Pointer(name, name in self.addresses)

    def launch(self, step: Launch) -> RunKernel:
        use = step.use
        count = step.count if use.by_pointer and use.table else 1
        width, numbers = len(step.tensors) // count, len(step.sizes) // count
        rows = tuple(
            Row(
                tuple(map(self.pointer, step.tensors[k * width : (k + 1) * width])),
                step.sizes[k * numbers : (k + 1) * numbers],
            )
            for k in range(count)
        )
        index = step.device.partition(":")[2] or "0"
        gpu = index if use.by_pointer and use.grid is not None else ""
        guard = index if step.device not in ("cpu", self.gpu) else ""
        return RunKernel(use, rows, step.count, gpu, guard, step.device, step.comment)

    # --- arguments --------------------------------------------------------------------------------------------------

    def take(self, steps: Sequence[HostStep]) -> Take:
        """With steps that repeat, the arguments that something reads, those of the steps as lists."""
        p = self.program
        laid_out = {s.name for s in steps if isinstance(s, CheckLayout)}
        least = {n: self.least(n) for n in p.inputs}
        least |= {n: min(least[n], 1) for n in laid_out & least.keys()}
        loops = [s for s in p.steps if isinstance(s, Repeat)]
        if not loops:
            return Take(p.arguments, None, {}, self.gpu, least)
        place = {name: k for k, name in enumerate(p.arguments)}
        read = {n for step in steps for n in step.facts.needs}
        read |= {initial for loop in loops for _, _, initial in loop.carried}
        lists: dict[str, tuple[int, ...]] = {}
        for name, names in ((n, ns) for loop in loops for n, ns in loop.taken.items()):
            lists[each(name)] = tuple(place[n] for n in reversed(names))
            self.items |= {n: Item(each(name), -1 - k) for k, n in enumerate(names)}
        single = tuple(n for n in place if n in read and n not in self.items)
        return Take(single, tuple(place[n] for n in single), lists, self.gpu, least)

    def least(self, name: str) -> int:
        """Bytes of memory that an argument has at least; 0 where nobody may look."""
        return 0 if name in self.opaque else least_memory(self.program.inputs[name])

    def look_at_all(self, steps: Sequence[HostStep], least: Mapping[str, int]) -> Iterator[HostStep]:
        """At the beginning, unless the program itself may give memory to arguments or take it."""
        calls = [s.node.target for s in steps if isinstance(s, CallLibrary)]
        if any(target.startswith("hop::") or "resize_" in target or "::set_" in target for target in calls):
            return
        times = {name: s.times for s in self.program.steps if isinstance(s, Repeat) for name in s.taken}
        names = dict.fromkeys(n for step in steps for n in step.facts.touches if n in self.program.inputs)
        self.looked_at = {*names}
        found = {n: least[n] for n in names if least[n]}
        if found:
            lists = {each(n): times[n] for n in found if n in times}
            yield LookAt({each(n) if n in times else n: b for n, b in found.items()}, lists, self.program.launches > 0)

    def look_at(self, step: HostStep) -> Iterator[HostStep]:
        """Where arguments are used for the first time: whoever has freed their memory, or a part of it, is told so."""
        target = step.node.target if isinstance(step, CallLibrary) else ""
        if target.startswith("hop::") or "resize_storage" in target:
            return
        for name in step.facts.touches:
            if name not in self.program.inputs or name in self.looked_at:
                continue
            self.looked_at.add(name)
            if least := self.least(name):
                yield LookAt({name: least}, {}, self.program.launches > 0)
