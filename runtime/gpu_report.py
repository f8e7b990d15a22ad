"""What a compiled GPU kernel takes: registers, spills, shared memory, and how wide its accesses of global memory
are."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Attributes of a cubin's .nv.info section, each a symbol index and a number.
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-zL:_0-9]+?)*?(?:\.v([248]))?\.[bufs](8|16|32|64|128)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)\s*[,;]")
_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}


@dataclass(frozen=True, slots=True)
class ResourceReport:
    """``registers`` per thread; ``spills`` bytes of local memory per thread; ``shared`` bytes per block;
    ``wide_loads`` and ``wide_stores`` the share of 16-byte instructions among the global loads and stores, by bytes
    (1.0 where there are none).
    """

    registers: int
    spills: int
    shared: int
    wide_loads: float
    wide_stores: float


def report_nvidia(name: str, cubin: bytes, ptx: str, shared: int) -> ResourceReport:
    """From the cubin's ELF sections and the PTX text; no disassembler is needed."""
    info = dict(_nv_info(cubin))
    widths: dict[str, list[int]] = {"ld": [], "st": []}
    for line in ptx.splitlines():
        for op, vector, bits in _PTX_ACCESS.findall(line):
            widths[op].append(int(vector or 1) * _WIDTHS[bits])
        # Copies to shared memory that the program does not wait for.
        widths["ld"] += [int(size, 0) for size in _PTX_COPY.findall(line)]
    return ResourceReport(
        info.get(_REGISTER_COUNT, 0), info.get(_FRAME_SIZE, 0), shared, _wide(widths["ld"]), _wide(widths["st"])
    )


def report_amd(name: str, assembly: str, shared: int) -> ResourceReport:
    """From the metadata and the instructions of the AMDGCN text."""

    def field(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", assembly)
        return int(found.group(1)) if found else 0

    widths: dict[str, list[int]] = {"load": [], "store": []}
    for op, kind in _AMD_ACCESS.findall(assembly):
        width = next((w for suffix, w in _AMD_WIDTHS.items() if kind.startswith(suffix)), 0)
        widths[op].append(width or 4)
    spills = 4 * (field("vgpr_spill_count") + field("sgpr_spill_count"))
    return ResourceReport(field("vgpr_count"), spills, shared, _wide(widths["load"]), _wide(widths["store"]))


def _wide(widths: list[int]) -> float:
    total = sum(widths)
    return sum(w for w in widths if w >= 16) / total if total else 1.0


def _nv_info(cubin: bytes) -> Iterator[tuple[int, int]]:
    """``(attribute, greatest value)`` of a cubin's .nv.info section (the kernel and the functions it calls)."""
    best: dict[int, int] = {}
    for name, data in _sections(cubin):
        if name != ".nv.info":
            continue
        at = 0
        while at + 4 <= len(data):
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form != 4:  # the value is in the size field itself
                continue
            if attribute in (_REGISTER_COUNT, _FRAME_SIZE) and size >= 8:
                _, value = struct.unpack_from("<II", data, at)
                best[attribute] = max(best.get(attribute, 0), value)
            at += size
    return iter(best.items())


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of the sections of a 64-bit little-endian ELF file."""
    if elf[:4] != b"\x7fELF":
        return
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + k * size) for k in range(count)]
    names = headers[names_at]
    for name, _, _, _, offset, length in headers:
        start = names[4] + name
        text = elf[start : elf.index(b"\0", start)].decode("ascii", "replace")
        yield text, elf[offset : offset + length]
