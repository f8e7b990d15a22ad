"""Several relocatable objects become one, for builds of other people's: what is not exported becomes local, so that
two models may be linked into one program."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .format import (
    ET_REL,
    HEADER,
    MAGIC,
    RELA,
    SECTION_HEADER,
    SHF_INFO_LINK,
    SHT_PROGBITS,
    SHT_RELA,
    SHT_STRTAB,
    SHT_SYMTAB,
    STB_GLOBAL,
    STB_LOCAL,
    STT_FILE,
    STT_NOTYPE,
    STT_SECTION,
    SYMBOL,
    Fix,
    ObjectFile,
    Strings,
    aligned,
)
from .layout import ElfPart
from .resolve import resolve

# That a linker may share equal constants of a section, or that it is one of a group, holds for one object alone.
_ALONE = 0x10 | 0x20 | 0x200


def merge_objects(objects: Sequence[ObjectFile], exported: Collection[str], imports: Collection[str]) -> bytes:
    """One relocatable object with the sections of all; equal arguments give equal bytes.

    Only ``exported`` names stay visible. Raises: ElfError as ``link_shared`` does.
    """
    resolved = resolve(objects, exported, imports)
    parts, homes = _parts(objects)
    numbers = {id(p): k for k, p in enumerate(parts, start=1)}
    names, texts = Strings(), Strings()
    local = [SYMBOL.pack(0, 0, 0, 0, 0, 0)]
    local += [SYMBOL.pack(0, STT_SECTION, 0, k, 0, 0) for k in range(1, len(parts) + 1)]
    visible: list[bytes] = []
    places: dict[tuple[int, int], tuple[bool, int]] = {}  # of symbols: whether visible, and the place among such
    outside: dict[str, int] = {}
    for owner, given in enumerate(objects):
        for index, s in enumerate(given.symbols):
            if s.section is None or s.kind in (STT_FILE, STT_SECTION):
                continue
            part = homes[owner, s.section]
            seen = not s.is_local and s.name in resolved.exported
            info = (STB_GLOBAL if seen else STB_LOCAL) << 4 | s.kind
            value = part.members[owner, s.section] + s.value
            row = SYMBOL.pack(texts.place(s.name if s.is_told else ""), info, 0, numbers[id(part)], value, s.size)
            rows = visible if seen else local
            places[owner, index] = seen, len(rows)
            rows.append(row)
    for name in (i.name for i in resolved.imports):
        outside[name] = len(visible)
        visible.append(SYMBOL.pack(texts.place(name), STB_GLOBAL << 4 | STT_NOTYPE, 0, 0, 0, 0))

    def fixed_up(owner: int, section: int, fix: Fix) -> bytes:
        """A relocation with its place and symbol among those of all objects."""
        at = homes[owner, section].members[owner, section] + fix.offset
        symbol = objects[owner].symbols[fix.symbol]
        if symbol.kind == STT_SECTION and symbol.section is not None:
            part = homes[owner, symbol.section]
            addend = fix.addend + part.members[owner, symbol.section] + symbol.value
            return RELA.pack(at, numbers[id(part)] << 32 | fix.kind, addend)
        where = (owner, fix.symbol)
        if not symbol.is_local and symbol.name in resolved.globals:
            d = resolved.globals[symbol.name]
            where = (d.owner, d.index)
        elif symbol.section is None:
            return RELA.pack(at, (len(local) + outside[symbol.name]) << 32 | fix.kind, fix.addend)
        seen, place = places[where]
        return RELA.pack(at, (len(local) * seen + place) << 32 | fix.kind, fix.addend)

    out = bytearray(HEADER.size)
    rows = [SECTION_HEADER.pack(*[0] * 10)]

    def add(name: str, kind: int, flags: int, data: bytes, size: int, rest: tuple[int, int, int, int]) -> None:
        link, info, alignment, entry = rest
        out.extend(bytes(aligned(len(out), alignment) - len(out)))
        rows.append(SECTION_HEADER.pack(names.place(name), kind, flags, 0, len(out), size, link, info, alignment,
                                        entry))  # fmt: skip
        out.extend(data)

    fixes = [b"".join(fixed_up(o, k, fix) for o, k in p.members for fix in objects[o].sections[k].fixes) for p in parts]
    table = 1 + len(parts) + sum(map(bool, fixes)) + 1
    for part in parts:
        data = bytearray(part.size if part.in_file else 0)
        for (owner, k), at in part.members.items():
            section = objects[owner].sections[k]
            data[at : at + len(section.data)] = section.data
        add(part.name, part.kind, part.flags, bytes(data), part.size, (0, 0, part.alignment, part.entry_size))
    for k, (part, found) in enumerate(zip(parts, fixes, strict=True), start=1):
        if found:
            add(f".rela{part.name}", SHT_RELA, SHF_INFO_LINK, found, len(found), (table, k, 8, RELA.size))
    add(".note.GNU-stack", SHT_PROGBITS, 0, b"", 0, (0, 0, 1, 0))
    symbols = b"".join([*local, *visible])
    add(".symtab", SHT_SYMTAB, 0, symbols, len(symbols), (table + 1, len(local), 8, SYMBOL.size))
    add(".strtab", SHT_STRTAB, 0, bytes(texts.data), len(texts.data), (0, 0, 1, 0))
    names.place(".shstrtab")
    add(".shstrtab", SHT_STRTAB, 0, bytes(names.data), len(names.data), (0, 0, 1, 0))
    out += bytes(aligned(len(out), 8) - len(out))
    out[: HEADER.size] = HEADER.pack(
        MAGIC.ljust(16, b"\0"), ET_REL, resolved.machine.number, 1, 0, 0, len(out), 0, HEADER.size, 0, 0,
        SECTION_HEADER.size, len(rows), len(rows) - 1,
    )  # fmt: skip
    return bytes(out) + b"".join(rows)


def _parts(objects: Sequence[ObjectFile]) -> tuple[list[ElfPart], dict[tuple[int, int], ElfPart]]:
    """The sections of all objects, those of one name and kind behind each other."""
    parts: dict[tuple[str, int, int], ElfPart] = {}
    homes = {}
    for owner, given in enumerate(objects):
        for k, section in enumerate(given.sections):
            flags = section.flags & ~_ALONE
            key = (section.name, section.kind, flags)
            part = parts.setdefault(key, ElfPart(section.name, 0, flags, 1, section.kind))
            part.add(owner, k, section)
            homes[owner, k] = part
    return list(parts.values()), homes
