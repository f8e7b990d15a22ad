"""The host program as LLVM IR: one C function that takes the list of arguments and returns the tuple of results.

It runs the steps that ``host_text.py`` prints as Python: sizes are computed in registers, memory of kernels lies in an
arena (``plan_memory.py``), kernels are called by their addresses, ops of ATen's through torch's C interface
(``host_shims.py``). The interpreter's lock is released from the first kernel or op on, and taken back for ops that have
no such interface, which Python calls (*parts*), and at the end. Where a step fails, Python does that step again (a
*rescue*), so that errors are those of the Python program.

Arguments that are no plain tensors (subclasses, wrappers) are left alone: the function then returns NotImplemented, and
the Python program is to be run.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from ..ir.dtypes import DType
from ..ir.graph import TensorType
from .host import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    Free,
    HostProgram,
    Launch,
    LimitMemory,
    MakeView,
    Return,
    Reuse,
    Step,
    WriteOver,
)
from .host_body import Body
from .host_frame import Frame, plan_frame, reads, sizes_in, step_sizes
from .host_shims import Array, Handle, Null, ShimCall, Shims, Word, shim_call
from .host_table import DIES, IS_SIZE, IS_TENSOR, NOTHING, OBJECT, SIZE, TENSOR, UNUSED
from .host_text import HostText, Part, print_parts
from .kernel import EmitError

ENTRY = "mlc_host"
# Words of a frame lie on the stack, of which a thread may have little.
MOST_WORDS = 1 << 16
# So many arguments of a kernel are written out; more are copied by a loop.
_WRITTEN_OUT = 12
# The words of numbers that a kernel tells of a wrong index in, behind its arguments.
_STATUS = 4


@dataclass(frozen=True, slots=True)
class NativeHost:
    """``text`` is LLVM IR of the function ``ENTRY``. Behind the table's first ``OWN`` words it finds ``own``: addresses
    of kernels ("kernel", by variable) and of functions of torch's ("function"), and functions of Python's, of the texts
    ``parts`` and ``rescues`` ("part", "rescue")."""

    text: str
    own: tuple[tuple[str, str], ...]
    parts: HostText
    rescues: HostText


def emit_native(program: HostProgram, shims: Shims) -> NativeHost:
    """The program for the CPU. Raises EmitError where it has steps for another device, or sizes with no code here."""
    others = {s.device for s in program.steps if isinstance(s, Launch)}
    others |= {s.type.device for s in program.steps if isinstance(s, Allocate)}
    others |= {kind.device for kind in program.inputs.values()}
    if others - {"cpu"}:
        raise EmitError(f"{program.name}: host programs are native on CPUs alone, and this one uses {sorted(others)}")
    return _Emitter(program, shims, plan_frame(program), Body(program.name)).emit()


@dataclass(slots=True)
class _Emitter:
    program: HostProgram
    shims: Shims
    frame: Frame
    b: Body
    parts: list[Part] = field(default_factory=list)
    rescues: list[Part] = field(default_factory=list)
    # Words of the frame: three for each slot, by root; then one for each object, by name.
    slots: dict[str, int] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)
    # Of views that are addresses alone, whose memory it is.
    bases: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, sympy.Symbol] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    # Arguments that only ops in Python see, and that need not be tensors.
    tokens: frozenset[str] = frozenset()
    most_arguments: int = 0

    def emit(self) -> NativeHost:
        self.place_all()
        program = self.program
        arena = program.arena
        self.symbols = {s.name: s for step in program.steps for s in step_sizes(step)}
        self.symbols |= {s.name: s for s in sizes_in((arena.size, *arena.offsets.values()) if arena else ())}
        idle = [s for s in program.steps if isinstance(s, BindSize) and s.symbol not in self.symbols.values()]
        self.used = frozenset(n for s in program.steps if s not in idle for n in reads(s)) | self.symbols.keys()
        self.tokens = self.find_tokens()
        if self.words > MOST_WORDS:
            raise EmitError(f"{program.name}: {self.words} words are too many for a frame on the stack")
        for name in program.arguments:
            self.bind(name, name)
        for k, step in enumerate(program.steps):
            self.b.scratch = 0
            if arena is not None and k == arena.begin:
                self.make("", Allocate("arena", _bytes(arena.size)))
            self.step(k, step)
            if arena is not None and k == arena.end < self.frame.end:
                self.drop("")
        return self.done()

    def place_all(self) -> None:
        """Give every root its place in the frame. Arguments come first, in their order, whatever they are."""
        program = self.program
        self.slots = {name: k for k, name in enumerate(program.arguments)}
        self.objects = {name: k for k, name in enumerate(program.arguments)}
        self.slots[""] = len(self.slots)
        for step in program.steps:
            match step:
                case Allocate(name) | MakeView(name):
                    name = _again(name) if name in self.slots else name
                    self.slots[name] = len(self.slots)
                case CallLibrary(node, _, over) if not over:
                    for name, kind in zip(node.names, node.types, strict=True):
                        known = self.objects if kind is None else self.slots
                        known.setdefault(name, len(known))

    def find_tokens(self) -> frozenset[str]:
        """Inputs without elements that put ops with effects in order: callers may give None for them."""
        found = {name for name, kind in self.program.inputs.items() if kind.numel == 0}
        for step in self.program.steps:
            if found and not (isinstance(step, CallLibrary) and step.node.target.startswith("hop::")):
                found -= {*reads(step)}
        return frozenset(found)

    # --- the frame --------------------------------------------------------------------------------------------------

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
        if name in self.names and is_tensor and name not in self.tokens:
            return TENSOR << 32 | self.slot(name)
        return OBJECT << 32 | self.object_word(name)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, at: int, step: Step) -> None:
        match step:
            case BindSize():
                self.bind_size(step)
            case Allocate(name, kind):
                self.allocate(name, kind, step)
            case Reuse(name, source):
                root = self.names.pop(source)
                self.names[name] = root
            case WriteOver(name, target):
                self.bind(name, self.names[target])
            case Launch(use) if use.by_pointer:
                self.launch(step)
            case CallLibrary(node, _, over):
                call = shim_call(node, self.shims)
                for result, made in zip(node.names, node.types, strict=True):
                    if made is not None:
                        self.bind(result, self.names[over] if over else result)
                if call is None or (over and not call.out):
                    self.python(step, node.names)
                else:
                    self.library(step, call)
            case Launch() | LimitMemory():
                self.python(step, ())
            case CheckLayout(name, kind):
                shape, strides = self.b.array(kind.shape), self.b.array(kind.strides)
                rank = len(kind.shape)
                where = f"ptr %table, ptr {self.b.at('frame', self.slot(name))}, i64 {rank}, ptr {shape}, ptr {strides}"
                bad = self.b.value(f"call i1 {self.b.function('mlc_layout')}({where})")
                self.rescued(bad, step, (name,))
            case MakeView(name, kind, source, offset):
                self.view(step, name, kind, source, offset)
            case Free(names):
                for name in names:
                    self.free(name, at)
            case Return(values):
                self.finish(values)

    def bind_size(self, step: BindSize) -> None:
        if step.symbol not in self.symbols.values():
            return  # Nothing is computed with it; the caller may have given None.
        if step.dim is None:
            value = self.b.load("frame", self.object_word(step.source) + len(self.objects))
        else:
            function = "aoti_torch_get_strides" if step.stride else "aoti_torch_get_sizes"
            tensor = self.b.load("frame", self.slot(step.source), "ptr")
            result = self.b.at("numbers", self.b.numbers(1))
            self.b.line(f"call i32 {self.b.function(function)}(ptr {tensor}, ptr {result})")
            row = self.b.value(f"load ptr, ptr {result}")
            where = self.b.value(f"getelementptr inbounds i64, ptr {row}, i64 {step.dim}")
            value = self.b.value(f"load i64, ptr {where}")
        if step.shift:
            value = self.b.value(f"sub i64 {value}, {step.shift}")
        if step.scale != 1:
            value = self.b.value(f"sdiv i64 {value}, {step.scale}")
        self.b.known[step.symbol] = value

    def allocate(self, name: str, kind: TensorType, step: Allocate) -> None:
        self.bind(name, name)
        arena = self.program.arena
        if arena is None or not self.is_in_arena(name):
            self.make(name, step)
            return
        base = self.b.load("frame", self.slot("") + 2)
        offset = self.b.size(arena.offsets[name])
        self.b.store("frame", self.slot(name) + 2, self.b.value(f"add i64 {base}, {offset}"))

    def make(self, root: str, step: Allocate) -> None:
        kind = step.type
        dtype = self.shims.dtypes.get(kind.dtype.value)
        if dtype is None:
            raise EmitError(f"{self.program.name}: torch's C interface has no {kind.dtype.value}")
        shape, strides = self.b.array(kind.shape), self.b.array(kind.strides)
        slot = self.b.at("frame", 3 * self.slots[root])
        rest = f"i32 {dtype}, i32 {self.shims.cpu}"
        where = f"ptr %table, ptr {slot}, i64 {len(kind.shape)}, ptr {shape}, ptr {strides}, {rest}"
        bad = self.b.value(f"call i1 {self.b.function('mlc_make')}({where})")
        self.rescued(bad, step, (step.name,), root)

    def view(self, step: MakeView, name: str, kind: TensorType, source: str, offset: sympy.Expr) -> None:
        source_slot = self.slot(source)
        base_root = self.names[source]
        self.bind(name, _again(name) if name == source else name)
        shift = self.b.size(offset)
        if name not in self.frame.tensors:
            self.bases[name] = base_root
            self.shares[base_root] += 1
            base = self.b.load("frame", source_slot + 2)
            if shift != "0":
                nbytes = self.b.value(f"mul i64 {shift}, {kind.dtype.itemsize}")
                base = self.b.value(f"add i64 {base}, {nbytes}")
            self.b.store("frame", self.slot(name) + 2, base)
            return
        shape, strides = self.b.array(kind.shape), self.b.array(kind.strides)
        slot, other = self.b.at("frame", self.slot(name)), self.b.at("frame", source_slot)
        where = f"ptr %table, ptr {slot}, ptr {other}, i64 {len(kind.shape)}, ptr {shape}, ptr {strides}, i64 {shift}"
        bad = self.b.value(f"call i1 {self.b.function('mlc_view')}({where})")
        self.rescued(bad, step, (name,))

    def free(self, name: str, at: int) -> None:
        root: str | None = self.names.pop(name, None)
        while root is not None:
            self.shares[root] -= 1
            if self.shares[root]:
                return
            owned = not self.is_in_arena(root) and root not in self.bases
            if owned and (root not in self.objects or root in self.frame.dying) and at < self.frame.end:
                self.drop(root)
            root = self.bases.get(root)

    def drop(self, root: str) -> None:
        slot = self.b.at("frame", 3 * self.slots[root])
        self.b.line(f"call void {self.b.function('mlc_drop')}(ptr %table, ptr {slot})")

    def is_in_arena(self, root: str) -> bool:
        return self.program.arena is not None and root in self.program.arena.offsets

    def launch(self, step: Launch) -> None:
        sizes = [self.b.size(s) for s in step.sizes]
        self.b.release()
        items: list[int | str] = []
        count = step.count if step.use.table else 1
        width, numbers = len(step.tensors) // count, len(sizes) // count
        words = [self.slot(t) + 2 for t in step.tensors]
        for row in range(count):
            items += words[row * width : (row + 1) * width]
            items += sizes[row * numbers : (row + 1) * numbers]
        if step.use.table:
            items.insert(0, str(step.count))
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
        self.b.line("br label %outside")
        self.b.label(f"fine{k}")

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

    # --- ops --------------------------------------------------------------------------------------------------------

    def library(self, step: CallLibrary, call: ShimCall) -> None:
        node = step.node
        if call.out and not step.over:
            kind = node.types[0]
            assert kind is not None
            self.make(node.names[0], Allocate(node.names[0], kind))
        given = [f"ptr {self.b.load('frame', self.slot(node.names[0]), 'ptr')}"] if call.out else []
        for argument in call.arguments:
            given += self.argument(argument)
        if not call.out:
            given += [f"ptr {self.b.at('frame', self.slot(n) + 1)}" for n in node.names]
        self.b.release()
        function = self.b.own_word("function", call.function)
        status = self.b.value(f"call i32 {function}({', '.join(given)})")
        bad = self.b.value(f"icmp ne i32 {status}, 0")
        if call.out:
            self.rescued(bad, step, node.names)
            return
        k = self.b.count
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

    # --- what Python does -------------------------------------------------------------------------------------------

    def python(self, step: Step, results: Sequence[str]) -> None:
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

    def rescued(self, bad: str, step: Step, results: Sequence[str], root: str | None = None) -> None:
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

    def call(self, kind: str, part: Part, root: str | None = None) -> str:
        """Call a function of Python's; true where it raised. The interpreter's lock is held. The one result goes to the
        slot of ``root``, where that is given."""
        given, wanted = [], []
        for name in part.arguments:
            if name in self.names or name in self.objects:
                given.append(self.code(name))
                continue
            word = self.b.numbers(1)
            self.b.store("numbers", word, self.b.known[self.symbols[name]])
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

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self, values: Sequence[Any]) -> None:
        codes = []
        for value in values:
            if value is None:
                codes.append(NOTHING << 32)
            elif isinstance(value, str):
                codes.append(self.code(value))
            elif isinstance(value, sympy.Symbol) and value.name in self.objects:
                codes.append(OBJECT << 32 | self.object_word(value.name))
            else:
                word = self.b.numbers(1)
                self.b.store("numbers", word, self.b.size(sympy.sympify(value)))
                codes.append(SIZE << 32 | word)
        self.b.acquire()
        row = self.b.constant("i64", codes) if codes else "null"
        where = f"ptr %table, ptr %frame, ptr %numbers, ptr {row}, i64 {len(codes)}"
        results = self.b.value(f"call ptr {self.b.function('mlc_results')}({where})")
        self.b.line(f"store ptr {results}, ptr %results")
        self.b.line("br label %leave")

    def done(self) -> NativeHost:
        program, slots, objects = self.program, len(self.slots), len(self.objects)
        wanted = frozenset(self.symbols.values())
        binds = [s for s in program.steps if isinstance(s, BindSize) and s.dim is None and s.symbol in wanted]
        sizes = frozenset(s.source for s in binds)
        kinds = [self.kind(name, sizes) for name in program.arguments]
        body, self.b.lines = self.b.lines, []
        self.b.lines.append(f"define ptr @{ENTRY}(ptr %self, ptr %list) {{")
        self.b.label("entry")
        self.b.line("%table = call ptr @PyLong_AsVoidPtr(ptr %self)")
        for name, size in (("frame", self.words), ("numbers", self.b.most_scratch), ("arguments", self.most_arguments)):
            self.b.line(f"%{name} = alloca [{max(size, 1)} x i64], align 16")
        for name in ("thread", "status", "results"):
            self.b.line(f"%{name} = alloca ptr")
        self.b.line("store ptr null, ptr %results")
        self.b.line(f"call void @llvm.memset.p0.i64(ptr %frame, i8 0, i64 {8 * self.words}, i1 false)")
        about = f"i64 {len(kinds)}, ptr {self.b.constant('i8', kinds) if kinds else 'null'}"
        where = f"ptr %table, ptr %frame, ptr %list, {about}, i64 {3 * slots}, i64 {3 * slots + objects}"
        wrong = self.b.value(f"call i1 {self.b.function('mlc_enter')}({where})")
        self.b.line(f"br i1 {wrong}, label %refuse, label %start")
        self.b.label("refuse")
        refused = self.b.function("NotImplemented")
        self.b.line(f"call void {self.b.function('Py_IncRef')}(ptr {refused})")
        self.b.line(f"ret ptr {refused}")
        self.b.label("start")
        self.b.lines += body
        self.b.label("outside")
        self.b.take_back()
        status = self.b.value("load ptr, ptr %status")
        self.b.line(f"call void {self.b.function('mlc_outside')}(ptr %table, ptr {status})")
        self.b.line("br label %fail")
        self.b.label("fail")
        self.b.line("br label %leave")
        self.b.label("leave")
        self.b.line(f"call void {self.b.function('mlc_leave')}(ptr %table, ptr %frame, i64 {slots}, i64 {objects})")
        self.b.line(f"ret ptr {self.b.value('load ptr, ptr %results')}")
        self.b.lines.append("}")
        constants = [f"{name} = internal constant {text}" for text, name in self.b.constants.items()]
        text = "\n".join([*constants, *_PREAMBLE, *self.b.lines, ""])
        return NativeHost(text, tuple(self.b.own), print_parts(program, self.parts), print_parts(program, self.rescues))

    def kind(self, name: str, sizes: frozenset[str]) -> int:
        """What an argument is, for the function that takes arguments over."""
        if name not in self.used:
            return UNUSED  # whatever it is; torch gives None for some of them
        if name in self.program.inputs and name not in self.tokens:
            return IS_TENSOR | (DIES if name in self.frame.dying else 0)
        return IS_SIZE if name in sizes else 0


_PREAMBLE = (
    "declare ptr @PyLong_AsVoidPtr(ptr)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
    "declare i64 @llvm.smax.i64(i64, i64)",
    "declare i64 @llvm.smin.i64(i64, i64)",
    # Words of a frame by their places, or values where the place is none.
    """define internal void @gather(ptr %to, ptr %from, ptr %places, ptr %values, i64 %count) {
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
}""",
)


def _part(name: str, step: Step, results: Sequence[str]) -> Part:
    """A step as a function of Python's."""
    given = tuple(dict.fromkeys(reads(step)))
    symbols = sorted({s.name for s in step_sizes(step)} - {*given})
    return Part(name, (*given, *symbols), (step,), tuple(results))


def _again(name: str) -> str:
    """The root of a view that takes the name of what it is a view of."""
    return f"{name}'"


def _bytes(size: sympy.Expr) -> TensorType:
    return TensorType((size,), (sympy.S.One,), DType.UINT8)


def _double(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
