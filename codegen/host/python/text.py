"""The host program as Python text, and what that text needs to run.

The text defines ``call(args)``. Names that end in an underscore are given by whoever runs it: ``empty_cpu_``,
``view_``, … (``runtime/host/executable.py``), the kernels ``k0_``, the ops ``aten_addmm_default_`` and the constants
``constant_0_``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.graph.graph import MADE_SIZE, Library, TensorType, refs
from ..steps.ops import nests, returns_sequence
from ..steps.program import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    Free,
    HostProgram,
    Launch,
    LimitMemory,
    MakeView,
    Repeat,
    Return,
    Reuse,
    Step,
    WriteOver,
    least_memory,
)
from ..steps.repeat import names_of
from .words import Words


@dataclass(frozen=True, slots=True)
class HostText:
    """``text`` and its free names: op targets and names of constants by variable."""

    text: str
    ops: Mapping[str, str]
    constants: Mapping[str, str]


def print_host(program: HostProgram) -> HostText:
    """The program as Python source."""
    return _Printer(program=program, guarded=_only_gpu(program)).run()


@dataclass(frozen=True, slots=True)
class HostFunction:
    """Steps of a program as a function of its own: what it takes, names of tensors and sizes, and what it returns.

    Of what it takes, ``addresses`` are given as integers.
    """

    name: str
    arguments: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    addresses: frozenset[str] = frozenset()


def print_parts(program: HostProgram, parts: Sequence[HostFunction]) -> HostText:
    """A Python function for each part."""
    printer = _Printer(program=program, guarded=_only_gpu(program))
    for part in parts:
        printer.part(part)
    return printer.done()


@dataclass(slots=True)
class _Printer(Words):
    program: HostProgram = field(kw_only=True)
    # The variables of the arena and its address, and the names that are addresses and no tensors.
    arena: tuple[str, str] = ("", "")
    addresses: set[str] = field(default_factory=set)
    # Arguments whose memory was looked for.
    looked_at: set[str] = field(default_factory=set)
    # In steps that repeat: arguments that they take one by one, and what leaves the program.
    listed: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    def run(self) -> HostText:
        p = self.program
        self.lines += [
            f"# {p.name}: {p.launches} kernels, {p.library_calls} library calls; made by torch-mlc",
            "def call(args):",
        ]
        repeats = [s for s in p.steps if isinstance(s, Repeat)]
        if repeats:
            self.take(repeats)
        elif p.arguments:
            names = ", ".join(self.name(a) for a in p.arguments)
            self.line(f"{names}{',' if len(p.arguments) == 1 else ''} = args")
        self.line("args.clear()")
        if self.guarded:
            self.line(f"with guard_({_index(self.guarded)}):")
            self.indent += "    "
        self.look_at_all()
        for numbers, step in p.numbered():
            if p.arena is not None and p.arena.begin in numbers:
                self.arena = self.name("arena "), self.name("arena at ")
                whole = TensorType((p.arena.size,), (sympy.S.One,), DType.UINT8, p.arena.device)
                self.line(f"{self.arena[0]} = {self.empty(whole)}")
                self.line(f"{self.arena[1]} = {self.arena[0]}.data_ptr()")
            self.step(step)
            if p.arena is not None and p.arena.end in numbers:
                self.line(f"del {self.arena[0]}")
        return self.done()

    def part(self, part: HostFunction) -> None:
        self.names, self.taken, self.hoisted, self.comment = {}, set(), {}, ""
        self.looked_at = {*self.program.inputs}  # by whoever has taken them over
        self.addresses = {*part.addresses}
        self.lines.append(f"def {part.name}({', '.join(self.name(a) for a in part.arguments)}):")
        for step in part.steps:
            self.step(step)
        results = [self.name(r) for r in part.results]
        self.line(f"return ({', '.join(results)}{',' if len(results) == 1 else ''})")

    def done(self) -> HostText:
        text = "\n".join(self.lines) + "\n"
        return HostText(text, self.ops, {v: n for n, v in self.constants.items()})

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        match step:
            case BindSize():
                self.bind(step)
            case Allocate(name) if self.program.arena is not None and name in self.program.arena.offsets:
                self.address(name, self.arena[1], self.program.arena.offsets[name])
            case Reuse(name, source) | WriteOver(name, source) if source in self.addresses:
                self.address(name, self.name(source), sympy.S.Zero)
            case MakeView(name, kind, source, offset) if source in self.addresses:
                self.address(name, self.name(source), offset * kind.dtype.itemsize)
            case Allocate(name, kind):
                self.line(f"{self.name(name)} = {self.empty(kind)}")
            case Reuse(name, source):
                self.look_at(source)
                self.line(f"{self.name(name)} = {self.name(source)}; del {self.name(source)}  # takes over its memory")
            case WriteOver(name, target):
                self.look_at(target)
                self.line(f"{self.name(name)} = {self.name(target)}  # written over")
            case Launch():
                self.launch(step)
            case CallLibrary(node, comment, over):
                self.library(node, comment, over)
            case CheckLayout(name, kind, op):
                variable = self.name(name)
                given = f"{variable}, {self.sizes(kind.shape)}, {self.sizes(kind.strides)}"
                call = f"checked_op_({given}, {kind.dtype.torch}, {op!r})" if op else f"checked_({given})"
                self.line(f"{variable} = {call}")
            case MakeView(name, kind, source, offset):
                self.look_at(source)
                where = f"{self.sizes(kind.shape)}, {self.sizes(kind.strides)}, {self.size(offset)}"
                make = "tracked_view_" if step.tracked else "view_"
                self.line(f"{self.name(name)} = {make}({self.name(source)}, {where})")
            case LimitMemory(peaks, limit, message):
                values = ", ".join(self.size(p) for p in peaks)
                peak = f"max({values})" if len(peaks) > 1 else values
                self.line(f"if {peak} > {limit}: over_limit_({peak}, {message!r})")
            case Free(names):
                tensors = [self.name(n) for n in names if n not in self.addresses]
                if tensors:
                    self.line(f"del {', '.join(tensors)}")
            case Repeat():
                self.repeat(step)
            case Return(values):
                items = [self.literal(v) if not isinstance(v, str) else self.result(v) for v in values]
                self.line(f"return ({', '.join(items)}{',' if len(items) == 1 else ''})")

    def take(self, repeats: Sequence[Repeat]) -> None:
        """The arguments that something reads, those of steps that repeat as lists, the first ones last."""
        place = {name: k for k, name in enumerate(self.program.arguments)}
        read = {n for step, _ in self.program.every_step() for n in names_of(step)[0]}
        read |= {initial for step in repeats for _, _, initial in step.carried}
        for step in repeats:
            for name, each in step.taken.items():
                self.line(f"{self.each(name)} = {_items([place[n] for n in reversed(each)])}")
                self.listed |= {n: f"{self.each(name)}[{-1 - k}]" for k, n in enumerate(each)}
        read -= self.listed.keys()
        single = [name for name in place if name in read]
        if single:
            places = f"({', '.join(str(place[n]) for n in single)}{',' if len(single) == 1 else ''})"
            names = f"{', '.join(map(self.name, single))}{',' if len(single) == 1 else ''}"
            self.line(f"{names} = [args[k] for k in {places}]")

    def repeat(self, step: Repeat) -> None:
        for _, following, initial in reversed(step.carried):
            self.line(f"{self.name(following)} = {self.name(initial)}")
        for name, each in step.kept.items():
            self.line(f"{self.each(name, 'all')} = []")
            self.results |= {n: f"{self.each(name, 'all')}[{k}]" for k, n in enumerate(each)}
        self.line(f"for _ in range({step.times}):  # layers that are alike")
        outside, self.indent = self.indent, f"{self.indent}    "
        for name, following, _ in step.carried:
            self.line(f"{self.name(name)} = {self.name(following)}")
        begun = {*step.taken, *(name for name, _, _ in step.carried)}
        handed = [self.name(following) for _, following, _ in step.carried if following not in begun]
        if handed:
            self.line(f"del {', '.join(handed)}")
        for name in step.taken:
            self.line(f"{self.name(name)} = {self.each(name)}.pop()")
        for one in step.steps:
            self.step(one)
        for name in step.kept:
            self.line(f"{self.each(name, 'all')}.append({self.name(name)})")
        self.indent, self.comment = outside, ""

    def each(self, name: str, word: str = "each") -> str:
        """The list of what is called so time by time."""
        return self.name(f"{name} {word}")

    def result(self, name: str) -> str:
        return self.results.get(name) or self.name(name)

    def address(self, name: str, base: str, offset: sympy.Expr) -> None:
        """A name for a place so many bytes behind another."""
        text = self.size(offset)
        self.addresses.add(name)
        self.line(f"{self.name(name)} = {base}{'' if text == '0' else f' + {text}'}")

    def pointer(self, name: str) -> str:
        known = self.name(name)
        return known if name in self.addresses else f"{known}.data_ptr()"

    def look_at_all(self) -> None:
        """At the beginning, unless the program itself may give memory to arguments or take it."""
        steps = [s for s, _ in self.program.every_step()]
        calls = [s.node.target for s in steps if isinstance(s, CallLibrary)]
        if any(target.startswith("hop::") or "resize_" in target or "::set_" in target for target in calls):
            return
        laid_out = {s.name for s in steps if isinstance(s, CheckLayout)}
        least: dict[str, int] = {}
        for name in (n for step in steps for n in _looked_at(step)):
            kind = self.program.inputs.get(name)
            if kind is not None and name not in least:
                least[name] = min(least_memory(kind), 1) if name in laid_out else least_memory(kind)
        self.looked_at = {*least}
        times = {name: s.times for s in self.program.steps if isinstance(s, Repeat) for name in s.taken}
        names = [n for n, nbytes in least.items() if nbytes]
        if names:
            tensors = ", ".join(f"*{self.each(n)}" if n in times else self.name(n) for n in names)
            numbers = ", ".join(f"*[{least[n]}] * {times[n]}" if n in times else str(least[n]) for n in names)
            comma = "," if len(names) == 1 else ""
            self.line(f"{self.memory_check}(({tensors}{comma}), ({numbers}{comma}))")

    def look_at(self, *names: str) -> None:
        """Where arguments are used for the first time: whoever has freed their memory, or a part of it, is told so."""
        for name in names:
            kind = self.program.inputs.get(name)
            if kind is None or name in self.looked_at:
                continue
            self.looked_at.add(name)
            if least := least_memory(kind):
                self.line(f"{self.memory_check}(({self.name(name)},), ({least},))")

    @property
    def memory_check(self) -> str:
        """What looks at the memory of arguments. Ops take tensors that have none, as torch's fakes; kernels do not."""
        launches = any(isinstance(s, Launch) for s, _ in self.program.every_step())
        return "with_memory_" if launches else "with_storage_"

    def bind(self, step: BindSize) -> None:
        source = self.listed.get(step.source) or self.name(step.source)
        if step.dim is not None:
            source = f"{source}.{'stride' if step.stride else 'size'}({step.dim})"
        if step.shift:
            source = f"({source} - {step.shift})"
        if step.scale != 1:
            source = f"{source} // {step.scale}"
        target = self.name(step.symbol.name)
        if target != source:
            self.line(f"{target} = {source}")

    def launch(self, step: Launch) -> None:
        self.look_at(*step.tensors)
        if step.use.by_pointer and step.use.table:
            args = [str(step.count)]
            tensors, sizes = (_rows(x, step.count) for x in (step.tensors, step.sizes))
            for row, numbers in zip(tensors, sizes, strict=True):
                args += [self.pointer(t) for t in row] + [self.size(s) for s in numbers]
        elif step.use.by_pointer:
            args = [self.pointer(t) for t in step.tensors] + [self.size(s) for s in step.sizes]
        else:
            names = [self.name(t) for t in step.tensors]
            args = [f"({', '.join(names)}{',' if len(names) == 1 else ''})", self.sizes(step.sizes)]
            if step.use.table:
                args.insert(0, str(step.count))
        if step.use.by_pointer and step.use.grid is not None:
            args.insert(0, _index(step.device))
        call = f"{step.use.kernel}({', '.join(args)})"
        if step.device not in ("cpu", self.guarded):
            call = f"with guard_({_index(step.device)}): {call}"
        self.line(call, step.comment)

    def library(self, node: Library, comment: str, over: str = "") -> None:
        if not node.target.startswith("hop::") and "resize_storage" not in node.target:
            self.look_at(*refs((node.args, tuple(v for _, v in node.kwargs))))
        results = [self.name(n) for n in node.names]
        args = [self.literal(a) for a in node.args] + [f"{k}={self.literal(v)}" for k, v in node.kwargs]
        if over:
            args.append(f"out={self.name(over)}")
        if node.target == "mlc::constant":
            self.line(f"{results[0]} = {self.constant(node.args[0])}", comment)
            return
        if node.target == MADE_SIZE:
            self.line(f"{results[0]} = {args[0]}", comment)
            return
        if node.target == "mlc::seeds":
            self.line(f"{results[0]} = seeds_({', '.join(args)})", comment)
            return
        call = f"{self.op(node.target)}({', '.join(args)})"
        if nests(node.target):
            call = f"flat_({call})"
        if not results:
            self.line(call, comment)
        elif len(results) == 1 and not returns_sequence(node.target):
            self.line(f"{results[0]} = {call}", comment)
        else:
            self.line(f"{', '.join(results)}{',' if len(results) == 1 else ''} = {call}", comment)


