"""Shared objects for AArch64. No machine here runs them: instructions are read back, and the addresses that they form
are compared with where things lie."""

from __future__ import annotations

import itertools
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.codegen.elf.modules import objects
from tests.codegen.elf.test_link import ALL_KINDS, LIBRARIES, NAMES, OTHER, random_modules
from torch_mlc.codegen.elf.format import (
    HEADER,
    PROGRAM_HEADER,
    PT_GNU_RELRO,
    PT_LOAD,
    RELA,
    SECTION_HEADER,
    SHF_ALLOC,
    SHT_NOBITS,
    SHT_RELA,
    SHT_SYMTAB,
    SYMBOL,
)
from torch_mlc.codegen.elf.link import link_shared
from torch_mlc.codegen.elf.merge import merge_objects
from torch_mlc.codegen.elf.read import read_object

THREADS = """
@mine = thread_local global i64 5
define i64 @f(i64 %x) {
  %old = load i64, ptr @mine
  %new = add i64 %old, %x
  store i64 %new, ptr @mine
  ret i64 %new
}
"""


@dataclass
class Image:
    """A shared object as a loader maps it at address zero."""

    data: bytes

    def __post_init__(self) -> None:
        head = HEADER.unpack_from(self.data)
        sections, count, names = head[6], head[12], head[13]
        rows = [SECTION_HEADER.unpack_from(self.data, sections + k * SECTION_HEADER.size) for k in range(count)]
        texts = rows[names][4]
        self.sections = {self.text(texts + r[0]): r for r in rows[1:]}
        self.segments = [
            PROGRAM_HEADER.unpack_from(self.data, head[5] + k * PROGRAM_HEADER.size) for k in range(head[10])
        ]
        self.memory = bytearray(max(s[3] + s[6] for s in self.segments if s[0] == PT_LOAD))
        for kind, _, offset, address, _, size, _, _ in self.segments:
            if kind == PT_LOAD:
                self.memory[address : address + size] = self.data[offset : offset + size]
        table = next(r for r in rows if r[1] == SHT_SYMTAB)
        self.symbols = {}
        for at in range(table[4], table[4] + table[5], SYMBOL.size):
            name, _, _, _, value, size = SYMBOL.unpack_from(self.data, at)
            self.symbols[self.text(rows[table[6]][4] + name)] = (value, size)
        fixes = next((r for r in rows if r[1] == SHT_RELA), None)
        self.fixes = {}
        if fixes:
            for at in range(fixes[4], fixes[4] + fixes[5], RELA.size):
                place, info, addend = RELA.unpack_from(self.data, at)
                self.fixes[place] = (info & 0xFFFFFFFF, info >> 32, addend)

    def text(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def word(self, at: int) -> int:
        return int(struct.unpack_from("<I", self.memory, at)[0])

    def code(self, name: str) -> range:
        value, size = self.symbols[name]
        return range(value, value + size, 4)


def page_of(word: int, at: int) -> int:
    """The page that an ADRP forms."""
    pages = (word >> 29 & 3) | (word >> 5 & 0x7FFFF) << 2
    pages -= (pages >> 20) << 21
    return (at & ~0xFFF) + (pages << 12)


def branch_of(word: int, at: int) -> int:
    distance = word & 0x3FFFFFF
    return at + 4 * (distance - ((distance >> 25) << 26))


def formed(image: Image, name: str) -> set[int]:
    """Addresses that a function forms by ADRP with ADD or with a load or store, and where it branches with a link."""
    found, pages = set(), {}
    for at in image.code(name):
        word = image.word(at)
        if word & 0x9F000000 == 0x90000000:
            pages[word & 31] = page_of(word, at)
        elif word & 0xFFC00000 == 0x91000000 and word >> 5 & 31 in pages:
            found.add(pages[word >> 5 & 31] + (word >> 10 & 0xFFF))
        elif word & 0x3B000000 == 0x39000000 and word >> 5 & 31 in pages:
            scale = word >> 30 if not word & 1 << 26 else (word >> 30) | (word >> 21 & 4)
            found.add(pages[word >> 5 & 31] + ((word >> 10 & 0xFFF) << scale))
        elif word & 0x7C000000 == 0x14000000:
            found.add(branch_of(word, at))
    return found


@pytest.fixture(scope="module")
def image() -> Image:
    parts = objects([ALL_KINDS, OTHER], "aarch64")
    return Image(link_shared(parts, NAMES, ("pow", "strlen"), LIBRARIES))


def test_code_forms_the_addresses_of_symbols(image: Image) -> None:
    assert image.symbols["counter"][0] in formed(image, "first")
    assert image.symbols["zeros"][0] in formed(image, "third")
    assert image.symbols["table"][0] in formed(image, "by_table")
    assert image.symbols["moved"][0] in formed(image, "length")
    assert {image.symbols[n][0] for n in ("first", "third")} <= formed(image, "jump") | {0} | {
        branch_of(image.word(at), at) for at in image.code("jump") if image.word(at) & 0x7C000000 == 0x14000000
    }


def test_what_other_libraries_have_is_reached_by_the_offset_table(image: Image) -> None:
    got, jumps = image.sections[".got"], image.sections[".plt"]
    slots = {at for at, (kind, symbol, _) in image.fixes.items() if kind == 1025 and symbol}
    assert len(slots) == 2 and all(got[3] <= s < got[3] + got[5] for s in slots)
    targets = set()
    for at in range(jumps[3], jumps[3] + jumps[5], 16):
        adrp, ldr, br = (image.word(at + 4 * k) for k in range(3))
        assert br == 0xD61F0220 and ldr & 0xFFC003FF == 0xF9400211
        targets.add(page_of(adrp, at) + (ldr >> 10 & 0xFFF) * 8)
    assert targets == slots
    called = formed(image, "length") | formed(image, "power")
    assert {at for at in range(jumps[3], jumps[3] + jumps[5], 16)} <= called
    # The address of a function of another library is loaded, not computed.
    assert formed(image, "function_of_mathematics") & slots


def test_data_that_hold_addresses_are_the_loaders(image: Image) -> None:
    table = image.symbols["table"][0]
    for k, name in enumerate(("first", "second", "third")):
        assert image.fixes[table + 8 * k] == (1027, 0, image.symbols[name][0])
    assert image.fixes[image.symbols["moved"][0]] == (1027, 0, image.symbols["text"][0] + 2)


def test_segments_suit_pages_of_64_kib(image: Image) -> None:
    loads = [s for s in image.segments if s[0] == PT_LOAD]
    for _, _, offset, address, _, _, _, alignment in loads:
        assert alignment == 65536 and offset % 65536 == address % 65536
    pages = [(s[3] >> 16, (s[3] + s[6] - 1) >> 16) for s in loads]
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(pages))
    relro = next(s for s in image.segments if s[0] == PT_GNU_RELRO)
    assert (relro[3] + relro[6]) % 65536 == 0
    for name, (_, kind, flags, address, offset, size, *_) in image.sections.items():
        if flags & SHF_ALLOC and kind != SHT_NOBITS:
            assert image.memory[address : address + size] == image.data[offset : offset + size], name


