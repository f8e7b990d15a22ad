"""The tables of a shared object: what the loader looks names up in, and what debuggers read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .format import (
    DF_1_NOW,
    DF_BIND_NOW,
    DT_FLAGS,
    DT_FLAGS_1,
    DT_HASH,
    DT_NEEDED,
    DT_RELA,
    DT_RELACOUNT,
    DT_RELAENT,
    DT_RELASZ,
    DT_STRSZ,
    DT_STRTAB,
    DT_SYMENT,
    DT_SYMTAB,
    DYNAMIC,
    RELA,
    STB_GLOBAL,
    STB_LOCAL,
    STT_FILE,
    STT_NOTYPE,
    STT_SECTION,
    STT_TLS,
    SYMBOL,
    Strings,
)
from .layout import ElfPart
from .resolve import DefinedSymbol, Resolved


def dynamic_symbols(
    resolved: Resolved,
    order: Sequence[tuple[str, int]],
    exported: Sequence[DefinedSymbol],
    strings: Strings,
    section: Callable[[DefinedSymbol], int],
) -> bytes:
    """What the loader sees: imports, which have no section, then what is exported; ``order`` gives addresses."""
    rows = [SYMBOL.pack(0, 0, 0, 0, 0, 0)]
    imports = len(order) - len(exported)
    for k, (name, address) in enumerate(order):
        if k < imports:
            rows.append(SYMBOL.pack(strings.place(name), STB_GLOBAL << 4 | STT_NOTYPE, 0, 0, 0, 0))
            continue
        d = exported[k - imports]
        s = resolved.symbol(d)
        rows.append(SYMBOL.pack(strings.place(name), STB_GLOBAL << 4 | s.kind, 0, section(d), address, s.size))
    return b"".join(rows)


def hash_table(names: Sequence[str]) -> bytes:
    """The hash table of System V over symbols 1, 2, …, as many buckets as symbols."""
    buckets, chains = [0] * max(len(names), 1), [0] * (len(names) + 1)
    for k, name in enumerate(names, start=1):
        bucket = _hash(name) % len(buckets)
        chains[k], buckets[bucket] = buckets[bucket], k
    return b"".join(v.to_bytes(4, "little") for v in (len(buckets), len(chains), *buckets, *chains))


def _hash(name: str) -> int:
    h = 0
    for byte in name.encode():
        h = (h << 4) + byte
        high = h & 0xF0000000
        h = (h ^ high >> 24) & ~high & 0xFFFFFFFF
    return h


def dynamic_section(needed: Sequence[str], strings: Strings, parts: Mapping[str, ElfPart], relative: int) -> bytes:
    """Where the loader finds everything, and that it is to bind all names at once."""
    rows = [(DT_NEEDED, strings.place(n)) for n in needed]
    fixes = parts.get(".rela.dyn")
    rows += [
        (DT_HASH, parts[".hash"].address),
        (DT_STRTAB, parts[".dynstr"].address),
        (DT_SYMTAB, parts[".dynsym"].address),
        (DT_STRSZ, parts[".dynstr"].size),
        (DT_SYMENT, SYMBOL.size),
        (DT_FLAGS, DF_BIND_NOW),
        (DT_FLAGS_1, DF_1_NOW),
    ]
    if fixes is not None:
        rows += [(DT_RELA, fixes.address), (DT_RELASZ, fixes.size), (DT_RELAENT, RELA.size)]
        rows += [(DT_RELACOUNT, relative)] * (relative > 0)
    rows += [(0, 0)] * (parts[".dynamic"].size // DYNAMIC.size - len(rows))
    return b"".join(DYNAMIC.pack(*r) for r in rows)


def symbol_table(
    resolved: Resolved,
    parts: Sequence[ElfPart],
    address: Callable[[DefinedSymbol], int],
    thread_offset: Callable[[DefinedSymbol], int],
) -> tuple[bytes, bytes, int]:
    """All functions and objects by their names: the table, its strings, and where its global symbols begin."""
    numbers = {member: k + 1 for k, p in enumerate(parts) for member in p.members}
    strings = Strings()
    local = [SYMBOL.pack(0, 0, 0, 0, 0, 0)]
    exported: list[bytes] = []
    for owner, given in enumerate(resolved.objects):
        for index, s in enumerate(given.symbols):
            if s.section is None or not s.is_told or s.kind in (STT_SECTION, STT_FILE):
                continue
            d = DefinedSymbol(owner, index)
            value = thread_offset(d) if s.kind == STT_TLS else address(d)
            seen = not s.is_local and s.name in resolved.exported
            info = (STB_GLOBAL if seen else STB_LOCAL) << 4 | s.kind
            row = SYMBOL.pack(strings.place(s.name), info, 0, numbers[owner, s.section], value, s.size)
            (exported if seen else local).append(row)
    return b"".join([*local, *exported]), bytes(strings.data), len(local)
