"""How much of what kernels move goes in accesses of 16 bytes, each array by the bytes that it is of the traffic.

Instructions alone would say less: a number for each row takes as many of them as a wide load of the row does, and is
nothing beside it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch_mlc.dynamo_backend.reports.report import KernelReport

_WIDEST = 16
_PARAMETER = re.compile(r"\bld\.param\.\w+\s+(%rd\d+),\s*\[\w+?_param_(\d+)\]")
_REGISTER = re.compile(r"%rd\d+")
_ACCESS = re.compile(
    r"\b(?P<op>ld|st)\.global(?:\.[a-zL:_0-9]+?)*?(?:\.v(?P<count>[248]))?\.[bufs](?P<bits>8|16|32|64|128)\b"
    r"[^\[]*\[\s*(?P<at>%rd\d+)"
)
_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\],\s*\[\s*(?P<at>%rd\d+)[^,]*,\s*(?P<size>0x[0-9a-f]+|\d+)"
)


def wide_bytes(kernel: KernelReport, *, stores: bool) -> tuple[float, float]:
    """Bytes of a launch that are loaded (stored) in accesses of 16 bytes, and all that are.

    An array counts with its bytes of the traffic and the share of its own accesses. Where they are not told apart, as
    in the code of AMD's GPUs, that of the whole kernel is taken.
    """
    if kernel.traffic is None or kernel.resources is None:
        return 0.0, 0.0
    whole = kernel.resources.wide_stores if stores else kernel.resources.wide_loads
    shares = _shares(kernel, "st" if stores else "ld")
    moved = {name: v.written if stores else v.read for name, v in kernel.traffic.arrays.items()}
    return sum(n * shares.get(name, whole) for name, n in moved.items()), float(sum(moved.values()))


def _shares(kernel: KernelReport, op: str) -> Mapping[str, float]:
    if kernel.binary is None or kernel.kernel is None or kernel.binary.kind != "cuda" or kernel.kernel.option("table"):
        return {}
    widths: dict[int, list[int]] = defaultdict(list)
    for what, k, size in accesses(kernel.binary.assembly):
        if what == op:
            widths[k].append(size)
    names = [b.name for b in kernel.kernel.params]
    # Whole tiles that the tensor memory accelerator copies.
    shares = dict.fromkeys(str(kernel.kernel.option("descriptors", "")).split(","), 1.0)
    return shares | {
        names[k]: sum(w for w in found if w >= _WIDEST) / sum(found) for k, found in widths.items() if k < len(names)
    }


def accesses(ptx: str) -> Iterator[tuple[str, int, int]]:
    """Loads and stores of global memory as ("ld" or "st", the parameter whose array it is, bytes a lane)."""
    of: dict[str, int] = {r: int(k) for r, k in _PARAMETER.findall(ptx)}
    lines = [line for line in ptx.splitlines() if "%rd" in line]
    before = -1
    while before != len(of):  # addresses that a loop moves on come from behind, too
        before = len(of)
        for line in lines:
            # What is loaded is no address of the array that it was loaded from.
            registers = _REGISTER.findall(line) if "ld." not in line and "st." not in line else []
            known = next((of[r] for r in registers[1:] if r in of), None)
            if known is not None:
                of.setdefault(registers[0], known)
    for line in lines:
        for m in _ACCESS.finditer(line):
            if m["at"] in of:
                yield m["op"], of[m["at"]], int(m["count"] or 1) * int(m["bits"]) // 8
        for m in _COPY.finditer(line):
            if m["at"] in of:
                yield "ld", of[m["at"]], int(m["size"], 0)
