"""How launches pass what they pass: checked against what machine code says of its own parameters, and by a driver that
the CPU plays."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from tests.runtime.played_driver import PlayedLibrary
from torch_mlc.codegen.host_launch import CONTEXT, RECORD, VARIANT_WORDS, VARIANTS
from torch_mlc.codegen.host_native import DROP_GUARD, GET_STREAM, MAKE_GUARD
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.dtypes import DType
from torch_mlc.ir.expr import symbol
from torch_mlc.ir.loops import Buffer
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu import GpuBinary, compile_triton
from torch_mlc.runtime.gpu_driver import CDriver
from torch_mlc.runtime.gpu_launch import GpuKernel
from torch_mlc.runtime.gpu_records import LaunchRecord
from torch_mlc.runtime.gpu_report import elf_sections
from torch_mlc.runtime.host_native import prototypes

pytest.importorskip("triton")
TARGETS = ["cuda:sm_90", "hip:gfx942"]
BYTES = {"ptr": 8, "i64": 8, "i32": 4}
TEXT = """import triton
import triton.language as tl


@triton.jit
def double(in0_ptr, out0_ptr, s0, s1):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    m = i < s0 * s1
    tl.store(out0_ptr + i, tl.load(in0_ptr + i, mask=m, other=0) * 2, mask=m)
"""


def source(index: str) -> KernelSource:
    n, m = symbol("s0"), symbol("s1")
    buffers = tuple(Buffer(x, (n, m), (m, sympy.S.One), DType.FLOAT32) for x in ("in0", "out0"))
    meta = (("index", index), ("num_warps", 4), ("num_stages", 1), ("enable_fp_fusion", True))
    return KernelSource("double", "triton", TEXT, buffers, ("s0", "s1"), (FloorDiv(n * m + 1023, 1024),), meta)


def packed(binary: GpuBinary) -> list[tuple[int, int]]:
    """Place and bytes of each parameter as a launch gives it, each at the next multiple of its size."""
    found, at = [], 0
    for kind in (*binary.arguments, *["ptr"] * binary.scratch):
        size = BYTES[kind]
        at = -(-at // size) * size
        found.append((at, size))
        at += size
    return found


def in_cubin(binary: GpuBinary) -> list[tuple[int, int]]:
    """Place and bytes of each parameter by the cubin: the records KPARAM_INFO of the kernel's section of attributes."""
    data = dict(elf_sections(binary.code))[f".nv.info.{binary.name}"]
    found, at = {}, 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form != 4:
            continue
        if attribute == 0x17:
            _, ordinal, place, rest = struct.unpack_from("<IHHI", data, at)
            found[ordinal] = (place, rest >> 18)
        at += size
    return [found[k] for k in range(len(found))]


def in_amdgcn(binary: GpuBinary) -> list[tuple[int, int]]:
    """Place and bytes of each parameter that is no hidden one, by the metadata of the code object."""
    arguments = re.search(r"\.args:(.*?)\.group_segment_fixed_size", binary.assembly, re.DOTALL)
    assert arguments is not None
    found = []
    for entry in re.split(r"\n\s+- ", arguments[1])[1:]:
        fields = dict(re.findall(r"\.(\w+):\s*(\w+)", entry))
        if not fields["value_kind"].startswith("hidden"):
            found.append((int(fields["offset"]), int(fields["size"])))
    return found


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("target", TARGETS)
def test_parameters_lie_where_machine_code_reads_them(target: str, index: str) -> None:
    binary = compile_triton(source(index), gpu_target(target))
    assert binary.arguments == ("ptr", "ptr", index, index)
    found = in_cubin(binary) if binary.kind == "cuda" else in_amdgcn(binary)
    assert found == packed(binary) and len(found) == 4 + binary.scratch


def test_much_shared_memory_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = PlayedLibrary()
    library.play(monkeypatch)
    binary = compile_triton(source("i32"), gpu_target("cuda:sm_90"))
    sizes = iter([48 << 10, 100 << 10])
    for shared in sizes:
        driver = CDriver("cuda", library)
        driver.load(binary.code, "double", shared, 0)
    assert library.attributes == [("double", 8, 100 << 10)]


def words(record: LaunchRecord) -> list[int]:
    return [*record._words]