def _looked_at(step: Step) -> Iterable[str]:
    """What a step looks at the memory of."""
    match step:
        case Reuse(_, source) | MakeView(_, _, source):
            return (source,)
        case WriteOver(_, target):
            return (target,)
        case Launch(_, tensors):
            return tensors
        case CallLibrary(node):
            return refs((node.args, tuple(v for _, v in node.kwargs)))
    return ()


def _only_gpu(program: HostProgram) -> str:
    """The GPU that all kernels for GPUs run on, "" where there is none or more than one."""
    devices = {s.device for s, _ in program.every_step() if isinstance(s, Launch)} - {"cpu"}
    return devices.pop() if len(devices) == 1 else ""


def _items(places: Sequence[int]) -> str:
    """The arguments in these places, as a list."""
    by = places[1] - places[0] if len(places) > 1 else 1
    if all(b - a == by for a, b in pairwise(places)):
        end = places[-1] + by
        return f"args[{places[0]}:{end if end >= 0 else ''}:{by}]"
    return f"[args[k] for k in ({', '.join(map(str, places))})]"


def _index(device: str) -> str:
    """The index of a GPU."""
    return device.partition(":")[2] or "0"


def _rows(items: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    width = len(items) // count
    return [items[k * width : (k + 1) * width] for k in range(count)]
