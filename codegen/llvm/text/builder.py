"""Text of one LLVM function: instructions, basic blocks, value numbering and the hoisting of invariants.

Every pure instruction is keyed by its own text, so that an equal one in scope is never written twice, and is written
before the outermost loop in which its operands are known. So common subexpressions are shared and invariants leave the
loops without a pass of LLVM, which would take longer than all the rest of a compilation.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from ....ir.expr.dtypes import DType
from ...kernel import EmitError

_ELEMENT = {
    DType.FLOAT64: "double",
    DType.FLOAT32: "float",
    DType.FLOAT16: "float",
    DType.BFLOAT16: "float",
    DType.FLOAT8_E4M3FN: "float",
    DType.FLOAT8_E5M2: "float",
    DType.INT64: "i64",
    DType.INT32: "i32",
    DType.INT16: "i16",
    DType.INT8: "i8",
    DType.UINT64: "i64",
    DType.UINT32: "i32",
    DType.UINT16: "i16",
    DType.UINT8: "i8",
    DType.BOOL: "i1",
}


@dataclass(frozen=True, slots=True)
class Val:
    """An SSA value or literal: ``lanes`` 0 is a scalar, which is the same in every lane of the loop around it.

    A half type is carried as a float32 that it can represent exactly; a bool as i1.
    """

    name: str
    dtype: DType
    lanes: int = 0

    @property
    def type(self) -> str:
        return llvm_type(self.dtype, self.lanes)

    @property
    def is_literal(self) -> bool:
        return not self.name.startswith("%")

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


def element_type(dtype: DType) -> str:
    """The LLVM type that carries one value of ``dtype``."""
    try:
        return _ELEMENT[dtype]
    except KeyError:
        raise EmitError(f"{dtype.value} has no code on the CPU; its ops go to ATen") from None


def llvm_type(dtype: DType, lanes: int) -> str:
    element = element_type(dtype)
    return f"<{lanes} x {element}>" if lanes else element


def literal(value: bool | int | float, dtype: DType) -> str:
    """A scalar constant as LLVM writes it: floats as the bits of a double, which is exact for every type."""
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype.is_int:
        return str(int(value))
    if dtype is not DType.FLOAT64:
        value = _round_float(float(value), dtype)
    return f"0x{struct.unpack('<Q', struct.pack('<d', float(value)))[0]:016X}"


def _round_float(value: float, dtype: DType) -> float:
    """``value`` as a float of the type, as the double that equals it."""
    if value != value or value in (float("inf"), float("-inf")):
        return value
    kind = dtype.numpy.type if dtype.is_half else None
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = float("inf") if value > 0 else float("-inf")
    return rounded if kind is None else float(kind(rounded))


# A list inside stands for lines that are still being written, at its place.
Lines: TypeAlias = "list[str | list[str]]"
_NAME = re.compile(r"%[\w.]+")


@dataclass(slots=True)
class BodyFrame:
    """A loop body or a branch that is being written: what is known in it.

    And the place before it for what is hoisted.
    """

    known: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    is_loop: bool = False
    written: frozenset[str] = frozenset()
    # Values of index expressions, by these and what their symbols are: made of instructions that are known here.
    indices: dict[Hashable, Val] = field(default_factory=dict)


class Builder:
    """The body of one function under construction."""

    def __init__(self, signature: str, features: frozenset[str] = frozenset(), sleef: bool = True) -> None:
        self.signature = signature
        self.features = features
        # Whether vectors may be given to functions of Sleef.
        self.sleef = sleef
        self.entry: list[str] = []
        self.lines: Lines = []
        self.block = "entry"
        self.declarations: dict[str, str] = {}
        # Products of floats and their negatives, by name.
        self.products: set[str] = set()
        self._count = 0
        self._frames = [BodyFrame()]
        # The frame in which a name is defined; parameters and stack slots are in none, which is as good as the
        # outermost.
        self._depth: dict[str, int] = {}

    # --- names and text

    def fresh(self, hint: str = "") -> str:
        """A name of this function, defined in the frame at hand."""
        self._count += 1
        # No buffer or size has a dot in its name.
        name = f"%{hint or 'v'}.{self._count}"
        self._depth[name] = len(self._frames) - 1
        return name

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def op(self, text: str) -> str:
        """The name of a pure instruction's result: an equal one that is known.

        Or a new one as far out as it can stand.
        """
        return self._known(text) or self._place(text, max(map(self._depth_of, _NAME.findall(text)), default=0))

    def load(self, text: str, buffer: str, version: int | None, movable: bool) -> str:
        """As ``op`` for a load: it leaves loops that do not write the buffer, but no branch."""
        key = text if version is None else f"{text} ; {buffer} {version}"
        found = self._known(key)
        if found is not None:
            return found
        depth = len(self._frames) - 1
        if movable:
            least = max(map(self._depth_of, _NAME.findall(text)), default=0)
            while depth > least and self._frames[depth].is_loop and buffer not in self._frames[depth].written:
                depth -= 1
        return self._place(key, depth)

    def _depth_of(self, name: str) -> int:
        return self._depth.get(name, 0)

    def _known(self, key: str) -> str | None:
        for frame in reversed(self._frames):
            if (name := frame.known.get(key)) is not None:
                return name
        return None

    def recall(self, key: Hashable) -> Val | None:
        """The value that was remembered by a key, where all of its instructions are in scope."""
        for frame in reversed(self._frames):
            if (value := frame.indices.get(key)) is not None:
                return value
        return None

    def remember(self, key: Hashable, value: Val) -> None:
        """Keep a value of pure instructions that were written, or found, just now, as long as they are in scope."""
        self._frames[-1].indices[key] = value

    def _place(self, text: str, depth: int) -> str:
        name = self.fresh()
        self._depth[name] = depth
        self._frames[depth].known[text] = name
        line = f"  {name} = {text}"
        if depth == len(self._frames) - 1:
            self.lines.append(line)
        else:
            self._frames[depth + 1].before.append(line)
        return name

    def effect(self, text: str) -> str:
        """The name of the result of an instruction that must stay where it is, and not be merged with an equal one."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def note(self, key: str, lines: Sequence[str], operands: Sequence[str]) -> None:
        """Lines that nothing after them reads, and that may run early and once: as far out as loops know the operands,
        but out of no branch; none where the same are noted already."""
        if self._known(key) is not None:
            return
        depth = len(self._frames) - 1
        least = max(map(self._depth_of, operands), default=0)
        while depth > least and self._frames[depth].is_loop:
            depth -= 1
        self._frames[depth].known[key] = key
        place = self.lines if depth == len(self._frames) - 1 else self._frames[depth + 1].before
        place.extend(f"  {line}" for line in lines)

    def call(self, result: str, function: str, *args: str, pure: bool = True, flags: str = "") -> str:
        """Call of an external function or intrinsic, which is declared; ``args`` are typed ("float %x").

        ``flags`` are those of fast mathematics, each with a blank behind it.
        """
        types = ", ".join(_type_of(a) for a in args)
        attributes = (
            "" if function.startswith("llvm.") else " nounwind willreturn memory(none)" if pure else " nounwind"
        )
        self.declarations[function] = f"declare {result} @{function}({types}){attributes}"
        text = f"call {flags}{result} @{function}({', '.join(args)})"
        if result == "void":
            self.line(text)
            return ""
        return self.op(text) if pure else self.effect(text)

    # --- control flow

    @contextmanager
    def frame(self, is_loop: bool = False, written: frozenset[str] = frozenset()) -> Iterator[None]:
        """A loop body or branch, entered before the jump to it is written."""
        frame = BodyFrame(is_loop=is_loop, written=written)
        self.lines.append(frame.before)
        self._frames.append(frame)
        try:
            yield
        finally:
            self._frames.pop()

    def label(self, name: str) -> None:
        self.lines.append(f"{name[1:]}:")
        self.block = name[1:]

    def alloca(self, type_: str, align: int = 64) -> str:
        """Stack space in the entry block, so that a loop around the use does not grow the stack."""
        name = self.fresh("stack")
        self._depth[name] = 0
        self.entry.append(f"  {name} = alloca {type_}, align {align}")
        return name

    def branch(self, target: str) -> None:
        self.line(f"br label {target}")

    # --- values

    def const(self, value: bool | int | float, dtype: DType, lanes: int = 0) -> Val:
        text = literal(value, dtype)
        return Val(f"splat ({element_type(dtype)} {text})" if lanes else text, dtype, lanes)

    def splat(self, v: Val, lanes: int) -> Val:
        """The value in every lane; nothing for a vector."""
        if v.lanes or not lanes:
            return v
        element = element_type(v.dtype)
        if v.is_literal:
            return Val(f"splat ({element} {v.name})", v.dtype, lanes)
        one = self.op(f"insertelement <{lanes} x {element}> poison, {element} {v.name}, i64 0")
        name = self.op(
            f"shufflevector <{lanes} x {element}> {one}, <{lanes} x {element}> poison, <{lanes} x i32> zeroinitializer"
        )
        return Val(name, v.dtype, lanes)

    def same(self, *vals: Val) -> tuple[Val, ...]:
        """The values brought to one number of lanes."""
        lanes = max(v.lanes for v in vals)
        return tuple(self.splat(v, lanes) for v in vals)

    def binary(self, instruction: str, a: Val, b: Val, dtype: DType | None = None) -> Val:
        a, b = self.same(a, b)
        return Val(self.op(f"{instruction} {a.type} {a.name}, {b.name}"), dtype or a.dtype, a.lanes)

    def intrinsic(self, name: str, *args: Val, dtype: DType | None = None, flags: str = "") -> Val:
        """A call of ``llvm.<name>`` overloaded on the type of its first argument."""
        args = self.same(*args)
        first = args[0]
        suffix = type_suffix(element_type(first.dtype), first.lanes)
        result = dtype or first.dtype
        text = self.call(llvm_type(result, first.lanes), f"llvm.{name}.{suffix}", *(str(a) for a in args), flags=flags)
        return Val(text, result, first.lanes)

    def in_registers(self, name: str, x: Val, y: Val) -> Val:
        """An instruction of AVX-512 on two vectors of float32, a register at a time.

        It is ``llvm.x86.avx512.mask.<name>.ps``. As many lanes as a power of two; fewer than sixteen need ``avx512vl``.
        """
        x, y = self.same(x, y)
        width = min(x.lanes, 16)
        kind, mask = f"<{width} x float>", f"i{max(width, 8)} -1"
        rounding = ["i32 4"] if width == 16 else []  # as the thread rounds
        parts = []
        for at in range(0, x.lanes, width):
            a, b = (self._lanes_of(v, at, width) for v in (x, y))
            intrinsic = f"llvm.x86.avx512.mask.{name}.ps.{32 * width}"
            parts.append(self.call(kind, intrinsic, a, b, f"{kind} zeroinitializer", mask, *rounding))
        while len(parts) > 1:
            parts = [self._beside(p, q, width) for p, q in zip(parts[::2], parts[1::2], strict=True)]
            width *= 2
        return Val(parts[0], x.dtype, x.lanes)

    def _lanes_of(self, v: Val, first: int, count: int) -> str:
        """So many lanes of a vector, with their type."""
        if count == v.lanes:
            return str(v)
        picks = ", ".join(f"i32 {k}" for k in range(first, first + count))
        name = self.op(f"shufflevector {v}, {v.type} poison, <{count} x i32> <{picks}>")
        return f"{llvm_type(v.dtype, count)} {name}"

    def _beside(self, low: str, high: str, lanes: int) -> str:
        picks = ", ".join(f"i32 {k}" for k in range(2 * lanes))
        kind = f"<{lanes} x float>"
        return self.op(f"shufflevector {kind} {low}, {kind} {high}, <{2 * lanes} x i32> <{picks}>")

    def convert(self, instruction: str, v: Val, dtype: DType) -> Val:
        """One conversion instruction (``sitofp``, ``bitcast``, …) to the type that carries ``dtype``."""
        to = llvm_type(dtype, v.lanes)
        return v if to == v.type else Val(self.op(f"{instruction} {v} to {to}"), dtype, v.lanes)

    def select(self, condition: Val, a: Val, b: Val) -> Val:
        a, b = self.same(a, b)
        if condition.lanes and not a.lanes:
            a, b = self.splat(a, condition.lanes), self.splat(b, condition.lanes)
        if condition.name == "true" or a == b:
            return a
        if condition.name == "false":
            return b
        return Val(self.op(f"select {condition}, {a}, {b}"), a.dtype, a.lanes)

    def text(self, attributes: str = "") -> str:
        """The whole function."""
        return "\n".join([f"{self.signature} {attributes}{{", "entry:", *self.entry, *_flat(self.lines), "}"])


def _flat(lines: Lines) -> Iterator[str]:
    for line in lines:
        if isinstance(line, str):
            yield line
        else:
            yield from line


def type_suffix(element: str, lanes: int) -> str:
    """How an intrinsic's name spells a type: v8f32, i64."""
    short = {"float": "f32", "double": "f64", "half": "f16", "ptr": "p0"}.get(element, element)
    return f"v{lanes}{short}" if lanes else short


def _type_of(argument: str) -> str:
    """The type in "float %x" or "<8 x float> splat (float 0x..)"."""
    if argument.startswith("<"):
        return argument[: argument.index(">") + 1]
    return argument.split(" ", 1)[0]
