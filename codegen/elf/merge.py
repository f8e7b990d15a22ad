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
    SYMBOL,
    ObjectFile,
    Strings,
    aligned,
)
from .resolve import resolve


def merge_objects(objects: Sequence[ObjectFile], exported: Collection[str], imports: Collection[str]) -> bytes:
    """One relocatable object with the sections of all; equal arguments give equal bytes.

    Only ``exported`` names stay visible. Raises: ElfError as ``link_shared`` does.
    """
    resolved = resolve(objects, exported, imports)
    names, texts = Strings(), Strings()
    local, visible = [SYMBOL.pack(0, 0, 0, 0, 0, 0)], []
    places: dict[tuple[int, int], tuple[bool, int]] = {}  # of symbols: whether visible, and the place among such
    outside: dict[str, int] = {}
    first = _first_sections(objects)
    for owner, given in enumerate(objects):
        for index, s in enumerate(given.symbols):
            if s.section is None or s.kind == STT_FILE:
                continue
            seen = not s.is_local and s.name in resolved.exported
            info = (STB_GLOBAL if seen else STB_LOCAL) << 4 | s.kind
            name = "" if s.name.startswith(".L") else s.name
            row = SYMBOL.pack(texts.place(name), info, 0, first[owner] + s.section, s.value, s.size)
            rows = visible if seen else local
            places[owner, index] = seen, len(rows)
            rows.append(row)
    for name in (i.name for i in resolved.imports):
        outside[name] = len(visible)
        visible.append(SYMBOL.pack(texts.place(name), STB_GLOBAL << 4 | STT_NOTYPE, 0, 0, 0, 0))

    def number(owner: int, index: int) -> int:
        symbol = objects[owner].symbols[index]
        if not symbol.is_local and symbol.name in resolved.globals:
            d = resolved.globals[symbol.name]
            owner, index = d.owner, d.index
        elif symbol.section is None:
            return len(local) + outside[symbol.name]
        seen, place = places[owner, index]
        return len(local) * seen + place

    out = bytearray(HEADER.size)
    rows = [SECTION_HEADER.pack(*[0] * 10)]

    def add(name: str, kind: int, flags: int, data: bytes, size: int, rest: tuple[int, int, int, int]) -> None:
        link, info, alignment, entry = rest
        out.extend(bytes(aligned(len(out), alignment) - len(out)))
        rows.append(SECTION_HEADER.pack(names.place(name), kind, flags, 0, len(out), size, link, info, alignment,
                                        entry))  # fmt: skip
        out.extend(data)

    sections = [(owner, s) for owner, given in enumerate(objects) for s in given.sections]
    fixed = [(k, owner, s) for k, (owner, s) in enumerate(sections, start=1) if s.fixes]
    table = 1 + len(sections) + len(fixed) + 1
    for _, s in sections:
        add(s.name, s.kind, s.flags, s.data, s.size, (0, 0, s.alignment, 0))
    for k, owner, s in fixed:
        data = b"".join(RELA.pack(f.offset, number(owner, f.symbol) << 32 | f.kind, f.addend) for f in s.fixes)
        add(f".rela{s.name}", SHT_RELA, SHF_INFO_LINK, data, len(data), (table, k, 8, RELA.size))
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


def _first_sections(objects: Sequence[ObjectFile]) -> list[int]:
    """The number that the first section of each object gets."""
    first, found = 1, []
    for given in objects:
        found.append(first)
        first += len(given.sections)
    return found
