"""How a native host program calls what it is made of: kernels by their addresses or through the driver of a GPU, ops of
ATen's through torch's C interface, and Python for the rest; and where in its frame the values are that it calls them
with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from ...kernel import EmitError
from ..memory.blocks import least_result, may_be_block
from ..memory.forms import step_forms
from ..python.text import HostFunction
from ..steps.kernel_use import Grid
from ..steps.program import HostProgram
from ..steps.resolved import Pointer, RunKernel
from ..steps.step import Allocate, CallLibrary, HostStep
from .body import Body
from .frame import Frame
from .shims import Array, Handle, Null, ShimCall, Shims, Word, shim_call
from .table import NOTHING, OBJECT, SIZE, TENSOR

# So many arguments of a kernel are written out; more are copied by a loop.
_WRITTEN_OUT = 12
# The words of numbers that a kernel tells of a wrong index in, behind its arguments.
_STATUS = 4


@dataclass(slots=True)
class Calls:
    """Where values are, and calls with them, as lines of the body ``b``.

    ``parts`` and ``rescues`` are steps that Python does, each time or where they fail; ``launches`` the lines of the
    model that kernels are from, of those that may tell of a wrong index.
    """

    program: HostProgram
    shims: Shims
    frame: Frame
    b: Body
    parts: list[HostFunction] = field(default_factory=list)
    rescues: list[HostFunction] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    # Words of the frame: three for each slot, by root; then one for each object, by name.
    slots: dict[str, int] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)
    # Of views that are addresses alone, whose memory it is.
    bases: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, sympy.Symbol] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    most_arguments: int = 0

    @property
    def words(self) -> int:
        return 3 * len(self.slots) + 2 * len(self.objects)

    def slot(self, name: str) -> int:
        """The first word of the slot of a tensor."""
        return 3 * self.slots[self.names.get(name, name)]

    def object_word(self, name: str) -> int:
        return 3 * len(self.slots) + self.objects[name]

    def bind(self, name: str, root: str) -> None:
        self.names[name] = root
        self.shares[root] = self.shares.get(root, 0) + 1

    def code(self, name: str) -> int:
        """How a value is handed to Python."""
        is_tensor = name in self.program.inputs or name not in self.objects
        if name in self.names and is_tensor:
            return TENSOR << 32 | self.slot(name)
        return OBJECT << 32 | self.object_word(name)

    def make(self, root: str, step: Allocate) -> None:
        kind = step.type
        dtype = self.shims.dtypes.get(kind.dtype.value)
        device, _, index = kind.device.partition(":")
        if dtype is None or device not in self.shims.devices:
            missing = kind.dtype.value if dtype is None else device
            raise EmitError(f"{self.program.name}: torch's C interface has no {missing}")
        shape, strides = self.b.array(kind.shape), self.b.array(kind.strides)
        slot = self.b.at("frame", 3 * self.slots[root])
        nbytes = self.b.size(kind.nbytes) if may_be_block(kind) else "0"
        rest = f"i32 {dtype}, i32 {self.shims.devices[device]}, i32 {index or 0}, i64 {nbytes}"
        where = f"ptr %table, ptr {slot}, i64 {len(kind.shape)}, ptr {shape}, ptr {strides}, {rest}"
        bad = self.b.value(f"call i1 {self.b.function('mlc_make')}({where})")
        self.rescued(bad, step, (step.name,), root)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def launch(self, step: RunKernel) -> None:
        items = self.items(step)
        self.b.release()
        self.arguments(items)
        end = len(items)
        self.most_arguments = max(self.most_arguments, end + _STATUS)
        status = self.b.at("arguments", end)
        self.b.line(f"store i64 0, ptr {status}")
        kernel = self.b.own_word("kernel", step.use.kernel)
        self.b.line(f"call void {kernel}(ptr %arguments)")
        told = self.b.value(f"load i64, ptr {status}")
        fine = self.b.value(f"icmp eq i64 {told}, 0")
        k = self.b.count
        self.b.line(f"br i1 {fine}, label %fine{k}, label %wrong{k}")
        self.b.label(f"wrong{k}")
        self.b.line(f"store ptr {status}, ptr %status")
        self.b.line(f"store i64 {len(self.launches)}, ptr %launch")
        self.launches.append(step.comment)
        self.b.line("br label %outside")
        self.b.label(f"fine{k}")

    def items(self, step: RunKernel) -> list[int | str]:
        """What a kernel takes: words of the frame, and values."""
        return [self.slot(a.name) + 2 if isinstance(a, Pointer) else self.b.size(a) for a in step.arguments]

    def arguments(self, items: Sequence[int | str]) -> None:
        """What a kernel is called with: words of the frame, and values."""
        late: list[tuple[int, str]] = []
        if len(items) <= _WRITTEN_OUT:
            late = [(k, self.b.load("frame", i) if isinstance(i, int) else i) for k, i in enumerate(items)]
        else:
            places = self.b.constant("i64", [i if isinstance(i, int) else -1 for i in items])
            numbers = [int(i) if isinstance(i, str) and not i.startswith("%") else 0 for i in items]
            values = self.b.constant("i64", numbers)
            rest = f"ptr %frame, ptr {places}, ptr {values}, i64 {len(items)}"
            self.b.line(f"call void @gather(ptr %arguments, {rest})")
            late = [(k, i) for k, i in enumerate(items) if isinstance(i, str) and i.startswith("%")]
        for k, value in late:
            self.b.store("arguments", k, value)

    def launch_on_gpu(self, step: RunKernel, grid: Grid) -> None:
        """Launch a kernel on the stream that torch's work goes to; where it cannot be, Python does, or raises."""
        extents = ", ".join(f"i64 {self.b.size(e)}" for e in grid.of(step.sizes))
        extents += f", i64 {self.b.size(grid.reach_of(step.sizes))}"
        items = self.items(step)
        self.b.release()
        self.arguments(items)
        self.most_arguments = max(self.most_arguments, len(items))
        record = self.b.own_word("record", step.use.kernel)
        stream = self.b.value("load ptr, ptr %stream")
        where = f"ptr {record}, ptr %arguments, {extents}, ptr {stream}"
        status = self.b.value(f"call i32 {self.b.function('mlc_launch')}({where})")
        self.rescued(self.b.value(f"icmp ne i32 {status}, 0"), step, ())

    # --- ops ----------------------------------------------------------------------------------------------------------

    def call_or_choose(self, step: CallLibrary) -> None:
        """A call of an op, or where it has two forms by a size, of one of two."""
        forms = step_forms(step)
        if forms is None:
            self.call_op(step)
            return
        self.b.acquire()  # both ends of the choice have the lock, as the beginning has
        k = self.b.count
        few = self.b.value(f"icmp slt i64 {self.b.size(forms.size)}, {forms.least}")
        self.b.line(f"br i1 {few}, label %fewer{k}, label %more{k}")
        known = dict(self.b.known)
        for label, form in (("fewer", forms.fewer), ("more", forms.more)):
            self.b.label(f"{label}{k}")
            self.call_op(form)
            self.b.acquire()
            self.b.line(f"br label %chosen{k}")
            self.b.known = dict(known)  # what one way computes is not there on the other
        self.b.label(f"chosen{k}")

    def call_op(self, step: CallLibrary) -> None:
        call = shim_call(step.node, self.shims)
        large = any(t.nbytes.is_Integer for t in step.blocks)
        if call is None or ((step.over or large) and not call.out):  # Python asks for blocks
            self.python(step, step.node.names)
        else:
            self.library(step, call)

    def library(self, step: CallLibrary, call: ShimCall) -> None:
        node = step.node
        if call.out and not step.over:
            kind = node.types[0]
            assert kind is not None
            self.make(node.names[0], Allocate(node.names[0], kind, bool(step.rounded)))
        given = [f"ptr {self.b.load('frame', self.slot(node.names[0]), 'ptr')}"] if call.out else []
        for argument in call.arguments:
            given += self.argument(argument)
        if not call.out:
            given += [f"ptr {self.b.at('frame', self.slot(n) + 1)}" for n in node.names]
        k = self.b.count
        if step.blocks and not call.out:  # Python asks for blocks
            large = self.is_large(step)
            self.b.release()
            self.b.line(f"br i1 {large}, label %failed{k}, label %small{k}")
            self.b.label(f"small{k}")
        self.b.release()
        function = self.b.own_word("function", call.function)
        status = self.b.value(f"call i32 {function}({', '.join(given)})")
        bad = self.b.value(f"icmp ne i32 {status}, 0")
        if call.out:
            self.rescued(bad, step, node.names)
            return
        self.b.line(f"br i1 {bad}, label %failed{k}, label %made{k}")
        self.b.label(f"made{k}")
        lost = "false"
        for name in node.names:
            handle = self.b.load("frame", self.slot(name) + 1, "ptr")
            self.b.store("frame", self.slot(name), handle, "ptr")
            where = self.b.at("frame", self.slot(name))
            one = self.b.value(f"call i1 {self.b.function('mlc_find')}(ptr %table, ptr {where})")
            lost = one if lost == "false" else self.b.value(f"or i1 {lost}, {one}")
        self.b.line(f"br label %joined{k}")
        self.b.label(f"failed{k}")
        for name in node.names:
            self.b.store("frame", self.slot(name) + 1, "null", "ptr")
        self.b.line(f"br label %joined{k}")
        self.b.label(f"joined{k}")
        both = self.b.value(f"phi i1 [ {lost}, %made{k} ], [ true, %failed{k} ]")
        self.rescued(both, step, node.names)

    def is_large(self, step: CallLibrary) -> str:
        """Whether one of an op's results is a block of the pool."""
        large, least = "", least_result(step.node.target)
        for nbytes in dict.fromkeys(t.nbytes for t in step.blocks):
            one = self.b.value(f"icmp sge i64 {self.b.size(nbytes)}, {least}")
            large = self.b.value(f"or i1 {large}, {one}") if large else one
        return large

    def argument(self, argument: Any) -> list[str]:
        """The parameters that an argument of a C function fills."""
        match argument:
            case Handle(name, behind):
                if behind:
                    return [f"ptr {self.b.at('frame', self.slot(name))}"]
                return [f"ptr {self.b.load('frame', self.slot(name), 'ptr')}"]
            case Null(length):
                return ["ptr null", "i64 0"] if length else ["ptr null"]
            case Word(kind, number, behind):
                value = _double(number) if isinstance(number, float) else self.b.size(number)
                if not behind:
                    return [f"{kind} {value}"]
                word = self.b.numbers(1)
                self.b.store("numbers", word, value, kind)
                return [f"ptr {self.b.at('numbers', word)}"]
            case Array(kind, values, behind):
                if kind == "ptr":
                    start = self.b.numbers(len(values))
                    for k, name in enumerate(values):
                        self.b.store("numbers", start + k, self.b.load("frame", self.slot(name), "ptr"), "ptr")
                    row = self.b.at("numbers", start)
                elif kind == "i32":
                    row = self.b.constant("i32", [int(v) for v in values])
                else:
                    row = self.b.array(values) if values else self.b.at("numbers", self.b.numbers(1))
                if behind:
                    word = self.b.numbers(1)
                    self.b.store("numbers", word, row, "ptr")
                    row = self.b.at("numbers", word)
                return [f"ptr {row}", f"i64 {len(values)}"]
        raise AssertionError(argument)

    # --- what Python does ---------------------------------------------------------------------------------------------

    def python(self, step: HostStep, results: Sequence[str]) -> None:
        """A step that Python does, each time."""
        self.b.acquire()
        part = _part(f"part_{len(self.parts)}", step, results)
        self.parts.append(part)
        k = self.b.count
        self.b.line(f"br i1 {self.call('part', part)}, label %fail, label %done{k}")
        self.b.label(f"done{k}")
        for name in results:
            if name in self.objects and name in self.symbols:
                self.b.known[self.symbols[name]] = self.b.load("frame", self.object_word(name) + len(self.objects))

    def rescued(self, bad: str, step: HostStep, results: Sequence[str], root: str | None = None) -> None:
        """Where ``bad``, let Python do the step again, or raise what it raises."""
        part = _part(f"rescue_{len(self.rescues)}", step, results)
        self.rescues.append(part)
        k = self.b.count
        self.b.line(f"br i1 {bad}, label %rescue{k}, label %go{k}")
        self.b.label(f"rescue{k}")
        if self.b.released:
            self.b.take_back()
        self.b.line(f"br i1 {self.call('rescue', part, root)}, label %fail, label %again{k}")
        self.b.label(f"again{k}")
        if self.b.released:
            self.b.let_go()
        self.b.line(f"br label %go{k}")
        self.b.label(f"go{k}")

    def call(self, kind: str, part: HostFunction, root: str | None = None) -> str:
        """Call a function of Python's; true where it raised. The interpreter's lock is held. The one result goes to the
        slot of ``root``, where that is given."""
        given, wanted = [], []
        for name in part.arguments:
            if name not in part.addresses and (name in self.names or name in self.objects):
                given.append(self.code(name))
                continue
            word = self.b.numbers(1)
            is_address = name in part.addresses
            value = self.b.load("frame", self.slot(name) + 2) if is_address else self.b.known[self.symbols[name]]
            self.b.store("numbers", word, value)
            given.append(SIZE << 32 | word)
        for name in part.results:
            if root is not None:
                wanted.append(TENSOR << 32 | 3 * self.slots[root])
            elif name in self.objects and name not in self.program.inputs:
                wanted.append(OBJECT << 32 | self.object_word(name))
            else:
                wanted.append(TENSOR << 32 | self.slot(name) if name in self.used else NOTHING << 32)
        codes = [f"ptr {self.b.constant('i64', c)}, i64 {len(c)}" if c else "ptr null, i64 0" for c in (given, wanted)]
        function = self.b.own_word(kind, part.name)
        rest = f"ptr %table, ptr {function}, ptr %frame, ptr %numbers, {', '.join(codes)}, i64 {len(self.objects)}"
        return self.b.value(f"call i1 {self.b.function('mlc_part')}({rest})")


