"""The host program as LLVM IR: one C function that takes the list of arguments and returns the tuple of results.

It runs the resolved steps that ``python/text.py`` prints as Python: sizes are computed in registers, memory of kernels
lies in an arena (``plan_memory.py``), kernels are called by their addresses, on GPUs through the driver
(``native/launch.py``), ops of ATen's through torch's C interface (``native/shims.py``). A program with a GPU makes
that the current one and asks for torch's current stream once, at its begin. The interpreter's lock is released from
the first kernel or op on, and taken back for ops that have no such interface, which Python calls (*parts*), and at the
end. Where a step fails, Python does that step again (a *rescue*), so that errors are those of the Python program.

Arguments that are no plain tensors (subclasses, wrappers) are left alone: the function then returns NotImplemented, and
the Python program is to be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from ....ir.graph.graph import TensorType
from ...kernel import EmitError
from ..memory.plan_memory import ALIGN
from ..python.text import HostText, print_parts
from ..steps.kernel_use import Grid, KernelUse
from ..steps.program import HostProgram
from ..steps.resolved import DropArena, Forget, HoldArena, Let, LookAt, Pointer, PointTo, Rename, RunKernel, Take
from ..steps.step import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    HostStep,
    LimitMemory,
    MakeView,
    Return,
)
from .body import Body
from .calls import GATHER, Calls
from .frame import plan_frame
from .launch import CONTEXT_AT, MOST_POINTERS
from .shims import Shims
from .table import DIES, ELEMENT_SHIFT, IS_SIZE, IS_TENSOR, NOTHING, OBJECT, OPAQUE, SIZE, UNUSED

ENTRY = "mlc_host"
# Functions of torch's C interface, for CUDA and HIP alike (aoti_torch/c/shim.h).
MAKE_GUARD, DROP_GUARD = "aoti_torch_create_cuda_guard", "aoti_torch_delete_cuda_guard"
GET_STREAM = "aoti_torch_get_current_cuda_stream"
_GPU_STATE = ("guard", "stream")
# Words of a frame lie on the stack, of which a thread may have little.
MOST_WORDS = 1 << 16
# So does an arena that never has more bytes.
MOST_STACK = 64 << 10


@dataclass(frozen=True, slots=True)
class NativeHost:
    """``text`` is LLVM IR of the function ``ENTRY``. Behind the table's first ``OWN`` words it finds ``own``: addresses
    of kernels ("kernel", by variable), of what is known of them on the GPU of index ``gpu`` ("record"), of functions of
    torch's ("function"), functions of Python's, of the texts ``parts`` and ``rescues`` ("part", "rescue"), and where it
    tells which of its ``launches`` failed ("launch"): of those it has the lines of the model."""

    text: str
    own: tuple[tuple[str, str], ...]
    parts: HostText
    rescues: HostText
    gpu: int | None = None
    launches: tuple[str, ...] = ()


def emit_native(program: HostProgram, shims: Shims) -> NativeHost:
    """A resolved program for CPUs and at most one GPU. Raises EmitError where it has steps for another device, or sizes
    with no code here."""
    others = {*program.devices} - {"cpu"}
    if len(others) > 1:
        raise EmitError(f"{program.name}: native host programs are for one GPU, and this one uses {sorted(others)}")
    unknown = {d for d in others if d.partition(":")[0] not in shims.devices}
    if unknown:
        raise EmitError(f"{program.name}: native host programs cannot use {', '.join(unknown)} here")
    gpu = int(others.pop().partition(":")[2] or 0) if others else None
    return _Emitter(program, shims, plan_frame(program), Body(program.name), gpu=gpu).emit()


def python_launches(step: RunKernel) -> str:
    """Why Python launches a GPU kernel, "" where it does not."""
    use = step.use
    if use.grid is None:
        return ""
    if not use.by_pointer:
        return "copies tensors that lie where its tile descriptors cannot begin"
    if use.table:
        return "reads a table that is copied to the GPU where it changes"
    if len(step.pointers) > MOST_POINTERS:
        return f"takes more than {MOST_POINTERS} tensors"
    return ""


@dataclass(slots=True)
class _Emitter(Calls):
    """The steps in their order. ``gpu`` is the index of the GPU that they use."""

    gpu: int | None = None
    # The arguments as they are taken over, and the roots that are addresses in the arena.
    taken: Take = field(init=False)
    placed: set[str] = field(default_factory=set)
    arena: HoldArena | None = None

    def emit(self) -> NativeHost:
        self.place_all()
        steps = self.program.steps
        self.symbols = {s.name: s for step in steps for s in step.facts.symbols}
        self.used = frozenset(n for s in steps if not self.is_idle(s) for n in s.facts.reads) | self.symbols.keys()
        if self.words > MOST_WORDS:
            raise EmitError(f"{self.program.name}: {self.words} words are too many for a frame on the stack")
        for k, step in enumerate(steps):
            self.b.scratch = 0
            self.step(k, step)
        return self.done()

    def is_idle(self, step: HostStep) -> bool:
        """Whether a step binds a size that nothing computes with; the caller may have given None."""
        return isinstance(step, BindSize) and step.symbol not in self.symbols.values()

    def place_all(self) -> None:
        """Give every root its place in the frame. Arguments come first, in their order, whatever they are."""
        program = self.program
        self.slots = {name: k for k, name in enumerate(program.arguments)}
        self.objects = {name: k for k, name in enumerate(program.arguments)}
        self.slots[""] = len(self.slots)
        for step in program.steps:
            match step:
                case Allocate(name) | MakeView(name) | PointTo(name):
                    name = _again(name) if name in self.slots else name
                    self.slots[name] = len(self.slots)
                case CallLibrary(node, _, over) if not over:
                    for name, kind in zip(node.names, node.types, strict=True):
                        known = self.objects if kind is None else self.slots
                        known.setdefault(name, len(known))

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, at: int, step: HostStep) -> None:
        match step:
            case Take(names):
                self.taken = step
                for name in names:
                    self.bind(name, name)
            case LookAt() | Let():
                pass  # arguments are looked at where they are taken over, and sizes have registers
            case BindSize():
                self.bind_size(step)
            case HoldArena():
                self.hold_arena(step)
            case DropArena():
                if at <= self.frame.end and self.arena is not None and not _is_on_stack(self.arena):
                    self.drop("")
            case PointTo(name, base, offset):
                self.place(name, base, offset)
            case Allocate(name):
                self.bind(name, name)
                self.make(name, step)
            case Rename(name, Pointer(source), takes_over):
                if takes_over:
                    self.names[name] = self.names.pop(source)
                else:
                    self.bind(name, self.names[source])
            case RunKernel(use) if use.by_pointer and use.grid is None:
                self.launch(step)
            case RunKernel(KernelUse(grid=Grid() as grid)) if not python_launches(step):
                self.launch_on_gpu(step, grid)
            case CallLibrary(node, _, over):
                for result, made in zip(node.names, node.types, strict=True):
                    if made is not None:
                        self.bind(result, self.names[over] if over else result)
                self.call_or_choose(step)
            case RunKernel() | LimitMemory():
                self.python(step, ())
            case CheckLayout(name, kind, op):
                shape, strides = self.b.array(kind.shape), self.b.array(kind.strides)
                rank = len(kind.shape)
                slot = f"ptr %table, ptr {self.b.at('frame', self.slot(name))}"
                where = f"{slot}, i64 {rank}, ptr {shape}, ptr {strides}"
                bad = self.b.value(f"call i1 {self.b.function('mlc_layout')}({where})")
                if op:
                    dtype = self.shims.dtypes.get(kind.dtype.value, -1)  # none has that: Python looks at each
                    other = self.b.value(f"call i1 {self.b.function('mlc_dtype')}({slot}, i32 {dtype})")
                    bad = self.b.value(f"or i1 {bad}, {other}")
                self.rescued(bad, step, (name,))
            case MakeView(name, tracked=True):
                self.bind(name, name)
                self.python(step, (name,))
            case MakeView(name, kind, source, offset):
                if name in self.frame.tensors:
                    self.view(step, name, kind, source, offset)
                else:
                    self.place(name, source, offset * kind.dtype.itemsize)
            case Forget(pointers):
                for pointer in pointers:
                    self.free(pointer.name, at)
            case Return(values):
                self.finish(values)
            case _:
                raise EmitError(f"{self.program.name}: {type(step).__name__} has no native code")

    def bind_size(self, step: BindSize) -> None:
        if self.is_idle(step):
            return
        (source,) = step.facts.reads
        if step.dim is None:
            value = self.b.load("frame", self.object_word(source) + len(self.objects))
        else:
            function = "aoti_torch_get_strides" if step.stride else "aoti_torch_get_sizes"
            tensor = self.b.load("frame", self.slot(source), "ptr")
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

    def hold_arena(self, step: HoldArena) -> None:
        self.arena = step
        if _is_on_stack(step):
            self.b.store("frame", self.slot("") + 2, "%stack", "ptr")
        else:
            self.make("", Allocate("arena", step.type, not step.size.is_Integer))

    def place(self, name: str, source: str, offset: sympy.Expr) -> None:
        """Put an address so many bytes behind another, or behind the begin of the arena."""
        base_root = self.names.get(source, source)
        base = self.b.load("frame", self.slot(source) + 2)
        shift = self.b.size(offset)
        self.bind(name, name)
        if source:
            self.bases[name] = base_root
            self.shares[base_root] += 1
        else:
            self.placed.add(name)
        if shift != "0" or not source:
            base = self.b.value(f"add i64 {base}, {shift}")
        self.b.store("frame", self.slot(name) + 2, base)

    def view(self, step: MakeView, name: str, kind: TensorType, source: str, offset: sympy.Expr) -> None:
        source_slot = self.slot(source)
        self.bind(name, _again(name) if name == source else name)
        shift = self.b.size(offset)
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
            owned = root not in self.placed and root not in self.bases
            if owned and (root not in self.objects or root in self.frame.dying) and at < self.frame.end:
                self.drop(root)
            root = self.bases.get(root)

    def drop(self, root: str) -> None:
        slot = self.b.at("frame", 3 * self.slots[root])
        self.b.line(f"call void {self.b.function('mlc_drop')}(ptr %table, ptr {slot})")

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
        sizes = frozenset(name for s in binds for name in s.facts.reads)
        opaque = program.opaque
        kinds = [self.kind(name, sizes, opaque) for name in program.arguments]
        body, self.b.lines = self.b.lines, []
        self.b.lines.append(f"define ptr @{ENTRY}(ptr %self, ptr %list) {{")
        self.b.label("entry")
        self.b.line("%table = call ptr @PyLong_AsVoidPtr(ptr %self)")
        for name, size in (("frame", self.words), ("numbers", self.b.most_scratch), ("arguments", self.most_arguments)):
            self.b.line(f"%{name} = alloca [{max(size, 1)} x i64], align 16")
        for name in ("thread", "status", "results", *(_GPU_STATE if self.gpu is not None else ())):
            self.b.line(f"%{name} = alloca ptr")
        self.b.line("%launch = alloca i64")
        if self.arena is not None and _is_on_stack(self.arena):
            self.b.line(f"%stack = alloca [{self.arena.bound} x i8], align {ALIGN}")
        self.b.line("store ptr null, ptr %results")
        self.enter_gpu()
        self.b.line(f"call void @llvm.memset.p0.i64(ptr %frame, i8 0, i64 {8 * self.words}, i1 false)")
        rows = (self.b.constant("i8", kinds), self.b.constant("i64", self.least())) if kinds else ("null", "null")
        about = f"i64 {len(kinds)}, ptr {rows[0]}, ptr {rows[1]}"
        where = f"ptr %table, ptr %frame, ptr %list, {about}, i64 {3 * slots}, i64 {3 * slots + objects}"
        wrong = self.b.value(f"call i1 {self.b.function('mlc_enter')}({where})")
        self.b.line(f"br i1 {wrong}, label %refuse, label %start")
        self.b.label("refuse")
        self.leave_gpu()
        refused = self.b.function("NotImplemented")
        self.b.line(f"call void {self.b.function('Py_IncRef')}(ptr {refused})")
        self.b.line(f"ret ptr {refused}")
        self.b.label("start")
        self.b.lines += body
        self.b.label("outside")
        self.b.take_back()
        if self.launches:
            number = self.b.value("load i64, ptr %launch")
            self.b.line(f"store i64 {number}, ptr {self.b.own_word('launch', '')}")
        status = self.b.value("load ptr, ptr %status")
        self.b.line(f"call void {self.b.function('mlc_outside')}(ptr %table, ptr {status})")
        self.b.line("br label %fail")
        self.b.label("fail")
        self.b.line("br label %leave")
        self.b.label("leave")
        self.b.line(f"call void {self.b.function('mlc_leave')}(ptr %table, ptr %frame, i64 {slots}, i64 {objects})")
        self.leave_gpu()
        self.b.line(f"ret ptr {self.b.value('load ptr, ptr %results')}")
        self.b.lines.append("}")
        constants = [f"{name} = internal constant {text}" for text, name in self.b.constants.items()]
        text = "\n".join([*constants, *_PREAMBLE, *self.b.lines, ""])
        parts, rescues = print_parts(self.parts, self.taken.gpu), print_parts(self.rescues, self.taken.gpu)
        return NativeHost(text, tuple(self.b.own), parts, rescues, self.gpu, tuple(self.launches))

    def enter_gpu(self) -> None:
        """Make the GPU the current one, as long as a guard lives, and ask for the stream; else refuse. A guard does
        nothing for a GPU that a thread would use by itself, so one that launches sees that it has a context."""
        if self.gpu is None:
            return
        record = next((name for kind, name in self.b.own if kind == "record"), None)
        self.b.line("store ptr null, ptr %guard")
        for name, (make, result) in enumerate(((MAKE_GUARD, "guard"), (GET_STREAM, "stream"))):
            function = self.b.own_word("function", make)
            status = self.b.value(f"call i32 {function}(i32 {self.gpu}, ptr %{result})")
            fine = self.b.value(f"icmp eq i32 {status}, 0")
            self.b.line(f"br i1 {fine}, label %entered{name}, label %refuse")
            self.b.label(f"entered{name}")
        if record is not None:
            words = self.b.value(
                f"getelementptr inbounds i8, ptr {self.b.own_word('record', record)}, i64 {CONTEXT_AT}"
            )
            status = self.b.value(f"call i32 {self.b.function('mlc_context')}(ptr {words})")
            fine = self.b.value(f"icmp eq i32 {status}, 0")
            self.b.line(f"br i1 {fine}, label %with_context, label %refuse")
            self.b.label("with_context")

    def leave_gpu(self) -> None:
        """Make the GPU the current one that was before."""
        if self.gpu is not None:
            guard = self.b.value("load ptr, ptr %guard")
            self.b.line(f"call i32 {self.b.own_word('function', DROP_GUARD)}(ptr {guard})")

    def kind(self, name: str, sizes: frozenset[str], opaque: frozenset[str]) -> int:
        """What an argument is, for the function that takes arguments over."""
        if name not in self.used:
            return UNUSED  # whatever it is; torch gives None for some of them
        if name in self.program.inputs:
            shift = self.program.inputs[name].dtype.itemsize.bit_length() - 1
            if name in opaque:
                return IS_TENSOR | OPAQUE
            return IS_TENSOR | (DIES if name in self.frame.dying else 0) | shift << ELEMENT_SHIFT
        return IS_SIZE if name in sizes else 0

    def least(self) -> list[int]:
        """Bytes of memory that each argument has at least."""
        return [self.taken.least[n] if n in self.taken.least and n in self.used else 0 for n in self.program.arguments]


_PREAMBLE = (
    "declare ptr @PyLong_AsVoidPtr(ptr)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
    "declare i64 @llvm.smax.i64(i64, i64)",
    "declare i64 @llvm.smin.i64(i64, i64)",
    GATHER,
)


def _again(name: str) -> str:
    """The root of a view that takes the name of what it is a view of."""
    return f"{name}'"


def _is_on_stack(arena: HoldArena) -> bool:
    """Whether an arena is never larger than what each call may take of its thread's stack."""
    return arena.device == "cpu" and arena.bound is not None and arena.bound <= MOST_STACK
