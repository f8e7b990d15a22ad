"""Several relocatable objects become one shared object.

Nothing outside of ``exported`` can be seen or replaced from outside, so everything else is reached directly. What
other libraries have is bound when the library is loaded, in a table that is read-only from then on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .dynamic import dynamic_section, dynamic_symbols, hash_table, symbol_table
from .format import (
    DYNAMIC,
    ET_DYN,
    HEADER,
    MAGIC,
    PF_R,
    PF_W,
    PROGRAM_HEADER,
    PT_DYNAMIC,
    PT_GNU_RELRO,
    PT_GNU_STACK,
    PT_LOAD,
    PT_NOTE,
    PT_TLS,
    RELA,
    SECTION_HEADER,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHF_TLS,
    SHF_WRITE,
    SHT_DYNAMIC,
    SHT_DYNSYM,
    SHT_HASH,
    SHT_NOTE,
    SHT_PROGBITS,
    SHT_RELA,
    SHT_STRTAB,
    SHT_SYMTAB,
    SYMBOL,
    ElfError,
    ObjectFile,
    Strings,
    aligned,
)
from .layout import READ, RELRO, RUN, ElfPart, ElfSegment, gather, place
from .machines import Wants
from .resolve import DefinedSymbol, ImportedSymbol, Resolved, Target, Use, resolve

_BUILD_ID = 20
_NOTE = (4).to_bytes(4, "little") + _BUILD_ID.to_bytes(4, "little") + (3).to_bytes(4, "little") + b"GNU\0"


def link_shared(
    objects: Sequence[ObjectFile],
    exported: Collection[str],
    imports: Collection[str],
    needed: Sequence[str],
) -> bytes:
    """A shared object; equal arguments give equal bytes.

    ``exported`` are the functions that users see, ``imports`` the names that the libraries ``needed`` have, which are
    loaded with it. It has no name of its own (DT_SONAME), so that programs find it by the path that they are linked
    with, and files of one name are several libraries. Raises: ElfError, naming symbol, relocation and object.
    """
    resolved = resolve(objects, exported, imports)
    return _Linker(resolved, tuple(needed)).link()


@dataclass(slots=True)
class _Linker:
    resolved: Resolved
    needed: tuple[str, ...]

    def link(self) -> bytes:
        resolved = self.resolved
        strings = Strings()
        for text in (*self.needed, *(i.name for i in resolved.imports), *resolved.exported):
            strings.place(text)
        made = self.tables(len(strings.data))
        # In each segment the tables of the linker stand before the sections of the objects, code after them.
        parts = sorted(
            [*made, *gather(resolved)],
            key=lambda p: (p.segment, not p.flags & SHF_TLS, p.name == ".plt"),
        )
        headers = HEADER.size + PROGRAM_HEADER.size * self.program_headers(parts)
        segments = place(parts, headers, resolved.machine.page)
        by_name = {p.name: p for p in parts}
        addresses = _Addresses(resolved, by_name)
        out = bytearray(max(p.offset + (p.size if p.in_file else 0) for p in parts))
        self.copy(out, parts)
        for use in resolved.uses:
            addresses.write(out, use)
        self.fill_offset_table(out, addresses)
        order = [(i.name, 0) for i in resolved.imports]
        order += [(name, addresses.of(resolved.globals[name])) for name in resolved.exported]
        exported = [resolved.globals[name] for name in resolved.exported]
        _put(out, by_name[".dynsym"], dynamic_symbols(resolved, order, exported, strings, addresses.index_of))
        _put(out, by_name[".hash"], hash_table([name for name, _ in order]))
        _put(out, by_name[".dynstr"], bytes(strings.data))
        if ".rela.dyn" in by_name:
            fixes, relative = self.fixes(addresses)
            _put(out, by_name[".rela.dyn"], fixes)
        else:
            relative = 0
        _put(out, by_name[".dynamic"], dynamic_section(self.needed, strings, by_name, relative))
        _put(out, by_name[".note.gnu.build-id"], _NOTE + bytes(_BUILD_ID))
        self.finish(out, parts, segments, addresses)
        digest = hashlib.sha256(out).digest()[:_BUILD_ID]
        _put(out, by_name[".note.gnu.build-id"], _NOTE + digest)
        return bytes(out)

    def tables(self, string_bytes: int) -> list[ElfPart]:
        """The sections that the linker makes, with their sizes."""
        resolved, machine = self.resolved, self.resolved.machine
        names = len(resolved.imports) + len(resolved.exported)
        slots = 8 * len(resolved.slots) + 16 * (len(resolved.threads) + resolved.module)
        jumps = machine.jump_size * len(resolved.jumps)
        written, code = SHF_ALLOC | SHF_WRITE, SHF_ALLOC | SHF_EXECINSTR
        # Name, segment, flags, alignment, kind, bytes of an entry, the section that it belongs to, bytes.
        rows = (
            (".note.gnu.build-id", READ, SHF_ALLOC, 4, SHT_NOTE, 0, "", len(_NOTE) + _BUILD_ID),
            (".hash", READ, SHF_ALLOC, 8, SHT_HASH, 4, ".dynsym", len(hash_table(["x"] * names))),
            (".dynsym", READ, SHF_ALLOC, 8, SHT_DYNSYM, SYMBOL.size, ".dynstr", SYMBOL.size * (1 + names)),
            (".dynstr", READ, SHF_ALLOC, 1, SHT_STRTAB, 0, "", string_bytes),
            (".rela.dyn", READ, SHF_ALLOC, 8, SHT_RELA, RELA.size, ".dynsym", RELA.size * self.dynamic_fixes),
            (".plt", RUN, code, 16, SHT_PROGBITS, 0, "", jumps),
            (".dynamic", RELRO, written, 8, SHT_DYNAMIC, DYNAMIC.size, ".dynstr", self.dynamic_bytes),
            (".got", RELRO, written, 16, SHT_PROGBITS, 0, "", slots),
        )
        parts = []
        for name, segment, flags, alignment, kind, entry, link, size in rows:
            info = 1 if kind == SHT_DYNSYM else 0  # the first symbol that is not local
            if size:
                parts.append(ElfPart(name, segment, flags, alignment, kind, entry, link, info, size))
        return parts

    @property
    def dynamic_bytes(self) -> int:
        return DYNAMIC.size * (len(self.needed) + 11)

    @property
    def dynamic_fixes(self) -> int:
        r = self.resolved
        return len(r.slots) + len(r.threads) + r.module + len(r.pointers)

    def program_headers(self, parts: list[ElfPart]) -> int:
        loads = len({p.segment for p in parts})
        return loads + 4 + any(p.flags & SHF_TLS for p in parts)

    def copy(self, out: bytearray, parts: list[ElfPart]) -> None:
        """The sections of the objects, as they were."""
        for part in parts:
            if not part.in_file:
                continue
            if part.flags & SHF_EXECINSTR:  # between functions: traps, not zeros
                fill = b"\xcc" if self.resolved.machine.jump_size == 8 else b"\0"
                out[part.offset : part.offset + part.size] = fill * part.size
            for (owner, index), at in part.members.items():
                section = self.resolved.objects[owner].sections[index]
                out[part.offset + at : part.offset + at + section.size] = section.data

    def fill_offset_table(self, out: bytearray, addresses: _Addresses) -> None:
        """Jumps through the offset table, and what in it is known before the library is loaded."""
        machine, parts = self.resolved.machine, addresses.parts
        for k, target in enumerate(self.resolved.jumps):
            at = machine.jump_size * k
            code = machine.jump(parts[".plt"].address + at, addresses.slot(target))
            start = parts[".plt"].offset + at
            out[start : start + len(code)] = code
        for d in self.resolved.threads if machine.thread_words else ():
            start = parts[".got"].offset + addresses.thread(d) - parts[".got"].address
            out[start + 8 : start + 16] = addresses.thread_offset(d).to_bytes(8, "little")

    def fixes(self, addresses: _Addresses) -> tuple[bytes, int]:
        """What the loader does: relocations, and how many of them only add where the library lies, which come first."""
        machine, names = self.resolved.machine, {i: 1 + k for k, i in enumerate(self.resolved.imports)}
        relative, others = [], []
        for target in self.resolved.slots:
            if isinstance(target, ImportedSymbol):
                others.append((addresses.slot(target), names[target] << 32 | machine.slot, 0))
            else:
                relative.append((addresses.slot(target), machine.relative, addresses.of(target)))
        for use in self.resolved.pointers:
            at = addresses.place(use)
            if isinstance(use.target, ImportedSymbol):
                others.append((at, names[use.target] << 32 | machine.pointer, use.fix.addend))
            else:
                relative.append((at, machine.relative, addresses.of(use.target) + use.fix.addend))
        for d in self.resolved.threads:
            addend = 0 if machine.thread_words else addresses.thread_offset(d)
            others.append((addresses.thread(d), machine.thread, addend))
        if self.resolved.module:
            others.append((addresses.module, machine.thread, 0))
        return b"".join(RELA.pack(*r) for r in (*sorted(relative), *others)), len(relative)

    def finish(self, out: bytearray, parts: list[ElfPart], segments: list[ElfSegment], addresses: _Addresses) -> None:
        """The tables that debuggers and profilers read, and the headers."""
        table, texts, first_global = symbol_table(self.resolved, parts, addresses.of, addresses.thread_offset)
        names = Strings()
        rows = [SECTION_HEADER.pack(*[0] * 10)]
        numbers = {p.name: k + 1 for k, p in enumerate(parts)}
        for p in parts:
            rows.append(SECTION_HEADER.pack(names.place(p.name), p.kind, p.flags, p.address, p.offset, p.size,
                                            numbers.get(p.link, 0), p.info, p.alignment, p.entry_size))  # fmt: skip
        for name, data, kind, entry in ((".symtab", table, SHT_SYMTAB, SYMBOL.size), (".strtab", texts, SHT_STRTAB, 0)):
            out += bytes(aligned(len(out), 8) - len(out))
            link, info = (len(rows) + 1, first_global) if kind == SHT_SYMTAB else (0, 0)
            rows.append(SECTION_HEADER.pack(names.place(name), kind, 0, 0, len(out), len(data), link, info,
                                            8 if entry else 1, entry))  # fmt: skip
            out += data
        own = names.place(".shstrtab")
        rows.append(SECTION_HEADER.pack(own, SHT_STRTAB, 0, 0, len(out), len(names.data), 0, 0, 1, 0))
        out += names.data
        out += bytes(aligned(len(out), 8) - len(out))
        program = self.program(parts, segments)
        out[: HEADER.size] = HEADER.pack(
            MAGIC.ljust(16, b"\0"), ET_DYN, self.resolved.machine.number, 1, 0, HEADER.size, len(out), 0, HEADER.size,
            PROGRAM_HEADER.size, len(program), SECTION_HEADER.size, len(rows), len(rows) - 1,
        )  # fmt: skip
        out[HEADER.size : HEADER.size + PROGRAM_HEADER.size * len(program)] = b"".join(program)
        out += b"".join(rows)

    def program(self, parts: list[ElfPart], segments: list[ElfSegment]) -> list[bytes]:
        """What the loader reads first: what to map, and where tables lie."""
        page = self.resolved.machine.page
        rows = [
            PROGRAM_HEADER.pack(PT_LOAD, s.access, s.offset, s.address, s.address, s.file_size, s.size, page)
            for s in segments
        ]
        by_name = {p.name: p for p in parts}
        threads = [p for p in parts if p.flags & SHF_TLS]
        if threads:
            first, last = threads[0], threads[-1]
            start, alignment = first.address, max(p.alignment for p in threads)
            in_file = sum(p.size for p in threads if p.in_file)
            size = last.address + last.size - start
            rows.append(PROGRAM_HEADER.pack(PT_TLS, PF_R, first.offset, start, start, in_file, size, alignment))
        for kind, access, name in ((PT_DYNAMIC, PF_R | PF_W, ".dynamic"), (PT_NOTE, PF_R, ".note.gnu.build-id")):
            p = by_name[name]
            rows.append(PROGRAM_HEADER.pack(kind, access, p.offset, p.address, p.address, p.size, p.size, p.alignment))
        inside = next(s for s in segments if s.address <= by_name[".dynamic"].address < s.address + s.size)
        rows.append(
            PROGRAM_HEADER.pack(PT_GNU_RELRO, PF_R, inside.offset, inside.address, inside.address, inside.file_size,
                                inside.size, 1)
        )  # fmt: skip
        rows.append(PROGRAM_HEADER.pack(PT_GNU_STACK, PF_R | PF_W, 0, 0, 0, 0, 0, 16))
        return rows


@dataclass(slots=True)
class _Addresses:
    """Where everything lies, once the parts have their places."""

    resolved: Resolved
    parts: dict[str, ElfPart]
    homes: dict[tuple[int, int], ElfPart]

    def __init__(self, resolved: Resolved, parts: dict[str, ElfPart]) -> None:
        self.resolved, self.parts = resolved, parts
        self.homes = {member: p for p in parts.values() for member in p.members}

    def of(self, d: DefinedSymbol) -> int:
        symbol = self.resolved.symbol(d)
        assert symbol.section is not None
        part = self.homes[d.owner, symbol.section]
        return part.address + part.members[d.owner, symbol.section] + symbol.value

    def index_of(self, d: DefinedSymbol) -> int:
        """The number of the section that a symbol is in."""
        section = self.resolved.symbol(d).section
        assert section is not None
        return 1 + list(self.parts.values()).index(self.homes[d.owner, section])

    def place(self, use: Use) -> int:
        part = self.homes[use.owner, use.section]
        return part.address + part.members[use.owner, use.section] + use.fix.offset

    def slot(self, target: Target) -> int:
        before = 16 * (len(self.resolved.threads) + self.resolved.module)
        return self.parts[".got"].address + before + 8 * self.resolved.slots.index(target)

    @property
    def module(self) -> int:
        return self.parts[".got"].address + 16 * len(self.resolved.threads)

    def thread(self, d: DefinedSymbol) -> int:
        return self.parts[".got"].address + 16 * self.resolved.threads.index(d)

    def thread_offset(self, d: DefinedSymbol) -> int:
        first = min(p.address for p in self.parts.values() if p.flags & SHF_TLS)
        return self.of(d) - first

    def value(self, use: Use) -> int:
        target, wants = use.target, use.kind.wants
        if wants is Wants.SLOT:
            return self.slot(target)
        if wants is Wants.THREAD and isinstance(target, DefinedSymbol):
            return self.thread(target)
        if wants is Wants.MODULE:
            return self.module
        if wants is Wants.THREAD_OFFSET and isinstance(target, DefinedSymbol):
            return self.thread_offset(target)
        if isinstance(target, ImportedSymbol):
            if wants is Wants.CALL:
                number = self.resolved.jumps.index(target)
                return self.parts[".plt"].address + self.resolved.machine.jump_size * number
            return 0
        return self.of(target)

    def write(self, out: bytearray, use: Use) -> None:
        if use.kind.wants in (Wants.POINTER, Wants.NOTHING):
            return  # the loader writes the one, and the other is no address
        part = self.homes[use.owner, use.section]
        at = part.offset + part.members[use.owner, use.section] + use.fix.offset
        if not use.kind.write(out, at, self.place(use), self.value(use) + use.fix.addend):
            given = self.resolved.objects[use.owner]
            raise ElfError(
                f"{given.name}, {given.sections[use.section].name}+{use.fix.offset:#x}: {use.kind.name} does not reach "
                f"{given.symbols[use.fix.symbol].name or 'its section'}, or is not aligned as it has to be"
            )


def _put(out: bytearray, part: ElfPart, data: bytes) -> None:
    assert len(data) == part.size, f"{part.name}: {len(data)} bytes for {part.size}"
    out[part.offset : part.offset + part.size] = data