# Words of a frame by their places, or values where the place is none.
GATHER = """define internal void @gather(ptr %to, ptr %from, ptr %places, ptr %values, i64 %count) {
entry:
  br label %loop
loop:
  %k = phi i64 [ 0, %entry ], [ %next, %store ]
  %place.at = getelementptr inbounds i64, ptr %places, i64 %k
  %place = load i64, ptr %place.at
  %value.at = getelementptr inbounds i64, ptr %values, i64 %k
  %none = icmp slt i64 %place, 0
  br i1 %none, label %store, label %word
word:
  %word.at = getelementptr inbounds i64, ptr %from, i64 %place
  br label %store
store:
  %source = phi ptr [ %value.at, %loop ], [ %word.at, %word ]
  %value = load i64, ptr %source
  %to.at = getelementptr inbounds i64, ptr %to, i64 %k
  store i64 %value, ptr %to.at
  %next = add nuw i64 %k, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %loop, label %done
done:
  ret void
}"""


def _part(name: str, step: HostStep, results: Sequence[str]) -> HostFunction:
    """A step as a function of Python's, which is given the addresses of what kernels take."""
    given = tuple(dict.fromkeys(step.facts.reads))
    symbols = sorted({s.name for s in step.facts.symbols} - {*given})
    addresses = frozenset(given) - {*step.facts.wants} if isinstance(step, RunKernel) else frozenset()
    if isinstance(step, RunKernel):
        step = step.at_addresses(addresses)
    return HostFunction(name, (*given, *symbols), step, tuple(results), addresses)


def _double(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
