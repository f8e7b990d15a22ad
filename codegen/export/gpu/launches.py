"""What launches kernels in a library, in LLVM IR: a function for each kernel of each GPU, called as one of a CPU is.

``void NAME(int64_t *arguments)`` has the kernel's pointers and sizes, then an address of scratch memory where its
programs want such, then words for what went wrong. It computes the grid and how far indices reach, and launches the
variant that is right for both and for the addresses. Words: 3, the status, the kernel's name and the function's, where
the driver refuses; 4, and the name, where an address is no multiple of 16 bytes that has to be one.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from ....ir.expr.value import symbol
from ...host.code import SizedCode
from ...host.native.launch import RECORD_BYTES, launch_text
from ..codes import COPY, MISPLACED, REFUSED
from ..constants import Constants
from ..library import GpuVariant, LaunchedKernel
from ..routine import Routine
from .contexts import STREAM
from .device import KERNELS, RECORDS, launcher_symbol


def launches_text(constants: Constants, variants: Sequence[GpuVariant]) -> str:
    """All launchers, kernels under their own names, and ``@mlc_copy``."""
    launchers = [
        _launcher(constants, k, number, launcher_symbol(k.name, v))
        for v, variant in enumerate(variants)
        for number, k in enumerate(variant.kernels)
    ]
    names = [k.name for k in variants[0].kernels]
    stubs = [_stub(name, number) for number, name in enumerate(names)]
    return "".join([launch_text(exact=False), _launch(), _copy(constants), *launchers, *stubs])


def _launcher(constants: Constants, kernel: LaunchedKernel, number: int, name: str) -> str:
    source = kernel.source
    code = SizedCode(name)
    first = len(source.params)
    for k, size in enumerate(source.symbols):
        code.known[symbol(size)] = code.load("arguments", first + k)
    x, y, z = [*source.grid, sympy.S.One, sympy.S.One, sympy.S.One][:3]
    reach = sympy.S.Zero if source.reach is None else source.reach
    numbers = ", ".join(f"i64 {code.size(e)}" for e in (x, y, z, reach))
    count = first + len(source.symbols) + bool(kernel.scratch)
    record = f"i64 {number * RECORD_BYTES}"
    told = constants.text(kernel.name)
    code.line(
        f"call void @launch(ptr %arguments, {record}, {numbers}, i64 {count}, i64 {_mask(kernel.described)}, "
        f"i64 {first}, ptr {told})"
    )
    return "\n".join(
        [f'\ndefine hidden void @"{name}"(ptr %arguments) {{', "entry:", *code.lines, "  ret void", "}", ""]
    )


def _mask(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _stub(name: str, number: int) -> str:
    """A kernel by its name: a jump to its launcher for the GPU of the context."""
    r = Routine()
    own = r.value("call ptr @llvm.threadlocal.address.p0(ptr @calling)")
    context = r.value(f"load ptr, ptr {own}")
    device = r.load("ptr", "%Model", r.load("ptr", "%Context", context, 0), 4)
    launchers = r.load("ptr", "%Device", device, KERNELS)
    launcher = r.load("ptr", "ptr", launchers, number)
    r.line(f"tail call void {launcher}(ptr %arguments)")
    r.line("ret void")
    return r.text(f'\ndefine hidden void @"{name}"(ptr %arguments)')


def _launch() -> str:
    r = Routine()
    own = r.value("call ptr @llvm.threadlocal.address.p0(ptr @calling)")
    context = r.value(f"load ptr, ptr {own}")
    device = r.load("ptr", "%Model", r.load("ptr", "%Context", context, 0), 4)
    records = r.load("ptr", "%Device", device, RECORDS)
    record = r.value(f"getelementptr inbounds i8, ptr {records}, i64 %place")
    stream = r.load("ptr", "%Context", context, STREAM)
    words = r.value("getelementptr inbounds i64, ptr %arguments, i64 %count")
    with r.when(r.value("icmp ne i64 %described, 0"), "described"), r.each("%pointers", "pointer") as k:
        bit = r.value(f"lshr i64 %described, {k}")
        asked = r.value(f"trunc i64 {bit} to i1")
        address = r.load("i64", "i64", "%arguments", k)
        odd = r.value(f"icmp ne i64 {r.value(f'and i64 {address}, 15')}, 0")
        with r.when(r.value(f"and i1 {asked}, {odd}"), "misplaced"):
            r.store("i64", MISPLACED, "i64", words, 0)
            r.store("ptr", "%name", "i64", words, 2)
            r.line("ret void")
    status = r.value(
        f"call i32 @mlc_launch(ptr {record}, ptr %arguments, i64 %x, i64 %y, i64 %z, i64 %reach, ptr {stream})"
    )
    with r.when(r.value(f"icmp ne i32 {status}, 0"), "refused"):
        r.line(f"call void @refused(ptr {words}, i32 {status}, ptr %name, ptr @word_launch)")
    r.line("ret void")
    launched = r.text(
        '\n@word_launch = internal constant [15 x i8] c"cuLaunchKernel\\00"\n'
        "; Launch a kernel, whose record is so many bytes behind the first; words behind its arguments tell of it.\n"
        "define internal void @launch(ptr %arguments, i64 %place, i64 %x, i64 %y, i64 %z, i64 %reach, i64 %count,\n"
        "                             i64 %described, i64 %pointers, ptr %name)"
    )
    r = Routine()
    r.store("i64", REFUSED, "i64", "%words", 0)
    r.store("i64", r.value("sext i32 %status to i64"), "i64", "%words", 1)
    r.store("ptr", "%name", "i64", "%words", 2)
    r.store("ptr", "%function", "i64", "%words", 3)
    r.line("ret void")
    return launched + r.text("\ndefine internal void @refused(ptr %words, i32 %status, ptr %name, ptr %function)")


def _copy(constants: Constants) -> str:
    r = Routine()
    own = r.value("call ptr @llvm.threadlocal.address.p0(ptr @calling)")
    stream = r.load("ptr", "%Context", r.value(f"load ptr, ptr {own}"), STREAM)
    target, source, nbytes = (r.load("i64", "i64", "%arguments", k) for k in range(3))
    with r.when(r.value(f"icmp eq i64 {nbytes}, 0"), "nothing"):
        r.line("ret void")
    status = r.value(f"call i32 @cuMemcpyDtoDAsync_v2(i64 {target}, i64 {source}, i64 {nbytes}, ptr {stream})")
    with r.when(r.value(f"icmp ne i32 {status}, 0"), "failed"):
        words = r.item("i64", "%arguments", 3)
        name, function = constants.text("a copy"), constants.text("cuMemcpyDtoDAsync_v2")
        r.line(f"call void @refused(ptr {words}, i32 {status}, ptr {name}, ptr {function})")
    r.line("ret void")
    return r.text(f"\ndefine hidden void @{COPY}(ptr %arguments)")
