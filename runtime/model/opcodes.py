"""What single instructions ask of a multiprocessor: which of its pipes, how many multiply-adds, how many bytes."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

from ..machine_code.code import Instruction
from ..machine_code.sass import access_bytes as sass_bytes
from ..triton.report import access_bytes as amd_bytes


class Pipe(Enum):
    """Where instructions are executed; the values are the names of the rates in ``ir.pipes.Pipes``."""

    FMA = "fma"
    IMAD = "imad"
    ALU = "alu"
    SPECIAL = "special"
    DOUBLE = "double"
    ACCESS = "access"


_PIPES = {
    # Integer multiplies take half of the lanes that multiply floats.
    (Pipe.FMA, Pipe.IMAD): "IMAD IMUL IDP",
    (Pipe.FMA,): "FADD FMUL FFMA FADD2 FMUL2 FFMA2 FHADD FHFMA HADD2 HMUL2 HFMA2",
    (Pipe.ALU,): (
        "IADD IADD2 IADD3 VIADD VIADDMNMX IABS IMNMX VIMNMX VIMNMX3 ISETP ISCADD LEA LOP LOP3 LOP32I PLOP3 SHF SHL SHR "
        "BMSK SGXT PRMT SEL FSEL FSETP FSET FMNMX FMNMX3 FCHK FSWZADD HSET2 HSETP2 HMNMX2 VHMNMX F2FP I2FP F2IP I2IP "
        "MOV CS2R P2R R2P VOTE CSETP PSETP R2UR ISET VABSDIFF"
    ),
    (Pipe.SPECIAL,): "MUFU I2F F2I F2F FRND POPC FLO BREV",
    (Pipe.DOUBLE,): "DADD DMUL DFMA DSETP DMNMX",
    (Pipe.ACCESS,): (
        "LDG STG LD ST LDS STS LDSM STSM LDL STL LDGSTS SHFL ATOM ATOMG ATOMS RED REDG REDUX CREDUX MATCH LDTM STTM "
        "MOVM"
    ),
}  # fmt: skip
_SASS = {stem: pipes for pipes, stems in _PIPES.items() for stem in stems.split()}
_AMD_SPECIAL = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
_AMD_ACCESS = re.compile(r"(?:ds|global|flat|buffer|scratch)_")
_AMD_IMAD = re.compile(r"v_(?:mul_(?:lo|hi)_[ui]32|mad_[ui]64)")
_AMD_FMA = re.compile(r"v_(?:pk_)?(?:fma\w*|mul|add|sub|subrev|fmac|mac|mad|dot\w*)_(?:legacy_)?(?:f16|bf16|f32)")

_DATA = frozenset(
    ["LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS", "LD", "ST", "ATOM", "ATOMG", "ATOMS", "RED", "REDG"]
)
_WARP_PRODUCT = re.compile(r"^(?P<m>16|8)(?P<n>8)(?P<k>4|8|16|32|64|128)$")
_GROUP_PRODUCT = re.compile(r"^(?P<m>64)x(?P<n>\d+)x(?P<k>\d+)$")
_MATRIX_PRODUCT = re.compile(r"v_s?mfmac?_[a-z]\w*?_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_?(?P<blocks>\d+b_)?(?P<kind>\w+)")
# Multiply-adds of half types that take as long as one of another type.
_SASS_COST = {"DMMA": 16.0, "IMMA": 0.5, "QMMA": 0.5, "OMMA": 0.25, "IGMMA": 0.5, "QGMMA": 0.5}
_AMD_COST = {"f32": 8.0, "xf32": 2.0, "f64": 8.0, "i8": 0.5, "fp8": 0.5, "bf8": 0.5}
_TF32 = 2.0
# The bytes that every product of groups takes of each row and column: its depth times the size of an element.
_DEPTH_BYTES = 32


@lru_cache(maxsize=4096)
def pipes_of(opcode: str) -> tuple[Pipe, ...]:
    """The pipes that a lane of an instruction takes; none for control, the scalar units and the products of tiles."""
    if opcode[0].isupper():
        return _SASS.get(opcode.partition(".")[0], ())
    if _AMD_ACCESS.match(opcode):
        return (Pipe.ACCESS,)
    if not opcode.startswith("v_") or _MATRIX_PRODUCT.match(opcode):
        return ()
    if "_f64" in opcode:
        return (Pipe.DOUBLE,)
    for pattern, pipe in ((_AMD_SPECIAL, Pipe.SPECIAL), (_AMD_IMAD, Pipe.IMAD), (_AMD_FMA, Pipe.FMA)):
        if pattern.match(opcode):
            return (pipe,)
    return (Pipe.ALU,)


@lru_cache(maxsize=1024)
def products_of(opcode: str) -> float:
    """Multiply-adds that a warp does by an instruction in tensor (matrix) cores, counted as those of half types; 0.0
    where it does none, or does not tell."""
    if not opcode[0].isupper():
        match = _MATRIX_PRODUCT.match(opcode)
        if match is None:
            return 0.0
        blocks = int(match["blocks"][:-2]) if match["blocks"] else 1
        kind = match["kind"].partition("_")[0]
        return int(match["m"]) * int(match["n"]) * int(match["k"]) * blocks * _AMD_COST.get(kind, 1.0)
    stem, _, rest = opcode.partition(".")
    if not stem.endswith("MMA"):
        return 0.0
    cost = _TF32 if "TF32" in opcode else _SASS_COST.get(stem, 1.0)
    for part in rest.split("."):
        if match := _WARP_PRODUCT.match(part):
            return int(match["m"]) * int(match["n"]) * int(match["k"]) * cost
        if match := _GROUP_PRODUCT.match(part):  # of four warps, each with its rows
            return int(match["m"]) * int(match["n"]) * int(match["k"]) * cost / 4
    return 0.0


def by_groups(opcode: str) -> bool:
    """Whether a product is one of four warps."""
    return opcode.partition(".")[0] in ("HGMMA", "IGMMA", "QGMMA") or is_tensor_memory_product(opcode)


def is_tensor_memory_product(opcode: str) -> bool:
    """Whether a program multiplies by one instruction of one thread, whose size is in a descriptor."""
    return opcode.startswith("UTC") and opcode.partition(".")[0].endswith("MMA")


def cached_bytes(i: Instruction) -> float:
    """Bytes that a lane of an instruction moves through the first cache and shared memory."""
    stem = i.opcode.partition(".")[0]
    if stem in ("LDSM", "STSM"):  # matrices of 8 x 8 halves, four bytes a lane each
        return 4.0 * next((int(p) for p in reversed(i.opcode.split(".")) if p in ("2", "4")), 1)
    if stem in (
        "LDG",
        "STG",
        "LDS",
        "STS",
        "LDL",
        "STL",
        "LDGSTS",
        "LD",
        "ST",
        "ATOM",
        "ATOMG",
        "ATOMS",
        "RED",
        "REDG",
    ):
        return sass_bytes(i.opcode)
    if stem in ("HGMMA", "IGMMA", "QGMMA"):
        shape = next((m for p in i.opcode.split(".") if (m := _GROUP_PRODUCT.match(p))), None)
        rows = 64 if len(i.operands) > 1 and i.operands[1].startswith("gdesc") else 0
        return (rows + int(shape["n"])) * _DEPTH_BYTES / 128 if shape else 0.0
    if i.opcode.startswith(("global_load", "global_store", "buffer_load", "buffer_store")):
        return amd_bytes(i.opcode.split("_", 2)[2])
    if i.opcode.startswith(("ds_read", "ds_write")):
        return 4.0 * max(_bits(i.opcode) // 32, 1) * (2 if i.opcode.startswith(("ds_read2", "ds_write2")) else 1)
    return 0.0


def _bits(opcode: str) -> int:
    found = re.search(r"_[bu](\d+)", opcode)
    return int(found[1]) if found else 32
