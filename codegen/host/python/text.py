"""The host program as Python text, and what that text needs to run.

The text defines ``call(args)``. Names that end in an underscore are given by whoever runs it: ``empty_cpu_``,
``view_``, … (``runtime/host/executable.py``), the kernels ``k0_``, the ops ``aten_addmm_default_`` and the constants
``constant_0_``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....ir.graph.graph import CONSTANT, MADE_SIZE, GraphOutput
from ...kernel import EmitError
from ..memory.blocks import least_result
from ..memory.forms import step_forms
from ..steps.ops import nests, returns_sequence
from ..steps.program import HostProgram
from ..steps.resolve import each, every, with_sizes
from ..steps.resolved import DropArena, Forget, HoldArena, Let, LookAt, Pointer, PointTo, Rename, RunKernel, Take
from ..steps.step import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    HostStep,
    Item,
    LimitMemory,
    MakeView,
    Repeat,
    Return,
)
from .words import OP_IN_BLOCKS, OP_OBJECT, Words


@dataclass(frozen=True, slots=True)
class HostText:
    """``text`` and its free names: op targets and names of constants by variable."""

    text: str
    ops: Mapping[str, str]
    constants: Mapping[str, str]

    @property
    def called(self) -> dict[str, str]:
        """The ops that the text calls, as calls of libraries name them, by variable; not those that it passes on."""
        return {v: op.removeprefix(OP_IN_BLOCKS) for v, op in self.ops.items() if not op.startswith(OP_OBJECT)}


def print_host(program: HostProgram) -> HostText:
    """A resolved program as Python source."""
    return _Printer().run(program)


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A resolved step of a program as a function of its own: what it takes, names of tensors and sizes, and what it
    returns.

    Of what it takes, ``addresses`` are given as integers.
    """

    name: str
    arguments: tuple[str, ...]
    step: HostStep
    results: tuple[str, ...]
    addresses: frozenset[str] = frozenset()


