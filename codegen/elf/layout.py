"""Where the parts of a shared object lie: four segments, read, run, written by the loader alone, and written.

Addresses run on where the file does: a segment begins in the page in which the one before it ends in the file, at an
address one page further, so that no bytes are spent on filling pages up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .format import (
    PF_R,
    PF_W,
    PF_X,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHF_TLS,
    SHF_WRITE,
    SHT_NOBITS,
    SHT_PROGBITS,
    ElfSection,
    aligned,
)
from .resolve import Resolved

READ, RUN, RELRO, WRITE = range(4)
ACCESS = (PF_R, PF_R | PF_X, PF_R | PF_W, PF_R | PF_W)


@dataclass(slots=True)
class ElfPart:
    """A section of the library: parts of one name of all objects, or one that the linker made.

    ``members`` are (object, section) with their places in it. ``link`` names the section that a table belongs to.
    """

    name: str
    segment: int
    flags: int
    alignment: int
    kind: int = SHT_PROGBITS
    entry_size: int = 0
    link: str = ""
    info: int = 0
    size: int = 0
    members: dict[tuple[int, int], int] = field(default_factory=dict)
    address: int = 0
    offset: int = 0

    @property
    def in_file(self) -> bool:
        return self.kind != SHT_NOBITS

    def add(self, owner: int, index: int, section: ElfSection) -> None:
        self.alignment = max(self.alignment, section.alignment)
        at = aligned(self.size, section.alignment)
        self.members[owner, index] = at
        self.size = at + section.size


@dataclass(frozen=True, slots=True)
class ElfSegment:
    """What the loader maps: bytes ``offset`` to ``offset + file_size`` at ``address``, and zeros up to ``size``."""

    access: int
    offset: int
    address: int
    file_size: int
    size: int


def gather(resolved: Resolved) -> list[ElfPart]:
    """The parts that the sections of the objects make, in the order of their addresses."""
    order = {
        name: ElfPart(name, segment, flags, 1, kind)
        for name, segment, flags, kind in (
            (".rodata", READ, SHF_ALLOC, SHT_PROGBITS),
            (".eh_frame", READ, SHF_ALLOC, SHT_PROGBITS),
            (".text", RUN, SHF_ALLOC | SHF_EXECINSTR, SHT_PROGBITS),
            (".tdata", RELRO, SHF_ALLOC | SHF_WRITE | SHF_TLS, SHT_PROGBITS),
            (".tbss", RELRO, SHF_ALLOC | SHF_WRITE | SHF_TLS, SHT_NOBITS),
            (".data.rel.ro", RELRO, SHF_ALLOC | SHF_WRITE, SHT_PROGBITS),
            (".data", WRITE, SHF_ALLOC | SHF_WRITE, SHT_PROGBITS),
            (".bss", WRITE, SHF_ALLOC | SHF_WRITE, SHT_NOBITS),
        )
    }
    for owner, given in enumerate(resolved.objects):
        for k, section in enumerate(given.sections):
            order[_part(section)].add(owner, k, section)
    frames = order[".eh_frame"]
    if frames.size:
        frames.size += 4  # a zero says that no frame follows
    return [p for p in order.values() if p.size]


def _part(s: ElfSection) -> str:
    if s.is_thread_local:
        return ".tdata" if s.has_data else ".tbss"
    if s.is_code:
        return ".text"
    if s.name == ".eh_frame":
        return ".eh_frame"
    if not s.is_writable:
        return ".rodata"
    if s.name in (".data.rel.ro", ".data.rel.ro.local"):
        return ".data.rel.ro"
    return ".data" if s.has_data else ".bss"


def place(parts: list[ElfPart], start: int, page: int) -> list[ElfSegment]:
    """Give each part its address and its place in the file; ``start`` bytes of headers come first.

    Parts are in the order of their segments. The segment of what the loader alone writes to is filled up to whole
    pages with zeros that the file does not have, for protection goes by pages.
    """
    segments: list[ElfSegment] = []
    offset, address = start, start
    for number in range(4):
        inside = [p for p in parts if p.segment == number]
        if not inside and number != READ:
            continue
        if number != READ:
            address = aligned(address, page) + offset % page
        first = (0, 0) if number == READ else (offset, address)
        for part in inside:
            at = aligned(address, part.alignment)
            if part.in_file:
                offset, address = offset + at - address, at
            part.address, part.offset = at, offset
            if part.in_file:
                offset += part.size
            if not (part.flags & SHF_TLS and not part.in_file):  # each thread has its own: it takes no addresses here
                address = at + part.size
        if number == RELRO:
            address = aligned(address, page)
        segments.append(ElfSegment(ACCESS[number], *first, offset - first[0], address - first[1]))
    return segments
