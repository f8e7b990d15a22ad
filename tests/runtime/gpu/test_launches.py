"""How launches pass what they pass: checked against what machine code says of its own parameters, and by a driver that
the CPU plays."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max

from tests.runtime.played_driver import CELLS, PlayedLibrary, played_code
from torch_mlc.codegen.host.native.launch import CONTEXT, RECORD, VARIANT_WORDS, VARIANTS
from torch_mlc.codegen.host.native.native import DROP_GUARD, GET_STREAM, MAKE_GUARD
from torch_mlc.codegen.kernel import NARROW, WIDE, KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.runtime.compile.kernels import gpu_binary
from torch_mlc.runtime.gpu.driver import CDriver
from torch_mlc.runtime.gpu.launch import GpuKernel
from torch_mlc.runtime.gpu.records import LaunchRecord
from torch_mlc.runtime.gpu.table import GpuTableKernel
from torch_mlc.runtime.host.native import prototypes
from torch_mlc.runtime.triton.compile import GpuBinary, compile_triton
from torch_mlc.runtime.triton.report import elf_sections

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
        "early_launcher": 0,
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
    assert launched == [(1, tuple(a % 16 == 0 for a in addresses), (2, 1, 1), tuple(addresses), False)]


def two_forms() -> KernelSource:
    n, m = symbol("s0"), symbol("s1")
    plain = source("i32")
    return replace(plain, text=NARROW + plain.text, reach=Max(n * m + 1023, m + 7))


def test_the_reach_of_indices_decides_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compiled when it is first needed, and from then on machine code finds it; sizes are passed whole."""
    library, made = PlayedLibrary(), []

    def compile(text: KernelSource, target: Target, aligned: tuple[bool, ...]) -> GpuBinary:
        made.append((str(text.option("index")), aligned, WIDE in text.text))
        return gpu_binary(played_code(text, target, "")) if all(aligned) else replace(
            gpu_binary(played_code(text, target, "")), aligned=aligned
        )  # fmt: skip

    kernel = GpuKernel(two_forms(), gpu_target("cuda:sm_90"), compile, CDriver("cuda", library), lambda device: 0)
    launched: list[tuple[str, int, int]] = []

    def launch(function: int, *rest: object) -> int:
        kind = "ptr", "ptr", *[made[function - 1][0]] * 2
        cells = [CELLS[k].from_address(rest[8][at]).value for at, k in enumerate(kind)]  # type: ignore[index]
        launched.append((made[function - 1][0], cells[2], cells[3]))
        return 0

    library.cuLaunchKernel = type(library.cuLaunchKernel)(launch)
    kernel._driver = CDriver("cuda", library)
    border = (1 << 31) - 1024  # elements, of which the last programs reach 1023 further
    calls = [(1, border), (1, border + 1), (border, 1), (1, 1 << 33), (1, border), (3, 5), (2, border)]
    for n, m in calls:
        kernel.at(0, 32, 64, n, m)
    kinds = ["i32", "i64", "i32", "i64", "i32", "i32", "i64"]
    assert launched == [(k, *sizes) for k, sizes in zip(kinds, calls, strict=True)]
    assert made == [("i32", (True, True), False), ("i64", (True, True), True)]
    rows = words(kernel.record(0))[len(RECORD) :]
    assert rows[0] == 3 and rows[VARIANT_WORDS] == 3 - (1 << 63)
    kernel.at(0, 32, 68, 1, 1 << 33)
    assert made[2:] == [("i64", (True, False), True)]


def test_a_table_takes_the_variant_of_its_farthest_row() -> None:
    memory: Any = SimpleNamespace(
        stream=lambda device: 0, capturing=lambda: False, mark=lambda device: None,
        upload=lambda array, device: torch.from_numpy(array.copy()),
    )  # fmt: skip
    source = replace(two_forms(), meta=(*two_forms().meta, ("table", True)))
    driver = CDriver("cuda", PlayedLibrary())
    kernel = GpuTableKernel(source, gpu_target("cuda:sm_90"), driver=driver, memory=memory)
    far: list[object] = []
    kernel._kernel.grid = lambda *sizes: (1, 1, 1)
    kernel._kernel.launch = lambda *launch: far.append(launch[4])  # type: ignore[method-assign]
    for sizes in ((2, 3, 4, 5), (2, 3, 1 << 20, 1 << 20), (2, 3, 4, 5)):
        kernel.at(0, 2, 16, 32, *sizes[:2], 48, 64, *sizes[2:])
    assert far == [False, True, False]


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