def print_parts(parts: Sequence[HostFunction], gpu: str) -> HostText:
    """A Python function for each part; ``gpu`` is the one that is current, "" where none is."""
    printer = _Printer(guarded=gpu)
    for part in parts:
        printer.part(part)
    return printer.done()


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass(slots=True)
class _Printer(Words):
    # The variables of the arena and of its address.
    arena: tuple[str, str] = ("", "")

    def run(self, p: HostProgram) -> HostText:
        self.lines += [
            f"# {p.name}: {_many(p.launches, 'kernel')}, {_many(p.library_calls, 'library call')}; made by torch-mlc",
            "def call(args):",
        ]
        for step in p.steps:
            self.step(step)
        return self.done()

    def part(self, part: HostFunction) -> None:
        self.names, self.taken, self.hoisted, self.comment = {}, set(), {}, ""
        self.lines.append(f"def {part.name}({', '.join(self.name(a) for a in part.arguments)}):")
        for step in with_sizes((part.step,)):
            self.step(step)
        self.line(f"return {_row([self.name(r) for r in part.results])}")

    def done(self) -> HostText:
        text = "\n".join(self.lines) + "\n"
        return HostText(text, self.ops, {v: n for n, v in self.constants.items()})

    def step(self, step: HostStep) -> None:
        match step:
            case Take():
                self.take(step)
            case LookAt():
                self.look_at(step)
            case Let(name, value):
                self.hoisted[value] = name
                self.line(f"{name} = {self.expression(value)}")
            case HoldArena(type=kind):
                self.arena = self.name("arena "), self.name("arena at ")
                self.line(f"{self.arena[0]} = {self.empty(kind, rounded=not kind.nbytes.is_Integer)}")
                self.line(f"{self.arena[1]} = {self.arena[0]}.data_ptr()")
            case DropArena():
                self.line(f"del {self.arena[0]}")
            case PointTo(name, base, offset):
                text = self.size(offset)
                where = self.name(base) if base else self.arena[1]
                self.line(f"{self.name(name)} = {where}{'' if text == '0' else f' + {text}'}")
            case Rename(name, Pointer(source, is_address), takes_over):
                made, given = self.name(name), self.name(source)
                told = f"; del {given}  # takes over its memory" if takes_over else "  # written over"
                self.line(f"{made} = {given}{'' if is_address else told}")
            case BindSize():
                self.bind(step)
            case Allocate(name, kind, rounded):
                self.line(f"{self.name(name)} = {self.empty(kind, rounded)}")
            case RunKernel():
                self.launch(step)
            case CallLibrary():
                self.library(step)
            case CheckLayout(name, kind, op):
                variable = self.name(name)
                given = f"{variable}, {self.sizes(kind.shape)}, {self.sizes(kind.strides)}"
                call = f"checked_op_({given}, {kind.dtype.torch}, {op!r})" if op else f"checked_({given})"
                self.line(f"{variable} = {call}")
            case MakeView(name, kind, source, offset):
                where = f"{self.sizes(kind.shape)}, {self.sizes(kind.strides)}, {self.size(offset)}"
                make = "tracked_view_" if step.tracked else "view_"
                self.line(f"{self.name(name)} = {make}({self.name(source)}, {where})")
            case LimitMemory(peaks, limit, message):
                values = ", ".join(self.size(p) for p in peaks)
                peak = f"max({values})" if len(peaks) > 1 else values
                self.line(f"if {peak} > {limit}: over_limit_({peak}, {message!r})")
            case Forget(pointers):
                tensors = [self.name(p.name) for p in pointers if not p.is_address]
                if tensors:
                    self.line(f"del {', '.join(tensors)}")
            case Repeat():
                self.repeat(step)
            case Return(values):
                self.line(f"return {_row([self.value(v) for v in values])}")
            case _:
                raise EmitError(f"{type(step).__name__} is no step of a resolved program: {step}")

    # --- arguments --------------------------------------------------------------------------------------------------

    def take(self, step: Take) -> None:
        for name, places in step.lists.items():
            self.line(f"{self.name(name)} = {_items(places)}")
        names = [self.name(n) for n in step.names]
        comma = "," if len(names) == 1 else ""
        if names and step.places is None:
            self.line(f"{', '.join(names)}{comma} = args")
        elif names and step.places is not None:
            where = _row([str(k) for k in step.places])
            self.line(f"{', '.join(names)}{comma} = [args[k] for k in {where}]")
        self.line("args.clear()")
        self.guarded = step.gpu
        if step.gpu:
            self.line(f"with guard_({step.gpu.partition(':')[2] or '0'}):")
            self.indent += "    "

    def look_at(self, step: LookAt) -> None:
        """Ops take tensors that have no memory, as torch's fakes; kernels do not."""
        check = "with_memory_" if step.kernels else "with_storage_"
        tensors = [f"*{self.name(n)}" if n in step.lists else self.name(n) for n in step.least]
        nbytes = [f"*[{b}] * {step.lists[n]}" if n in step.lists else str(b) for n, b in step.least.items()]
        self.line(f"{check}({_row(tensors)}, {_row(nbytes)})")

    def bind(self, step: BindSize) -> None:
        source = self.value(step.source)
        if step.dim is not None:
            source = f"{source}.{'stride' if step.stride else 'size'}({step.dim})"
        if step.shift:
            source = f"({source} - {step.shift})"
        if step.scale != 1:
            source = f"{source} // {step.scale}"
        target = self.name(step.symbol.name)
        if target != source:
            self.line(f"{target} = {source}")

    def value(self, value: GraphOutput | Item) -> str:
        match value:
            case str():
                return self.name(value)
            case Item(name, position):
                return f"{self.name(name)}[{position}]"
        return self.literal(value)

    # --- steps that repeat ------------------------------------------------------------------------------------------

    def repeat(self, step: Repeat) -> None:
        for _, following, initial in reversed(step.carried):
            self.line(f"{self.name(following)} = {self.name(initial)}")
        for name in step.kept:
            self.line(f"{self.name(every(name))} = []")
        self.line(f"for _ in range({step.times}):  # layers that are alike")
        outside, self.indent = self.indent, f"{self.indent}    "
        for name, following, _ in step.carried:
            self.line(f"{self.name(name)} = {self.name(following)}")
        begun = {*step.taken, *(name for name, _, _ in step.carried)}
        handed = [self.name(following) for _, following, _ in step.carried if following not in begun]
        if handed:
            self.line(f"del {', '.join(handed)}")
        for name in step.taken:
            self.line(f"{self.name(name)} = {self.name(each(name))}.pop()")
        for one in step.steps:
            self.step(one)
        for name in step.kept:
            self.line(f"{self.name(every(name))}.append({self.name(name)})")
        self.indent, self.comment = outside, ""

    # --- calls ------------------------------------------------------------------------------------------------------

    def pointer(self, pointer: Pointer) -> str:
        known = self.name(pointer.name)
        return known if pointer.is_address else f"{known}.data_ptr()"

    def launch(self, step: RunKernel) -> None:
        if step.use.by_pointer:
            args = [self.pointer(a) if isinstance(a, Pointer) else self.size(a) for a in step.arguments]
        else:
            (row,) = step.rows
            args = [_row([self.name(p.name) for p in row.pointers]), self.sizes(row.sizes)]
            if step.use.table:
                args.insert(0, str(step.count))
        if step.gpu:
            args.insert(0, step.gpu)
        call = f"{step.use.kernel}({', '.join(args)})"
        if step.guard:
            call = f"with guard_({step.guard}): {call}"
        self.line(call, step.comment)

    def library(self, step: CallLibrary) -> None:
        if (forms := step_forms(step)) is not None:
            self.line(f"if {self.size(forms.size)} < {forms.least}:", step.comment)
            outside, self.indent = self.indent, f"{self.indent}    "
            self.library(forms.fewer)
            self.indent = outside
            self.line("else:")
            self.indent = f"{outside}    "
            self.library(forms.more)
            self.indent = outside
            return
        node, comment, over = step.node, step.comment, step.over
        results = [self.name(n) for n in node.names]
        args = [self.literal(a) for a in node.args] + [f"{k}={self.literal(v)}" for k, v in node.kwargs]
        if over:
            args.append(f"out={self.name(over)}")
        if node.target == CONSTANT:
            self.line(f"{results[0]} = {self.constant(node.args[0])}", comment)
            return
        if node.target == MADE_SIZE:
            self.line(f"{results[0]} = {args[0]}", comment)
            return
        if node.target == "mlc::seeds":
            self.line(f"{results[0]} = seeds_({', '.join(args)})", comment)
            return
        calls = [f"{self.op(node.target)}({', '.join(args)})"]
        if step.blocks:
            calls = self.in_blocks(step, args, calls[0])
        for call in calls:
            if call.endswith(":"):
                self.line(call, comment)
                continue
            inside = "    " if len(calls) > 1 else ""
            call = f"flat_({call})" if nests(node.target) else call
            if not results:
                made = call
            elif len(results) == 1 and not returns_sequence(node.target):
                made = f"{results[0]} = {call}"
            else:
                made = f"{', '.join(results)}{',' if len(results) == 1 else ''} = {call}"
            self.line(inside + made, comment)

    def in_blocks(self, step: CallLibrary, args: Sequence[str], small: str) -> list[str]:
        """The call of an op whose results lie in blocks; where none of them may be large, a choice between that and the
        ``small`` call."""
        made = zip(step.node.names, step.node.types, strict=True)
        layouts = [
            f"({self.sizes(t.shape)}, {self.sizes(t.strides)}, torch.{t.dtype.value}, {n in step.rounded})"
            for n, t in made
            if t is not None
        ]
        call = f"{self.op_in_blocks(step.node.target)}({', '.join((*args, f'blocks={_row(layouts)}'))})"
        if any(t.nbytes.is_Integer for t in step.blocks):
            return [call]
        least = least_result(step.node.target)
        large = " or ".join(dict.fromkeys(f"{self.size(t.nbytes)} >= {least}" for t in step.blocks))
        return [f"if {large}:", call, "else:", small]


def _row(items: Sequence[str]) -> str:
    """A tuple."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _items(places: Sequence[int]) -> str:
    """The arguments in these places, as a list."""
    by = places[1] - places[0] if len(places) > 1 else 1
    if all(b - a == by for a, b in pairwise(places)):
        end = places[-1] + by
        return f"args[{places[0]}:{end if end >= 0 else ''}:{by}]"
    return f"[args[k] for k in ({', '.join(map(str, places))})]"
