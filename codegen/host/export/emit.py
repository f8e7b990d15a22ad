"""The host program as a function of a library, in LLVM IR, which knows neither Python nor torch.

It is the third printing of the resolved steps, in which every name is an address: of the caller's inputs and results,
of weights, or of a place in the arena that the caller brings. Views add to an address, and kernels are called by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
from torch.utils._sympy.functions import Max

from ....ir.expr.value import symbol
from ....ir.graph.graph import MADE_SIZE, TensorType
from ...export.codes import COPY, DRAWS, product_symbol
from ...kernel import EmitError
from ..code import SizedCode
from ..memory.liveness import storage_bytes
from ..memory.plan_memory import check_arena, place_all
from ..steps.lines import ALL, with_lines
from ..steps.program import HostProgram
from ..steps.resolve import resolve
from ..steps.resolved import DropArena, Forget, HoldArena, Let, LookAt, Pointer, PointTo, Rename, RunKernel, Take
from ..steps.step import BindSize, CallLibrary, HostStep, MakeView, Return
from ..steps.write_out_loops import write_out_loops
from .control import NO_BODIES, Branch, InnerCall, InnerFunction, Turn, write_control
from .draws import DrawSeeds, write_draws
from .multiply import Multiply, write_products
from .results import CopyOver, CopyResult, TakeResult, place_results, row_major, write_copies

# The words of numbers that a kernel tells of a wrong index in, behind its arguments.
_STATUS = 4
# Parameters of the function.
PARAMETERS = ("inputs", "results", "weights", "sizes", "arena", "status")
_COMPARED = {sympy.Eq: "eq", sympy.Ne: "ne", sympy.Lt: "slt", sympy.Le: "sle", sympy.Gt: "sgt", sympy.Ge: "sge"}


@dataclass(frozen=True, slots=True)
class ExportedHost:
    """``text`` is LLVM IR of the function ``entry``, which calls ``kernels`` and needs ``arena`` bytes of scratch.

    ``launches`` are the lines of the model that each launch is from, by the number that the status tells.
    """

    entry: str
    text: str
    arena: sympy.Expr
    kernels: tuple[str, ...]
    launches: tuple[str, ...]


def plan_export(
    program: HostProgram,
    types: Mapping[str, TensorType],
    results: Sequence[TensorType],
    bodies: Mapping[str, InnerFunction] = NO_BODIES,
    strides: Sequence[tuple[sympy.Expr, ...]] | None = None,
) -> HostProgram:
    """The program with its ``results``, of these types, in the caller's memory and all else in the arena, resolved.
    ``types`` are those of all its tensors, ``bodies`` what its control flow calls, by the names that its graph has for
    them, and ``strides`` those of the caller's memory where that is not row-major.

    Raises EmitError and ArenaError for what has no place in either.
    """
    program = write_draws(write_products(write_copies(program, types), types), types)
    program = write_out_loops(write_control(program, types, bodies))
    program = place_all(place_results(program, results, strides))
    check_arena(program)
    return replace(resolve(program), arena=program.arena)


def emit_export(
    program: HostProgram,
    entry: str,
    *,
    inputs: Sequence[str],
    weights: Mapping[str, int],
    sizes: Sequence[sympy.Symbol],
    scratch: Mapping[str, sympy.Expr] | None = None,
) -> ExportedHost:
    """The function ``entry`` of a program that ``plan_export`` has planned::

        i32 @entry(ptr %inputs, ptr %results, ptr %weights, ptr %sizes, ptr %arena, ptr %status)

    ``inputs`` are the program's arguments in the order of the array, ``weights`` the places of the others in theirs,
    and ``sizes`` the symbols for which the array has the dimensions that they are read off. Kernels are functions of
    the names under which the program has them. Those of ``scratch`` take an address behind their sizes, of so many
    bytes that nobody else has while they run. On a GPU copies are calls of a kernel too (``COPY``).
    Raises EmitError for steps that only a process of Python's can do.
    """
    places = {name: ("inputs", k) for k, name in enumerate(inputs)}
    places |= {name: ("weights", k) for name, k in weights.items()}
    emitter = _LibraryEmitter(SizedCode(program.name), program, places, tuple(sizes), scratch or {})
    host = emitter.emit(entry, "hidden")
    texts = (_declarations(host.kernels), *(inner.text for inner in emitter.inner.values()), host.text)
    return replace(host, text="\n".join(texts))


@dataclass(slots=True)
class _LibraryEmitter:
    """The steps in their order, as lines of ``b``. ``at`` has the registers of addresses; ``wrong`` is from where
    the common end of failed launches is reached, with the number of each and where its kernel told what."""

    b: SizedCode
    program: HostProgram
    places: Mapping[str, tuple[str, int]]
    sizes: tuple[sympy.Symbol, ...]
    scratch: Mapping[str, sympy.Expr]
    at: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, None] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    most_arguments: int = 0
    block: str = "begin"
    # Bodies of control flow that have been printed, by identity.
    inner: dict[int, ExportedHost] = field(default_factory=dict)
    entry: str = ""

    def emit(self, entry: str, linkage: str) -> ExportedHost:
        self.entry = self.entry or entry
        for step in self.program.steps:
            self.step(step)
        arena = self.program.arena
        size = sympy.S.Zero if arena is None else arena.size
        if wanted := [self.scratch[k] for k in self.kernels if k in self.scratch]:
            size += Max(*wanted)
        return ExportedHost(entry, self.text(entry, linkage), size, tuple(self.kernels), tuple(self.launches))

    def step(self, step: HostStep) -> None:
        match step:
            case Take() | LookAt() | Let() | HoldArena() | DropArena():
                pass  # inputs are looked at before the call, sizes have registers, and the arena is the caller's
            case BindSize():
                self.bind(step)
            case TakeResult(name, _, position):
                self.at[name] = self.b.load("results", position, "ptr")
            case PointTo(name, base, offset):
                self.at[name] = self.moved(self.address(base) if base else "%arena", offset)
            case MakeView(name, kind, source, offset):
                self.at[name] = self.moved(self.address(source), offset * kind.dtype.itemsize)
            case Rename(name, Pointer(source)):
                self.at[name] = self.address(source)
            case RunKernel(use) if use.by_pointer and use.grid is None:
                self.launch(step)
            case CopyResult(source, kind, position, strides):
                target = self.b.load("results", position, "ptr")
                self.copy(target, strides, self.address(source), kind)
            case CopyOver(name, target, source, kind, given):
                self.at[name] = self.address(target)
                self.copy(self.at[name], kind.strides, self.address(source), given)
            case CallLibrary(node) if node.target == MADE_SIZE:
                self.b.known[symbol(node.names[0])] = self.b.size(node.args[0])
            case Multiply(a, b, target):
                taken = [self.address(n) for n in (a, b, target)] + [self.b.size(n) for n in step.numbers]
                passed = ["ptr"] * 3 + ["i64"] * len(step.numbers)
                self.run(product_symbol(step.function), taken, passed, step.comment)
            case DrawSeeds(name, count, comment):
                self.run(DRAWS, [self.address(name), str(count)], ["ptr", "i64"], comment)
            case Branch():
                self.branch(step)
            case Turn():
                self.turn(step)
            case Forget():
                pass
            case Return(()):
                self.b.line("ret i32 0")
            case CallLibrary(node):
                raise EmitError(f"{self.program.name}: a library has no {node.target}")
            case _:
                raise EmitError(f"{self.program.name}: {type(step).__name__} is nothing that a library can do")

    def bind(self, step: BindSize) -> None:
        """The size of a symbol, of the dimension that is read for it."""
        if step.symbol not in self.sizes:
            raise EmitError(f"{self.program.name}: no input has the size {step.symbol}")
        value = self.b.load("sizes", self.sizes.index(step.symbol))
        if step.shift:
            value = self.b.value(f"sub i64 {value}, {step.shift}")
        if step.scale != 1:
            value = self.b.value(f"sdiv i64 {value}, {step.scale}")
        self.b.known[step.symbol] = value

    def address(self, name: str) -> str:
        if name not in self.at:
            array, k = self.places[name]
            self.at[name] = self.b.load(array, k, "ptr")
        return self.at[name]

    def moved(self, base: str, nbytes: sympy.Expr) -> str:
        shift = self.b.size(nbytes)
        return base if shift == "0" else self.b.value(f"getelementptr inbounds i8, ptr {base}, i64 {shift}")

    def label(self, name: str) -> None:
        self.b.label(name)
        self.block = name

    # --- kernels ------------------------------------------------------------------------------------------------------

    def launch(self, step: RunKernel) -> None:
        name = step.use.kernel
        arguments = [self.address(a.name) if isinstance(a, Pointer) else self.b.size(a) for a in step.arguments]
        kinds = ["ptr" if isinstance(a, Pointer) else "i64" for a in step.arguments]
        if name in self.scratch:
            arena = self.program.arena
            arguments.append(self.moved("%arena", sympy.S.Zero if arena is None else arena.size))
            kinds.append("ptr")
        self.run(name, arguments, kinds, step.comment)

    def run(self, name: str, arguments: Sequence[str], kinds: Sequence[str], comment: str) -> None:
        """Call a kernel, or what is called as one, and go on where that tells of nothing wrong."""
        self.kernels[name] = None
        count = len(arguments)
        self.put(0, arguments, kinds, _STATUS)
        status = self.b.at("arguments", count)
        self.b.line(f"store i64 0, ptr {status}")
        self.b.line(f"call void @{name}(ptr %arguments)")
        told = self.b.value(f"load i64, ptr {status}")
        fine = self.b.value(f"icmp eq i64 {told}, 0")
        number = len(self.launches)
        self.launches.append(comment)
        self.wrong.append((self.block, status))
        self.b.line(f"br i1 {fine}, label %launched{number}, label %wrong")
        self.label(f"launched{number}")

    def put(self, first: int, values: Sequence[str], kinds: Sequence[str], more: int = 0) -> str:
        """Where the array of arguments has values, from a word on, with so many words behind them."""
        for k, (value, kind) in enumerate(zip(values, kinds, strict=True)):
            self.b.store("arguments", first + k, value, kind)
        self.most_arguments = max(self.most_arguments, first + len(values) + more)
        return self.b.at("arguments", first)

    def failed(self) -> None:
        """What the kernel told goes to the caller, with the number of the launch."""
        if not self.wrong:
            return
        self.label("wrong")
        numbers = ", ".join(f"[ {k}, %{block} ]" for k, (block, _) in enumerate(self.wrong))
        words = ", ".join(f"[ {status}, %{block} ]" for block, status in self.wrong)
        number, told = self.b.value(f"phi i64 {numbers}"), self.b.value(f"phi ptr {words}")
        for k in range(_STATUS):
            word = self.b.value(f"load i64, ptr {self.b.value(f'getelementptr inbounds i64, ptr {told}, i64 {k}')}")
            self.b.store("status", k, word)
        self.b.store("status", _STATUS, number)
        self.b.line("ret i32 1")

    # --- control flow -------------------------------------------------------------------------------------------------

    def branch(self, step: Branch) -> None:
        """One call or the other, each in a block of its own. What both are given is computed before."""
        holds = self.holds(step)
        arrays, place = [], 0
        results = self.put(0, [self.address(n) for n in step.results], ["ptr"] * len(step.results))
        place += len(step.results)
        for call in step.calls:
            arrays.append((*self.given(place, call), results))
            place += len(call.tensors) + len(call.sizes)
        scratch, name = self.scratch_of(step.scratch), f"branch{self.b.count}"
        self.b.line(f"br i1 {holds}, label %{name}.first, label %{name}.second")
        for call, array, block in zip(step.calls, arrays, ("first", "second"), strict=True):
            self.label(f"{name}.{block}")
            self.call(call, *array, scratch)
            self.b.line(f"br label %{name}.done")
        self.label(f"{name}.done")

    def turn(self, step: Turn) -> None:
        """Calls that read one array of addresses and write to the other, which change places after each."""
        count, words = len(step.values), len(step.condition.tensors)
        read, scratch = [self.address(n) for n in step.condition.tensors[count:]], self.scratch_of(step.scratch)
        ends = [[self.address(n) for n in names] for names in (step.values, step.others)]
        both = [self.put(k * words, [*end, *read], ["ptr"] * words) for k, end in enumerate(ends)]
        flag_at = self.address(step.flag)
        flag = self.put(2 * words, [flag_at], ["ptr"])
        place, sizes = 2 * words + 1, []
        for call in (step.condition, step.body):
            sizes.append(self.put(place, [self.b.size(n) for n in call.sizes], ["i64"] * len(call.sizes)))
            place += len(call.sizes)
        nbytes = [self.b.size(storage_bytes(t)) for t in step.types]
        name, before = f"loop{self.b.count}", self.block
        self.b.line(f"br label %{name}")
        self.label(name)
        self.b.line(f"%{name}.odd = phi i1 [ false, %{before} ], [ %{name}.next, %{name}.turned ]")
        given = self.b.value(f"select i1 %{name}.odd, ptr {both[1]}, ptr {both[0]}")
        self.call(step.condition, given, sizes[0], flag, scratch)
        told = self.b.value(f"load i8, ptr {flag_at}")
        self.b.line(f"br i1 {self.b.value(f'icmp ne i8 {told}, 0')}, label %{name}.more, label %{name}.ended")
        self.label(f"{name}.more")
        made = self.b.value(f"select i1 %{name}.odd, ptr {both[0]}, ptr {both[1]}")
        self.call(step.body, given, sizes[1], made, scratch)
        self.b.line(f"br label %{name}.turned")
        self.label(f"{name}.turned")
        self.b.line(f"%{name}.next = xor i1 %{name}.odd, true")
        self.b.line(f"br label %{name}")
        self.label(f"{name}.ended")
        self.b.line(f"br i1 %{name}.odd, label %{name}.behind, label %{name}.done")
        self.label(f"{name}.behind")
        for target, source, size in zip(*ends, nbytes, strict=True):
            self.b.line(f"call void @llvm.memmove.p0.p0.i64(ptr {target}, ptr {source}, i64 {size}, i1 false)")
        self.b.line(f"br label %{name}.done")
        self.label(f"{name}.done")

    def given(self, place: int, call: InnerCall) -> tuple[str, str]:
        """The arrays of tensors and of sizes of a call, from a word on."""
        tensors = self.put(place, [self.address(n) for n in call.tensors], ["ptr"] * len(call.tensors))
        sizes = [self.b.size(n) for n in call.sizes]
        return tensors, self.put(place + len(call.tensors), sizes, ["i64"] * len(sizes))

    def scratch_of(self, name: str) -> str:
        return self.address(name) if name else "null"

    def call(self, call: InnerCall, tensors: str, sizes: str, results: str, scratch: str) -> None:
        """Call a body, and go on where that tells of nothing wrong. Its launches count behind those of its caller."""
        host, first = self.body(call.function), len(self.launches)
        self.launches += [with_lines(line, call.function.lines, ALL) for line in host.launches]
        self.kernels |= dict.fromkeys(host.kernels)
        given = f"ptr {tensors}, ptr {results}, ptr null, ptr {sizes}, ptr {scratch}, ptr %status"
        told = self.b.value(f"call i32 @{host.entry}({given})")
        name = f"called{self.b.count}"
        self.b.line(f"br i1 {self.b.value(f'icmp eq i32 {told}, 0')}, label %{name}, label %{name}.wrong")
        self.label(f"{name}.wrong")
        number = self.b.load("status", _STATUS)
        self.b.store("status", _STATUS, self.b.value(f"add i64 {number}, {first}"))
        self.b.line("ret i32 1")
        self.label(name)

    def body(self, function: InnerFunction) -> ExportedHost:
        """A body, which is printed once."""
        if id(function) not in self.inner:
            places = {name: ("inputs", k) for k, name in enumerate(function.inputs)}
            sizes = tuple(b.symbol for b in function.bindings)
            emitter = _LibraryEmitter(
                SizedCode(function.program.name), function.program, places, sizes, {}, inner=self.inner,
                entry=self.entry,
            )  # fmt: skip
            entry = f"{self.entry}.{len(self.inner)}"
            self.inner[id(function)] = ExportedHost(entry, "", sympy.S.Zero, (), ())  # what it calls has other numbers
            self.inner[id(function)] = emitter.emit(entry, "internal")
        return self.inner[id(function)]

    def holds(self, step: Branch) -> str:
        """Whether the condition of a branch does."""
        if not isinstance(step.condition, str):
            return self.truth(step.condition)
        item = f"i{8 * step.kind.itemsize}"
        bits = self.b.value(f"load {item}, ptr {self.address(step.condition)}, align 1")
        if step.kind.is_float:  # zero has a sign
            bits = self.b.value(f"shl {item} {bits}, 1")
        return self.b.value(f"icmp ne {item} {bits}, 0")

    def truth(self, condition: sympy.Basic) -> str:
        """A comparison of sizes."""
        match condition:
            case sympy.logic.boolalg.BooleanTrue() | sympy.logic.boolalg.BooleanFalse():
                return "true" if condition else "false"
            case sympy.Not(args=(other,)):
                return self.b.value(f"xor i1 {self.truth(other)}, true")
            case sympy.And() | sympy.Or():
                first, *others = map(self.truth, condition.args)
                op = "and" if isinstance(condition, sympy.And) else "or"
                for other in others:
                    first = self.b.value(f"{op} i1 {first}, {other}")
                return first
        if type(condition) not in _COMPARED:
            raise EmitError(f"{self.program.name}: no native code for the condition {condition}")
        a, b = (self.b.size(n) for n in condition.args)
        return self.b.value(f"icmp {_COMPARED[type(condition)]} i64 {a}, {b}")

    # --- copies -------------------------------------------------------------------------------------------------------

    def copy(self, target: str, wanted: Sequence[sympy.Expr], source: str, kind: TensorType) -> None:
        """Element by element, in the order of dimensions; at once where both are row-major."""
        rows = row_major(kind.shape)
        if all(
            n == 1 or (_is(s, r) and _is(w, r))
            for n, s, w, r in zip(kind.shape, kind.strides, wanted, rows, strict=True)
        ):
            nbytes = self.b.size(kind.nbytes)
            if kind.device != "cpu":
                self.run(COPY, [target, source, nbytes], ["ptr", "ptr", "i64"], "")
                return
            self.b.line(f"call void @llvm.memmove.p0.p0.i64(ptr {target}, ptr {source}, i64 {nbytes}, i1 false)")
            return
        if kind.device != "cpu":
            raise EmitError(
                f"{self.program.name}: a copy between tensors of {list(kind.shape)} that are laid out differently is "
                "no copy of bytes, and the host of a GPU copies nothing else"
            )
        item, depth = f"i{8 * kind.dtype.itemsize}", len(kind.shape)
        extents, strides = [self.b.size(n) for n in kind.shape], [self.b.size(s) for s in kind.strides]
        places = [self.b.size(s) for s in wanted]
        name = f"copy{self.b.count}"
        self.b.line(f"br label %{name}.0")
        indices: list[str] = []
        for d in range(depth):
            outer = self.block if d == 0 else f"{name}.{d - 1}.in"
            self.label(f"{name}.{d}")
            indices.append(f"%{name}.i{d}")
            self.b.line(f"{indices[d]} = phi i64 [ 0, %{outer} ], [ %{name}.next{d}, %{name}.{d}.end ]")
            more = self.b.value(f"icmp slt i64 {indices[d]}, {extents[d]}")
            beyond = f"{name}.{d - 1}.end" if d else f"{name}.done"
            self.b.line(f"br i1 {more}, label %{name}.{d}.in, label %{beyond}")
            self.label(f"{name}.{d}.in")
            if d + 1 < depth:
                self.b.line(f"br label %{name}.{d + 1}")
        read, written = (self.element(item, base, by, indices) for base, by in ((source, strides), (target, places)))
        value = self.b.value(f"load {item}, ptr {read}, align 1")
        self.b.line(f"store {item} {value}, ptr {written}, align 1")
        self.b.line(f"br label %{name}.{depth - 1}.end")
        for d in reversed(range(depth)):
            self.label(f"{name}.{d}.end")
            self.b.line(f"%{name}.next{d} = add nuw nsw i64 {indices[d]}, 1")
            self.b.line(f"br label %{name}.{d}")
        self.label(f"{name}.done")

    def element(self, item: str, base: str, strides: Sequence[str], indices: Sequence[str]) -> str:
        offset = "0"
        for index, stride in zip(indices, strides, strict=True):
            part = self.b.value(f"mul i64 {index}, {stride}")
            offset = part if offset == "0" else self.b.value(f"add i64 {offset}, {part}")
        return self.b.value(f"getelementptr inbounds {item}, ptr {base}, i64 {offset}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def text(self, entry: str, linkage: str) -> str:
        self.failed()
        given = ", ".join(f"ptr %{p}" for p in PARAMETERS)
        words = max(self.most_arguments, 1)
        return "\n".join([
            f"define {linkage} i32 @{entry}({given}) nounwind {{",
            "begin:",
            f"  %arguments = alloca [{words} x i64], align 16",
            *self.b.lines,
            "}",
            "",
        ])  # fmt: skip


def _declarations(kernels: Sequence[str]) -> str:
    return "\n".join([
        "declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)",
        "declare i64 @llvm.smax.i64(i64, i64)",
        "declare i64 @llvm.smin.i64(i64, i64)",
        *(f"declare void @{name}(ptr)" for name in kernels),
    ])  # fmt: skip


def _is(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(sympy.expand(a - b) == 0)
