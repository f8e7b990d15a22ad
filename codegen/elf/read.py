"""Relocatable objects as LLVM emits them, read from bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .format import (
    EM_AARCH64,
    EM_X86_64,
    ET_REL,
    HEADER,
    MAGIC,
    RELA,
    SECTION_HEADER,
    SHF_ALLOC,
    SHN_ABS,
    SHN_COMMON,
    SHN_RESERVED,
    SHN_UNDEF,
    SHT_FINI_ARRAY,
    SHT_INIT_ARRAY,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_REL,
    SHT_RELA,
    SHT_SYMTAB,
    STB_GLOBAL,
    STB_LOCAL,
    SYMBOL,
    ElfError,
    ElfSection,
    ElfSymbol,
    Fix,
    ObjectFile,
)


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


def read_object(data: bytes, name: str) -> ObjectFile:
    """The sections that are loaded, with their relocations and symbols. ``name`` stands in messages.

    Raises: ElfError for what is no relocatable ELF object of a machine that we link for, and for what would have to
    run when a library is loaded (constructors).
    """
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise ElfError(f"{name} is no 64-bit little-endian ELF file")
    _, kind, machine, *_, table, _, _, _, _, _, count, names = HEADER.unpack_from(data)
    if kind != ET_REL:
        raise ElfError(f"{name} is no relocatable object (its e_type is {kind})")
    if machine not in (EM_X86_64, EM_AARCH64):
        raise ElfError(f"{name} is for the machine {machine}; libraries are made for x86-64 (62) and AArch64 (183)")
    headers = _headers(data, table, count, names)
    kept = [k for k, h in enumerate(headers) if _is_kept(h, name)]
    place = {k: n for n, k in enumerate(kept)}
    fixes = {h.info: _fixes(data, h) for h in headers if h.kind == SHT_RELA}
    if any(h.kind == SHT_REL and h.info in place for h in headers):
        raise ElfError(f"{name} has relocations without addends, which neither machine uses")
    sections = []
    for k in kept:
        h = headers[k]
        body = b"" if h.kind == SHT_NOBITS else data[h.offset : h.offset + h.size]
        sections.append(ElfSection(h.name, h.kind, h.flags, max(h.alignment, 1), h.size, body, fixes.get(k, ())))
    return ObjectFile(name, machine, tuple(sections), _symbols(data, headers, place, name))


def renamed(given: ObjectFile, names: Mapping[str, str]) -> ObjectFile:
    """The same object with other names for what it defines, which the other objects see from then on.

    A local symbol among ``names`` becomes a global one. Raises: ElfError where the object defines one of them not at
    all, or twice.
    """
    for old in names:
        found = sum(s.name == old and s.is_defined for s in given.symbols)
        if found != 1:
            raise ElfError(f"{given.name} defines {old} {found} times; it has to define it once")
    symbols = tuple(
        replace(s, name=names[s.name], binding=STB_GLOBAL) if s.is_defined and s.name in names else s
        for s in given.symbols
    )
    return replace(given, symbols=symbols)


def _headers(data: bytes, table: int, count: int, names: int) -> list[_Header]:
    raw = [SECTION_HEADER.unpack_from(data, table + k * SECTION_HEADER.size) for k in range(count)]
    texts = raw[names][4]
    return [
        _Header(_text(data, texts + h[0]), h[1], h[2], h[4], h[5], h[6], h[7], h[8])
        for h in raw
    ]  # fmt: skip


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _is_kept(h: _Header, name: str) -> bool:
    if not h.flags & SHF_ALLOC or h.kind == SHT_NOTE:
        return False
    family = h.name.split(".")[1:2]
    if h.kind in (SHT_INIT_ARRAY, SHT_FINI_ARRAY) or family in (["init"], ["fini"], ["ctors"], ["dtors"]):
        raise ElfError(f"{name} has the section {h.name}: nothing of a library runs when it is loaded or unloaded")
    return True


def _fixes(data: bytes, h: _Header) -> tuple[Fix, ...]:
    found = (RELA.unpack_from(data, h.offset + k) for k in range(0, h.size, RELA.size))
    return tuple(Fix(offset, info & 0xFFFFFFFF, info >> 32, addend) for offset, info, addend in found)


def _symbols(data: bytes, headers: list[_Header], place: dict[int, int], name: str) -> tuple[ElfSymbol, ...]:
    table = next((h for h in headers if h.kind == SHT_SYMTAB), None)
    if table is None:
        return ()
    texts = headers[table.link].offset
    symbols = []
    for k in range(0, table.size, SYMBOL.size):
        text, info, _, where, value, size = SYMBOL.unpack_from(data, table.offset + k)
        own = _text(data, texts + text)
        if where == SHN_COMMON or (where >= SHN_RESERVED and where not in (SHN_ABS, SHN_COMMON)):
            raise ElfError(f"{name}: the symbol {own} is in no section (its index is {where:#x})")
        section = place.get(where) if where not in (SHN_UNDEF, SHN_ABS) else None
        binding = info >> 4
        if section is None and where != SHN_UNDEF:
            binding = STB_LOCAL  # of a section that is not loaded, or of the file's name: nothing refers to it
        symbols.append(ElfSymbol(own, section, value, size, info & 15, binding))
    return tuple(symbols)
