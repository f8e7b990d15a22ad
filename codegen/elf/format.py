"""Names and layouts of the ELF format, 64 bits and little-endian, as far as objects of LLVM's have them.

Source: System V ABI, its supplements for x86-64 and AArch64, and ELF for the Arm 64-bit Architecture.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...ir.errors import MlcError


class ElfError(MlcError):
    """Objects that cannot become a library; the text names the symbol, the relocation, and the object."""


HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELA = struct.Struct("<QQq")
DYNAMIC = struct.Struct("<QQ")

MAGIC = b"\x7fELF\x02\x01\x01"
ET_REL, ET_DYN = 1, 3
EM_X86_64, EM_AARCH64 = 62, 183
SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_RELA, SHT_HASH = 1, 2, 3, 4, 5
SHT_DYNAMIC, SHT_NOTE, SHT_NOBITS, SHT_REL, SHT_DYNSYM = 6, 7, 8, 9, 11
SHT_INIT_ARRAY, SHT_FINI_ARRAY = 14, 15
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR, SHF_INFO_LINK, SHF_TLS = 0x1, 0x2, 0x4, 0x40, 0x400
SHN_UNDEF, SHN_ABS, SHN_COMMON, SHN_RESERVED = 0, 0xFFF1, 0xFFF2, 0xFF00
STB_LOCAL, STB_GLOBAL, STB_WEAK = 0, 1, 2
STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_SECTION, STT_FILE, STT_TLS = 0, 1, 2, 3, 4, 6
STV_DEFAULT, STV_HIDDEN = 0, 2
PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_TLS = 1, 2, 4, 7
PT_GNU_STACK, PT_GNU_RELRO = 0x6474E551, 0x6474E552
PF_X, PF_W, PF_R = 1, 2, 4
DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_RELAENT = 1, 4, 5, 6, 7, 8, 9
DT_STRSZ, DT_SYMENT, DT_FLAGS, DT_RELACOUNT, DT_FLAGS_1 = 10, 11, 30, 0x6FFFFFF9, 0x6FFFFFFB
DF_BIND_NOW, DF_1_NOW = 0x8, 0x1


def aligned(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment


class Strings:
    """A table of strings in the making: each text once, at a place that never changes."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0")
        self.places: dict[str, int] = {"": 0}

    def place(self, text: str) -> int:
        """Where ``text`` begins."""
        if text not in self.places:
            self.places[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.places[text]


@dataclass(frozen=True, slots=True)
class Fix:
    """A relocation: the address of ``symbol`` (its index in the object) plus ``addend`` goes to ``offset``."""

    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True, slots=True)
class ElfSection:
    """A section that is loaded. ``data`` is empty where the loader gives zeros; ``size`` counts bytes."""

    name: str
    kind: int
    flags: int
    alignment: int
    size: int
    data: bytes
    fixes: tuple[Fix, ...]

    @property
    def is_code(self) -> bool:
        return bool(self.flags & SHF_EXECINSTR)

    @property
    def is_writable(self) -> bool:
        return bool(self.flags & SHF_WRITE)

    @property
    def is_thread_local(self) -> bool:
        return bool(self.flags & SHF_TLS)

    @property
    def has_data(self) -> bool:
        return self.kind != SHT_NOBITS


@dataclass(frozen=True, slots=True)
class ElfSymbol:
    """A symbol of an object. ``section`` is an index of ``ObjectFile.sections``, None where another object has it."""

    name: str
    section: int | None
    value: int
    size: int
    kind: int
    binding: int

    @property
    def is_defined(self) -> bool:
        return self.section is not None

    @property
    def is_local(self) -> bool:
        return self.binding == STB_LOCAL

    @property
    def is_told(self) -> bool:
        """Whether people want to see its name: it is none that assemblers make (``.L…``, ``$…``)."""
        return bool(self.name) and not self.name.startswith((".L", "$"))


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """A relocatable object. ``name`` is for messages; ``machine`` is ``EM_X86_64`` or ``EM_AARCH64``."""

    name: str
    machine: int
    sections: tuple[ElfSection, ...]
    symbols: tuple[ElfSymbol, ...]
