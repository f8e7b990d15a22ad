"""Compiling and launching Triton kernels: what can be checked without a GPU, and on one."""

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PowByNatural

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu.launch import GpuKernel
from torch_mlc.runtime.triton.compile import GpuCompileError, compile_triton, load_source, resource_report

triton = pytest.importorskip("triton")
SM90 = gpu_target("cuda:sm_90")
TEXT = """import triton
import triton.language as tl


@triton.jit
def double(in0_ptr, out0_ptr, s0):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    m = i < s0
    tl.store(out0_ptr + i, tl.load(in0_ptr + i, mask=m, other=0) * 2, mask=m)
"""


def source(text: str = TEXT, divisor: int = 16) -> KernelSource:
    n = symbol("s0")
    buffers = tuple(Buffer(x, (n,), (sympy.S.One,), DType.FLOAT32) for x in ("in0", "out0"))
    meta = (("index", "i32"), ("num_warps", 4), ("num_stages", 1), ("enable_fp_fusion", True), ("divisor:s0", divisor))
    return KernelSource("double", "triton", text, buffers, ("s0",), (FloorDiv(n + 1023, 1024),), meta)


def test_alignment_decides_the_width_of_accesses():
    wide = resource_report(compile_triton(source(), SM90))
    narrow = resource_report(compile_triton(source(), SM90, aligned=(False, True)))
    assert (wide.wide_loads, wide.wide_stores) == (1.0, 1.0)
    assert (narrow.wide_loads, narrow.wide_stores) == (0.0, 1.0)
    assert resource_report(compile_triton(source(divisor=1), SM90)).wide_loads == 0.0


def test_binary_says_how_to_launch_it():
    binary = compile_triton(source(), SM90)
    assert binary.code[:4] == b"\x7fELF"
    assert binary.arguments == ("ptr", "ptr", "i32")
    assert binary.threads == 128 and binary.shared == 0 and 0 <= binary.scratch <= 2
    amd = compile_triton(source(), gpu_target("hip:gfx942"))
    assert amd.threads == 256 and amd.arguments == binary.arguments and 0 <= amd.scratch <= 2


def test_registers_are_what_the_vendor_reports(tmp_path):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton ships no cuobjdump")
    binary = compile_triton(source(), SM90)
    (tmp_path / "k.cubin").write_bytes(binary.code)
    text = subprocess.run([tool, "-res-usage", tmp_path / "k.cubin"], capture_output=True, text=True, check=True).stdout
    assert f"REG:{resource_report(binary).registers} STACK:{resource_report(binary).spills}" in text


def test_products_on_the_tensor_cores_are_counted():
    text = """import triton
import triton.language as tl


@triton.jit
def product(in0_ptr, in1_ptr, out0_ptr):
    m, k = tl.arange(0, 64), tl.arange(0, 64)
    at = m[:, None] * 64 + k[None, :]
    tl.store(out0_ptr + at, tl.dot(tl.load(in0_ptr + at), tl.load(in1_ptr + at)))
"""
    half, full = (DType.BFLOAT16, DType.FLOAT32)
    shape, strides = (sympy.Integer(64), sympy.Integer(64)), (sympy.Integer(64), sympy.S.One)
    params = tuple(Buffer(n, shape, strides, d) for n, d in (("in0", half), ("in1", half), ("out0", full)))
    kernel = KernelSource("product", "triton", text, params, (), (), (("num_warps", 4), ("enable_fp_fusion", True)))
    reports = {t: resource_report(compile_triton(kernel, gpu_target(t))) for t in ("cuda:sm_90", "cuda:sm_80")}
    hopper, ampere = reports["cuda:sm_90"], reports["cuda:sm_80"]
    assert hopper.group_products > 0 and hopper.warp_products == 0
    assert ampere.group_products == 0 and ampere.warp_products > 0
    amd = resource_report(compile_triton(kernel, gpu_target("hip:gfx942")))
    assert amd.group_products == 0 and amd.warp_products > 0
    assert all(0 < r.occupancy <= 1 and r.wide_loads == 1.0 for r in (hopper, ampere, amd))
    assert resource_report(compile_triton(source(), SM90)).group_products == 0


def test_equal_sources_make_equal_binaries():
    assert compile_triton(source(), SM90) == compile_triton(source(), SM90)


def test_loading_leaves_nothing_behind():
    import linecache
    import sys

    before = set(linecache.cache), set(sys.modules)
    load_source(source())
    assert (set(linecache.cache), set(sys.modules)) == before


def test_a_kernel_that_does_not_compile_shows_its_source():
    with pytest.raises(GpuCompileError, match=r"(?s)double does not compile for cuda:sm_90.*tl\.nothing"):
        compile_triton(source(TEXT.replace("* 2", "* tl.nothing(2)")), SM90)