def test_a_record_has_room_for_some_variants_and_keeps_them() -> None:
    record = LaunchRecord((True, True, False, True), 2, 77)
    head = dict(zip(RECORD, words(record), strict=False))
    assert {head.pop(name) for name in CONTEXT} == {0}
    assert head == {
        "pointers": 4,
        "arguments": 6,
        "relaxable": 0b1011,
        "variants": 0,
        "null": 0,
        "launcher": 77,
    }
    flags = [(bool(k & 1), bool(k & 2), False, bool(k & 4)) for k in range(8)]
    for k, aligned in enumerate((*flags, flags[3], (False, False, True, False))):
        record.add(aligned, 100 + k, 128, 64, 8)
    found = words(record)
    assert found[RECORD.index("variants")] == VARIANTS == 8
    rows = [found[at : at + VARIANT_WORDS] for at in range(len(RECORD), len(found), VARIANT_WORDS)]
    assert [r[1] for r in rows] == [100 + k for k in range(8)]
    assert [r[0] for r in rows] == [sum(1 << k for k, f in enumerate(a) if f) for a in flags]


def test_a_record_has_the_variants_that_were_loaded_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = PlayedLibrary()
    library.play(monkeypatch)
    binary = compile_triton(source("i32"), gpu_target("cuda:sm_90"))
    compiled = []

    def compile(text: KernelSource, target: object, aligned: tuple[bool, ...]) -> GpuBinary:
        compiled.append(aligned)
        return replace(binary, aligned=aligned, scratch_bytes=64 if aligned == (False, False) else 0)

    kernel = GpuKernel(
        source("i32"), gpu_target("cuda:sm_90"), compile, CDriver("cuda", library), lambda device: 0,
        lambda size, device: torch.empty(size, dtype=torch.uint8),
    )  # fmt: skip
    library.forever = 1
    memory = torch.zeros(64)
    for first, second in ((0, 0), (4, 4)):
        with pytest.raises(Exception, match="double: could not launch"):
            kernel.at(0, memory.data_ptr() + first, memory.data_ptr() + second, 1, 1)
    record = kernel.record(0)
    assert compiled == [(True, True), (False, False)]
    # One that wants memory at each launch is left to Python.
    assert words(record)[RECORD.index("variants")] == 1
    with pytest.raises(Exception, match="double: could not launch"):
        kernel.at(0, memory.data_ptr(), memory.data_ptr() + 4, 1, 1)
    assert words(record)[RECORD.index("variants")] == 2 and kernel.record(0) is record


def test_more_pointers_than_a_record_knows_of_are_launched_all_the_same() -> None:
    names = [f"in{k}" for k in range(70)]
    buffers = tuple(Buffer(n, (), (), DType.FLOAT32) for n in names)
    kernel = GpuKernel(
        KernelSource("wide", "triton", "", buffers, (), (sympy.Integer(2),)), gpu_target("cuda:sm_90"),
        driver=CDriver("cuda", PlayedLibrary()), stream=lambda device: 0,
    )  # fmt: skip
    launched: list[tuple[object, ...]] = []
    kernel.launch = lambda *launch: launched.append(launch)  # type: ignore[method-assign]
    addresses = [16 * k for k in range(66)] + [4, 32, 8, 64]
    kernel.at(1, *addresses)
    assert launched == [(1, tuple(a % 16 == 0 for a in addresses), (2, 1, 1), tuple(addresses))]


def test_functions_of_torch_have_the_prototypes_that_are_called() -> None:
    folder = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch"
    text = " ".join(re.sub(r"//.*", "", (folder / "c/shim.h").read_text()).split())
    for function, parameters in (
        (MAKE_GUARD, "int32_t device_index, CUDAGuardHandle* ret_guard"),
        (DROP_GUARD, "CUDAGuardHandle guard"),
        (GET_STREAM, "int32_t device_index, void** ret_stream"),
    ):
        assert re.search(rf"AOTITorchError {function}\( ?{re.escape(parameters)} ?\)", text), function
    cpu, cuda = (prototypes(kind) for kind in ("cpu", "cuda"))
    for op in ("addmm_out", "bmm_out", "convolution"):
        assert cuda[f"aoti_torch_cuda_{op}"] == cpu[f"aoti_torch_cpu_{op}"]
