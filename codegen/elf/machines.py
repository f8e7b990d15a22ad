"""What relocations of x86-64 and AArch64 mean: what each wants made (a place in the offset table, a jump to another
library), and which bits it writes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .format import EM_AARCH64, EM_X86_64, ElfError


class Wants(enum.Enum):
    """What the address that a relocation writes is the address of."""

    SYMBOL = "the symbol itself"
    CALL = "the symbol, or a jump to it where another library has it"
    POINTER = "the symbol, as 64 bits that the loader may have to fill in"
    SLOT = "a place of the offset table that holds the symbol's address"
    THREAD = "two places of the offset table, by which the symbol of this thread is found"
    MODULE = "two places of the offset table, by which this library's memory of this thread is found"
    THREAD_OFFSET = "the symbol's distance from the begin of that memory"
    NOTHING = "nothing: it marks an instruction"


# Writes ``value`` where the bytes ``data`` have ``at``, which lies at the address ``place``; False where it does not
# fit.
Write = Callable[[bytearray, int, int, int], bool]


@dataclass(frozen=True, slots=True)
class FixKind:
    """A kind of relocation by its name in the ABI."""

    name: str
    wants: Wants
    write: Write


@dataclass(frozen=True, slots=True)
class ElfMachine:
    """A machine as the linker sees it.

    ``page`` is the largest page that its systems use. ``relative``, ``slot``, ``pointer`` and ``thread`` are the
    relocations that the loader is left with. ``thread_words`` says whether the second word of a thread-local symbol's
    two is its offset, or both are the loader's. ``jump`` writes a jump through a place of the offset table (``jump``
    bytes at an address, to a slot).
    """

    number: int
    name: str
    page: int
    relative: int
    slot: int
    pointer: int
    thread: int
    thread_words: bool
    jump_size: int
    jump: Callable[[int, int], bytes]
    kinds: Mapping[int, FixKind]
    refused: Mapping[int, str]

    def kind(self, number: int, where: str) -> FixKind:
        """The kind of that number. Raises: ElfError with ``where`` it stands."""
        found = self.kinds.get(number)
        if found is None:
            name = self.refused.get(number, f"relocation {number} of {self.name}")
            known = ", ".join(k.name for k in self.kinds.values())
            raise ElfError(f"{where}: {name} cannot be linked into a library; compile with reloc=pic. Known: {known}")
        return found


# --- fields of data ---------------------------------------------------------------------------------------------------


def _word(size: int, *, relative: bool) -> Write:
    def write(data: bytearray, at: int, place: int, value: int) -> bool:
        value -= place if relative else 0
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size - 1):
            return False
        data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        return True

    return write


def _nothing(data: bytearray, at: int, place: int, value: int) -> bool:
    return True


# --- fields of AArch64's instructions ---------------------------------------------------------------------------------


def _or(data: bytearray, at: int, bits: int, clear: int) -> bool:
    word = int.from_bytes(data[at : at + 4], "little") & ~clear
    data[at : at + 4] = (word | bits).to_bytes(4, "little")
    return True


def _page(data: bytearray, at: int, place: int, value: int) -> bool:
    pages = (value >> 12) - (place >> 12)
    if not -(1 << 20) <= pages < 1 << 20:
        return False
    return _or(data, at, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5, 3 << 29 | 0x7FFFF << 5)


def _low(scale: int) -> Write:
    """The low twelve bits of an address in an ADD, or in a load or store of ``1 << scale`` bytes."""

    def write(data: bytearray, at: int, place: int, value: int) -> bool:
        low = value & 0xFFF
        return low % (1 << scale) == 0 and _or(data, at, low >> scale << 10, 0xFFF << 10)

    return write


def _branch(data: bytearray, at: int, place: int, value: int) -> bool:
    distance = value - place
    if distance % 4 or not -(1 << 27) <= distance < 1 << 27:
        return False
    return _or(data, at, distance >> 2 & 0x3FFFFFF, 0x3FFFFFF)


# --- jumps to other libraries -----------------------------------------------------------------------------------------


def _jump_x86(at: int, slot: int) -> bytes:
    """jmp *slot(%rip)"""
    return b"\xff\x25" + (slot - (at + 6)).to_bytes(4, "little", signed=True) + b"\xcc\xcc"


def _jump_arm(at: int, slot: int) -> bytes:
    """adrp x16, slot; ldr x17, [x16, slot]; br x17"""
    code = bytearray(b"".join(w.to_bytes(4, "little") for w in (0x90000010, 0xF9400211, 0xD61F0220, 0xD503201F)))
    if not (_page(code, 0, at, slot) and _low(3)(code, 4, at + 4, slot)):
        raise ElfError("the code of the library is more than 4 GiB from its offset table")
    return bytes(code)


# --- the machines -----------------------------------------------------------------------------------------------------

_FAR, _NEAR = _word(8, relative=False), _word(4, relative=True)

X86_64 = ElfMachine(
    EM_X86_64, "x86-64", 4096, relative=8, slot=6, pointer=1, thread=16, thread_words=True,
    jump_size=8, jump=_jump_x86,
    kinds={
        1: FixKind("R_X86_64_64", Wants.POINTER, _FAR),
        2: FixKind("R_X86_64_PC32", Wants.SYMBOL, _NEAR),
        4: FixKind("R_X86_64_PLT32", Wants.CALL, _NEAR),
        9: FixKind("R_X86_64_GOTPCREL", Wants.SLOT, _NEAR),
        19: FixKind("R_X86_64_TLSGD", Wants.THREAD, _NEAR),
        20: FixKind("R_X86_64_TLSLD", Wants.MODULE, _NEAR),
        21: FixKind("R_X86_64_DTPOFF32", Wants.THREAD_OFFSET, _word(4, relative=False)),
        24: FixKind("R_X86_64_PC64", Wants.SYMBOL, _word(8, relative=True)),
        41: FixKind("R_X86_64_GOTPCRELX", Wants.SLOT, _NEAR),
        42: FixKind("R_X86_64_REX_GOTPCRELX", Wants.SLOT, _NEAR),
    },
    refused={
        10: "R_X86_64_32, an absolute address of 32 bits,", 11: "R_X86_64_32S, an absolute address of 32 bits,",
        22: "R_X86_64_GOTTPOFF, thread-local memory of a program,",
        23: "R_X86_64_TPOFF32, thread-local memory of a program,", 25: "R_X86_64_GOTOFF64", 26: "R_X86_64_GOTPC32",
    },
)  # fmt: skip

AARCH64 = ElfMachine(
    EM_AARCH64, "AArch64", 65536, relative=1027, slot=1025, pointer=257, thread=1031, thread_words=False,
    jump_size=16, jump=_jump_arm,
    kinds={
        257: FixKind("R_AARCH64_ABS64", Wants.POINTER, _FAR),
        260: FixKind("R_AARCH64_PREL64", Wants.SYMBOL, _word(8, relative=True)),
        261: FixKind("R_AARCH64_PREL32", Wants.SYMBOL, _NEAR),
        275: FixKind("R_AARCH64_ADR_PREL_PG_HI21", Wants.SYMBOL, _page),
        277: FixKind("R_AARCH64_ADD_ABS_LO12_NC", Wants.SYMBOL, _low(0)),
        278: FixKind("R_AARCH64_LDST8_ABS_LO12_NC", Wants.SYMBOL, _low(0)),
        282: FixKind("R_AARCH64_JUMP26", Wants.CALL, _branch),
        283: FixKind("R_AARCH64_CALL26", Wants.CALL, _branch),
        284: FixKind("R_AARCH64_LDST16_ABS_LO12_NC", Wants.SYMBOL, _low(1)),
        285: FixKind("R_AARCH64_LDST32_ABS_LO12_NC", Wants.SYMBOL, _low(2)),
        286: FixKind("R_AARCH64_LDST64_ABS_LO12_NC", Wants.SYMBOL, _low(3)),
        299: FixKind("R_AARCH64_LDST128_ABS_LO12_NC", Wants.SYMBOL, _low(4)),
        311: FixKind("R_AARCH64_ADR_GOT_PAGE", Wants.SLOT, _page),
        312: FixKind("R_AARCH64_LD64_GOT_LO12_NC", Wants.SLOT, _low(3)),
        562: FixKind("R_AARCH64_TLSDESC_ADR_PAGE21", Wants.THREAD, _page),
        563: FixKind("R_AARCH64_TLSDESC_LD64_LO12", Wants.THREAD, _low(3)),
        564: FixKind("R_AARCH64_TLSDESC_ADD_LO12", Wants.THREAD, _low(0)),
        569: FixKind("R_AARCH64_TLSDESC_CALL", Wants.NOTHING, _nothing),
    },
    refused={258: "R_AARCH64_ABS32, an absolute address of 32 bits,"},
)  # fmt: skip

MACHINES = {m.number: m for m in (X86_64, AARCH64)}