class Recorder:
    """A driver that keeps what it is given."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launches: list[tuple] = []

    def load(self, code, name, shared, device):
        self.loaded.append(name)
        return name

    def launch(self, device, function, grid, threads, shared, stream, arguments, dependent=False):
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32)
        values = [ctypes.cast(arguments[k], ctypes.POINTER(t))[0] for k, t in enumerate(kinds)]
        self.launches.append((grid, threads, stream, values, len(arguments)))


def test_a_launch_passes_addresses_sizes_and_scratch():
    driver = Recorder()
    kernel = GpuKernel(source(), SM90, driver=driver, stream=lambda device: 7)
    a, b = torch.ones(3000), torch.ones(3000)
    kernel((a, b), (3000,))
    binary = compile_triton(source(), SM90)
    expected = ((3, 1, 1), 128, 7, [a.data_ptr(), b.data_ptr(), 3000], 3 + binary.scratch)
    assert driver.launches == [expected]


def test_an_unaligned_pointer_gets_its_own_variant_once():
    driver, compiled = Recorder(), []

    def compile(src, target, aligned):
        compiled.append(aligned)
        return compile_triton(src, target, aligned)

    kernel = GpuKernel(source(), SM90, compile, driver, lambda device: 0)
    a, b = torch.ones(3001), torch.ones(3000)
    for _ in range(2):
        kernel((a[1:], b), (3000,))
        kernel((a[:3000], b), (3000,))
    assert compiled == [(False, True), (True, True)]


TILES = """import triton
import triton.language as tl


@triton.jit
def tiles(in0_ptr, out0_ptr):
    tile = tl.make_tensor_descriptor(in0_ptr, [64, 64], [64, 1], [32, 64])
    at = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out0_ptr + at, tile.load([32 * tl.program_id(0), 0]))
"""


def tiles(**meta) -> KernelSource:
    shape, strides = (sympy.Integer(64), sympy.Integer(64)), (sympy.Integer(64), sympy.S.One)
    buffers = tuple(Buffer(x, shape, strides, DType.FLOAT32, align=16) for x in ("in0", "out0"))
    options = (("num_warps", 4), ("num_stages", 1), ("enable_fp_fusion", True), ("descriptors", "in0"), *meta.items())
    return KernelSource("tiles", "triton", TILES, buffers, (), (sympy.Integer(2),), options)


class Pointers(Recorder):
    """A driver that keeps the addresses it is given."""

    def launch(self, device, function, grid, threads, shared, stream, arguments, dependent=False):
        self.launches.append([ctypes.cast(arguments[k], ctypes.POINTER(ctypes.c_uint64))[0] for k in range(3)])


def test_programs_get_memory_for_their_descriptors():
    driver, taken = Pointers(), []

    def scratch(size, device):
        taken.append(torch.empty(size, dtype=torch.uint8))
        return taken[-1]

    a, b = torch.ones(64, 64), torch.ones(64, 64)
    GpuKernel(tiles(), SM90, driver=driver, stream=lambda device: 0, scratch=scratch)((a, b))
    assert driver.launches == [[a.data_ptr(), b.data_ptr(), taken[0].data_ptr()]]
    assert len(taken[0]) == 2 * compile_triton(tiles(), SM90).scratch_bytes > 0


def test_what_a_descriptor_cannot_start_at_is_copied():
    """The address of a tile's array is a multiple of 16 bytes, or the tensor memory accelerator stops."""
    driver = Pointers()
    kernel = GpuKernel(
        tiles(),
        SM90,
        driver=driver,
        stream=lambda device: 0,
        scratch=lambda n, device: torch.empty(n, dtype=torch.uint8),
    )
    memory, b = torch.ones(64 * 64 + 1), torch.ones(64, 64)
    kernel((memory[1:].view(64, 64), b))
    ((first, second, _),) = driver.launches
    assert first % 16 == 0 and first != memory[1:].data_ptr() and second == b.data_ptr()


def test_warps_that_were_to_get_parts_of_the_work_and_did_not_are_an_error():
    with pytest.raises(GpuCompileError, match="gave no warps parts"):
        compile_triton(tiles(warp_specialize=True), SM90)


def test_an_empty_grid_is_not_launched():
    driver = Recorder()
    GpuKernel(source(), SM90, driver=driver, stream=lambda device: 0)((torch.ones(0), torch.ones(0)), (0,))
    assert driver.launches == []


N, M = symbol("s0"), symbol("s1")


@pytest.mark.parametrize(
    ("grid", "programs"),
    [
        (FloorDiv(N**2 + 1023, 1024), 10), (CeilDiv(N * M, 16), 44), (N * ModularIndexing(M, 2, 4), 300),
        (PowByNatural(M, 3), 343), (Max(1, Min(N, M)), 7), (Mod(N, 3) + CleanDiv(N, 4), 26),
    ],
    ids=str,
)  # fmt: skip
def test_a_grid_may_be_any_size_that_a_program_computes(grid, programs):
    """Tensors of n by n elements have as many programs as a power says."""
    kernel = GpuKernel(replace(source(), symbols=("s0", "s1"), grid=(grid,)), SM90, driver=Recorder(), stream=int)
    assert kernel.grid(100, 7) == (programs, 1, 1)


@pytest.mark.gpu
def test_launch_on_a_gpu():
    major, minor = torch.cuda.get_device_capability()
    kernel = GpuKernel(source(divisor=1), gpu_target(f"cuda:sm_{major}{minor}"))
    for n in (0, 1, 1024, 100_003):
        x = torch.randn(n + 1, device="cuda")
        for start in (0, 1):
            out = torch.full((n,), 5.0, device="cuda")
            kernel((x[start : start + n], out), (n,))
            torch.testing.assert_close(out, x[start : start + n] * 2)
