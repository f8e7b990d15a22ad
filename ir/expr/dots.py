"""Instructions of CPUs that add products of neighbours to each lane: the table of all, which users may extend.

Each says what it means in one line, ``total[lane] += sum over d of left[lane, d] * right[lane, d]``, for its types and
sizes; a schedule gives it the tile of a block whose meaning is that (``tensorize``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..registration import LOCK, Registration, RegistrationError
from .dtypes import DType


@dataclass(frozen=True, slots=True)
class DotInstruction:
    """``total[lane] += sum over d < depth of left[lane, d] * right[lane, d]``, for ``lanes`` lanes at once.

    ``left`` and ``right`` are element types of registers of ``lanes * depth`` elements, a lane's neighbours together;
    ``total`` is the type of the sums. ``llvm`` is the function of LLVM that is the instruction, of (sums, left, right);
    "" where it is written out in others, a conversion and a multiplication for each of the neighbours. ``feature`` is
    LLVM's name of what a processor must have for it ("avx512vnni", "dotprod"), several with "+" between them.
    """

    name: str
    feature: str
    lanes: int
    depth: int
    left: DType
    right: DType
    total: DType
    llvm: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it adds integers, which round nothing."""
        return self.total.is_int

    def runs_on(self, features: frozenset[str], vector_bytes: int) -> bool:
        """Whether a processor with these features (no "+" before them) has it, in vectors that code uses there."""
        has = not self.feature or all(f in features for f in self.feature.split("+"))
        return has and self.lanes * self.total.itemsize <= vector_bytes

    def meaning(self, total: Any, left: Any, right: Any) -> Any:
        """What it makes of NumPy arrays ``[lanes]``, ``[lanes, depth]`` and ``[lanes, depth]``."""
        kind = self.total.numpy
        return total + (left.astype(kind) * right.astype(kind)).sum(-1, dtype=kind)


_U8, _S8, _I32, _F32 = DType.UINT8, DType.INT8, DType.INT32, DType.FLOAT32
# Widest first: of those that fit, the first is taken. Bytes by floats last, which is no single instruction.
_OURS = (
    DotInstruction("vpdpbusd.512", "avx512vnni", 16, 4, _U8, _S8, _I32, "llvm.x86.avx512.vpdpbusd.512"),
    DotInstruction("vpdpbusd.256", "avx512vnni+avx512vl", 8, 4, _U8, _S8, _I32,
                   "llvm.x86.avx512.vpdpbusd.256"),
    DotInstruction("vpdpbusd.vex", "avxvnni", 8, 4, _U8, _S8, _I32, "llvm.x86.avx512.vpdpbusd.256"),
    DotInstruction("sdot", "dotprod", 4, 4, _S8, _S8, _I32, "llvm.aarch64.neon.sdot.v4i32.v16i8"),
    DotInstruction("bytes.512", "", 16, 4, _U8, _F32, _F32),
    DotInstruction("bytes.256", "", 8, 4, _U8, _F32, _F32),
    DotInstruction("bytes.128", "", 4, 4, _U8, _F32, _F32),
)  # fmt: skip
DOTS: dict[str, DotInstruction] = {d.name: d for d in _OURS}
# Those that users have declared: part of every cache key.
USER_DOTS: dict[str, DotInstruction] = {}


def dots_of(features: frozenset[str], vector_bytes: int) -> Iterator[DotInstruction]:
    """The instructions that a processor has, those of users first."""
    for known in (*USER_DOTS.values(), *(d for d in DOTS.values() if d.name not in USER_DOTS)):
        if known.runs_on(features, vector_bytes):
            yield known


def register_dot(
    name: str,
    *,
    llvm: str,
    feature: str,
    lanes: int,
    depth: int,
    left: str = "uint8",
    right: str = "int8",
    total: str = "int32",
) -> Registration:
    """Declare an instruction that adds the products of ``depth`` neighbours to each of ``lanes`` lanes.

    ``llvm`` is LLVM's function for it, of the sums, the left and the right operand, a register of ``lanes * depth``
    elements each; ``feature`` is LLVM's name of what a processor must have for it, several with "+" between them.
    Element types are torch's names: ``left`` is "uint8" or "int8", ``right`` "int8" and ``total`` "int32". It is used
    before ours, wherever a product of integers has tiles of such sizes.
    Raises: RegistrationError.
    """
    try:
        first, second, summed = map(DType, (left, right, total))
    except ValueError as error:
        raise RegistrationError(f"register_dot({name!r}): {error}; types are named as torch names them") from None
    if first not in (_U8, _S8) or second is not _S8 or summed is not _I32:
        raise RegistrationError(
            f"register_dot({name!r}): {left} by {right} in {total}: the left operand is uint8 or int8, the right one "
            "int8, and sums are int32"
        )
    if not name or not name.replace(".", "_").isidentifier():
        raise RegistrationError(f"register_dot({name!r}): a name is letters, digits and dots")
    if not llvm.startswith("llvm."):
        raise RegistrationError(f"register_dot({name!r}): {llvm!r} is no function of LLVM; they begin with 'llvm.'")
    if lanes < 1 or lanes & (lanes - 1) or depth != 4:
        raise RegistrationError(
            f"register_dot({name!r}): {lanes} lanes of {depth}: lanes are a power of two, and a lane has four bytes"
        )
    with LOCK:
        if name in DOTS:
            raise RegistrationError(f"there is an instruction {name!r} already; give yours another name")
        DOTS[name] = USER_DOTS[name] = DotInstruction(name, feature, lanes, depth, first, second, summed, llvm)
        return Registration("dot instruction", name, DOTS[name], partial(_take_back, name))


def _take_back(name: str) -> None:
    del DOTS[name], USER_DOTS[name]
