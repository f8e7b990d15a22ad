"""What a compiled GPU kernel takes: registers, spills, shared memory, how wide its accesses of global memory are, and
whether it multiplies on the tensor cores."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .occupancy import occupancy

# Attributes of a cubin's .nv.info section, each a symbol index and a number.
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
_WIDEST = 16
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-zL:_0-9]+?)*?(?:\.v([248]))?\.[bufs](8|16|32|64|128)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)\s*[,;]")
# Copies of whole tiles by the tensor memory accelerator; the size is in its descriptor.
_PTX_BULK_LOAD = re.compile(r"\bcp\.async\.bulk\.(?:tensor\.)?[^;]*?\.shared::c(?:luster|ta)\.global\b")
_PTX_BULK_STORE = re.compile(r"\bcp\.async\.bulk\.(?:tensor\.)?[^;]*?\.global\.shared::cta\b")
_PTX_WGMMA = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma)\b")
_PTX_MMA = re.compile(r"\bw?mma\.(?:mma\.)?sync\b")
_AMD_MFMA = re.compile(r"\bv_(?:s?mfmac?|swmmac|wmma)_\w+")
# The sizes of accesses to memory, by how what follows "load_" or "store_" begins.
_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}
_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(\w+)")


@dataclass(frozen=True, slots=True)
class ResourceReport:
    """``registers`` per thread; ``spills`` bytes of local memory per thread; ``shared`` bytes per block;
    ``wide_loads`` and ``wide_stores`` the share of 16-byte instructions among the global loads and stores, by bytes
    (1.0 where there are none); a tile that the tensor memory accelerator copies counts as one of 16 bytes.
    ``group_products`` are the products of tiles by groups of warps (wgmma, tcgen05) and ``warp_products`` those by
    single warps (mma, MFMA), instructions as written. ``threads`` per block; ``occupancy`` is the share of a
    multiprocessor's threads that blocks can fill, None where its limits are not known.
    """

    registers: int
    spills: int
    shared: int
    wide_loads: float
    wide_stores: float
    group_products: int
    warp_products: int
    threads: int
    occupancy: float | None


def report_nvidia(arch: str, cubin: bytes, ptx: str, shared: int, threads: int) -> ResourceReport:
    """From the cubin's ELF sections and the PTX text; no disassembler is needed."""
    info = dict(_nv_info(cubin))
    widths: dict[str, list[int]] = {"ld": [], "st": []}
    for line in ptx.splitlines():
        for op, vector, bits in _PTX_ACCESS.findall(line):
            widths[op].append(int(vector or 1) * _WIDTHS[bits])
        # Copies to shared memory that the program does not wait for.
        widths["ld"] += [int(size, 0) for size in _PTX_COPY.findall(line)]
        widths["ld"] += [_WIDEST] * len(_PTX_BULK_LOAD.findall(line))
        widths["st"] += [_WIDEST] * len(_PTX_BULK_STORE.findall(line))
    registers = info.get(_REGISTER_COUNT, 0)
    return ResourceReport(
        registers,
        info.get(_FRAME_SIZE, 0),
        shared,
        _wide(widths["ld"]),
        _wide(widths["st"]),
        len(_PTX_WGMMA.findall(ptx)),
        len(_PTX_MMA.findall(ptx)),
        threads,
        occupancy(arch, registers, shared, threads),
    )


def spilled_nvidia(cubin: bytes) -> int:
    """Bytes of local memory a thread, from the cubin alone."""
    return dict(_nv_info(cubin)).get(_FRAME_SIZE, 0)


def spilled_amd(assembly: str) -> int:
    """Bytes of memory a thread for registers, from the metadata of the AMDGCN text."""
    return 4 * (_field(assembly, "vgpr_spill_count") + _field(assembly, "sgpr_spill_count"))


def _field(assembly: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", assembly)
    return int(found.group(1)) if found else 0


def access_bytes(kind: str) -> int:
    """The bytes that a lane of an access takes: 16 for "dwordx4"; 4 where the kind is not known."""
    return next((n for begin, n in _AMD_WIDTHS.items() if kind.startswith(begin)), 4)


def report_amd(arch: str, assembly: str, shared: int, threads: int) -> ResourceReport:
    """From the metadata and the instructions of the AMDGCN text."""
    widths: dict[str, list[int]] = {"load": [], "store": []}
    for op, kind in _AMD_ACCESS.findall(assembly):
        widths[op].append(access_bytes(kind))
    spills, registers = spilled_amd(assembly), _field(assembly, "vgpr_count")
    return ResourceReport(
        registers,
        spills,
        shared,
        _wide(widths["load"]),
        _wide(widths["store"]),
        0,
        len(_AMD_MFMA.findall(assembly)),
        threads,
        occupancy(arch, registers, shared, threads),
    )


def _wide(widths: list[int]) -> float:
    total = sum(widths)
    return sum(w for w in widths if w >= _WIDEST) / total if total else 1.0


def _nv_info(cubin: bytes) -> Iterator[tuple[int, int]]:
    """``(attribute, greatest value)`` of a cubin's .nv.info section (the kernel and the functions it calls)."""
    best: dict[int, int] = {}
    for name, data in elf_sections(cubin):
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


def elf_sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
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