def test_memory_of_threads_is_found_by_descriptors() -> None:
    image = Image(link_shared(objects([THREADS], "aarch64"), ["f"], (), LIBRARIES))
    descriptors = [at for at, (kind, _, _) in image.fixes.items() if kind == 1031]
    assert len(descriptors) == 1 and descriptors[0] in formed(image, "f")


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_link(seed: int) -> None:
    """Every call of a random program reaches the begin of a function."""
    texts = random_modules(seed)
    last = max(int(n) for n in re.findall(r"define (?:hidden )?i64 @f(\d+)", "".join(texts)))
    parts = objects(texts, "aarch64")
    image = Image(link_shared(parts, [f"f{last}"], (), LIBRARIES))
    begins = {image.symbols[n][0] for n in image.symbols if re.fullmatch(r"f\d+", n)}
    calls = 0
    for name in image.symbols:
        for at in image.code(name) if re.fullmatch(r"f\d+", name) else ():
            if image.word(at) >> 26 == 0b100101:
                assert branch_of(image.word(at), at) in begins
                calls += 1
    assert calls or seed
    again = read_object(merge_objects(parts, [f"f{last}"], ()), "merged")
    assert Image(link_shared([again], [f"f{last}"], (), LIBRARIES)).memory


@pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf to read the library with")
def test_readelf_finds_all_in_order(image: Image, tmp_path: Path) -> None:
    path = tmp_path / "it.so"
    path.write_bytes(image.data)
    done = subprocess.run(["readelf", "-Wa", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not re.search("warning|error", done.stderr + done.stdout, re.IGNORECASE)
    assert "AArch64" in done.stdout and "TEXTREL" not in done.stdout
