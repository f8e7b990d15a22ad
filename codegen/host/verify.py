"""The rules of host programs: every name stands for something where it is read, no memory is taken over that somebody
else looks at, every size is known where it is computed with, and what lives at the same time in the arena is apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from ...ir.errors import VerifyError
from .memory.plan_memory import check_arena
from .steps.program import HostProgram
from .steps.resolved import Forget, Pointer, PointTo, Rename, RunKernel, Take
from .steps.step import BindSize, CallLibrary, HostStep, Repeat, Return, Reuse


def verify_host_program(program: HostProgram) -> None:
    """Prove that a program, planned or resolved, keeps the rules, for all sizes.

    Raises: VerifyError, which names the step, what of it breaks a rule and how; ArenaError where that is a place in the
    arena.
    """
    _Verifier(program).run()
    check_arena(program)


@dataclass(slots=True)
class _Verifier:
    program: HostProgram
    # The names that stand for something, each with a number for its memory, and which of these are the caller's.
    memory: dict[str, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=count)
    # Why others do not, any more.
    gone: dict[str, str] = field(default_factory=dict)
    # Names of the sizes that are known, and of what is an address.
    known: set[str] = field(default_factory=set)
    addresses: set[str] = field(default_factory=set)

    def run(self) -> None:
        program = self.program
        steps = program.steps
        if not (steps and isinstance(steps[-1], Return)) or any(isinstance(s, Return) for s in steps[:-1]):
            raise VerifyError(f"{program.name}: a program returns its results in its last step, and nowhere else")
        if not isinstance(steps[0], Take):
            self.take(program.arguments)
        arena = program.arena
        for numbers, step in program.numbered():
            if arena is not None and arena.begin in numbers:
                self.check_sizes(numbers.start, step, {s.name for s in arena.size.free_symbols})
            if isinstance(step, Repeat):
                self.repeat(numbers, step)
            else:
                self.step(numbers.start, step)

    def repeat(self, numbers: range, loop: Repeat) -> None:
        at, given = numbers.start, {*self.program.arguments}
        for name, names in loop.taken.items():
            if len(names) != loop.times or not given.issuperset(names):
                self.fail(at, loop, f"{name} is not taken from as many arguments as it repeats")
        for _, following, initial in reversed(loop.carried):
            self.read(at, loop, initial)
            self.memory[following] = self.memory[initial]
        for _ in range(min(loop.times, 2)):  # what the second time finds, all others do
            for name, following, _ in loop.carried:
                self.read(at, loop, following)
                self.memory[name] = self.memory[following]
            for name in {b for _, b, _ in loop.carried} - {a for a, _, _ in loop.carried} - loop.taken.keys():
                self.forget(name, f"step {at} handed it on")
            self.take(loop.taken)
            for number, step in zip(numbers, loop.steps, strict=True):
                self.step(number, step)
            for name in loop.kept:
                self.read(at, loop, name)
        for name, names in loop.kept.items():
            self.memory.update((n, self.memory[name]) for n in names)

    def step(self, at: int, step: HostStep) -> None:
        facts = step.facts
        for name in facts.needs:
            self.read(at, step, name)
        self.check_sizes(at, step, {s.name for s in facts.symbols})
        if isinstance(step, Reuse) or (isinstance(step, Rename) and step.takes_over):
            self.check_alone(at, step, facts.reads[0])
        self.check_addresses(at, step)
        made = {n: self.memory[source] for n, source in facts.shares}
        for name in facts.frees:
            if name not in self.memory:
                self.fail(at, step, f"it forgets {name} twice")
            self.forget(name, f"step {at} forgot it or took over its memory")
        self.memory.update((name, made[name] if name in made else next(self.numbers)) for name in facts.makes)
        match step:
            case Take(names):
                self.take(names)
            case BindSize(symbol):
                self.known.add(symbol.name)
            case CallLibrary(node):
                self.known.update(n for n, t in zip(node.names, node.types, strict=True) if t is None)

    def take(self, names: Iterable[str]) -> None:
        """Names for arguments of the caller's."""
        self.memory.update((name, next(self.numbers)) for name in names)
        self.given.update(self.memory[name] for name in names)

    def read(self, at: int, step: HostStep, name: str) -> None:
        if name not in self.memory:
            why = self.gone.get(name, "no step before it makes that")
            self.fail(at, step, f"{name} stands for nothing there: {why}")

    def forget(self, name: str, why: str) -> None:
        self.memory.pop(name, None)
        self.gone[name] = why

    def check_sizes(self, at: int, step: HostStep, symbols: set[str]) -> None:
        if missing := symbols - self.known:
            self.fail(at, step, f"nothing before it gives the size {', '.join(sorted(missing))}")

    def check_alone(self, at: int, step: HostStep, source: str) -> None:
        """Nobody else looks at memory that is taken over, and it is no argument's."""
        memory = self.memory[source]
        others = [n for n, m in self.memory.items() if m == memory and n != source]
        if others or memory in self.given:
            whose = f"{', '.join(others)} looks at" if others else "the caller has given"
            self.fail(at, step, f"it takes over the memory of {source}, which {whose}")

    def check_addresses(self, at: int, step: HostStep) -> None:
        """Pointers say rightly what they are, and nothing takes an address for a tensor."""
        pointers: tuple[Pointer, ...] = ()
        match step:
            case RunKernel() | Forget():
                pointers = step.pointers
            case Rename(source=source):
                pointers = (source,)
        for pointer in pointers:
            if pointer.is_address != (pointer.name in self.addresses):
                self.fail(at, step, f"{pointer.name} is {'no' if pointer.is_address else 'an'} address")
        if wrong := self.addresses.intersection(step.facts.wants):
            self.fail(at, step, f"it takes {', '.join(sorted(wrong))} as tensors, which are addresses")
        match step:
            case PointTo(name):
                self.addresses.add(name)
            case Rename(name, Pointer(is_address=True)):
                self.addresses.add(name)

    def fail(self, at: int, step: HostStep, why: str) -> None:
        raise VerifyError(f"{self.program.name}: step {at}: {why}\n  {_short(step)}")


def _short(step: HostStep, most: int = 300) -> str:
    text = repr(step)
    return text if len(text) <= most else f"{text[:most]} …"
