"""Objects: compiled by threads, loaded elsewhere, called with the GIL released, on one OpenMP runtime."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from tests import warm_processes
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.target import Target, TargetError
from torch_mlc.runtime.cpu import (
    _MACHINES,
    CpuCompileError,
    LoadedObject,
    compile_kernels,
    compile_object,
    load_kernel,
    load_kernels,
    object_fingerprint,
    symbol_address,
)
from torch_mlc.runtime.targets import cpu_target, target_for


def source(name: str, body: str, declarations: str = "") -> KernelSource:
    text = f"define void @{name}(ptr %arguments) {{\n{body}\n  ret void\n}}\n{declarations}\n"
    return KernelSource(name, "llvm", text, (), ())


def adder(name: str, amount: int) -> KernelSource:
    """Adds to the int64 that its one argument points at."""
    return source(
        name,
        f"  %p = load ptr, ptr %arguments\n  %x = load i64, ptr %p\n"
        f"  %y = add i64 %x, {amount}\n  store i64 %y, ptr %p",
    )


# Eight numbers from places that a vector names to places that another does.
SPREAD = """
declare <8 x float> @llvm.masked.gather.v8f32.v8p0(<8 x ptr>, i32, <8 x i1>, <8 x float>)
declare void @llvm.masked.scatter.v8f32.v8p0(<8 x float>, <8 x ptr>, i32, <8 x i1>)
define void @spread(<8 x ptr> %a, <8 x ptr> %b) {
  %all = xor <8 x i1> zeroinitializer, splat (i1 true)
  %x = call <8 x float> @llvm.masked.gather.v8f32.v8p0(<8 x ptr> %a, i32 4, <8 x i1> %all, <8 x float> poison)
  call void @llvm.masked.scatter.v8f32.v8p0(<8 x float> %x, <8 x ptr> %b, i32 4, <8 x i1> %all)
  ret void
}
"""


@pytest.fixture(scope="module")
def target() -> Target:
    return cpu_target()


def test_a_kernel_runs(target: Target) -> None:
    cell = np.array([40], np.int64)
    kernel = load_kernel(adder("add_two", 2), target)
    kernel(cell.ctypes.data)
    assert cell[0] == 42
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)(ctypes.addressof(ctypes.c_void_p(cell.ctypes.data)))
    assert cell[0] == 44


def test_code_lives_as_long_as_its_call(target: Target) -> None:
    cell = np.array([40], np.int64)
    call = load_kernel(adder("kept", 2), target).call
    assert any(isinstance(held, LoadedObject) for held in gc.get_referents(call))
    gc.collect()
    call(cell.ctypes.data)
    assert cell[0] == 42


def test_one_object_holds_several_kernels(target: Target) -> None:
    data = compile_kernels([adder("one", 1), adder("ten", 10)], target)
    kernels = load_kernels(data, ["one", "ten"])
    cell = np.zeros(1, np.int64)
    kernels["one"](cell.ctypes.data)
    kernels["ten"](cell.ctypes.data)
    assert cell[0] == 11


def test_equal_names_in_different_objects_do_not_collide(target: Target) -> None:
    cell = np.zeros(1, np.int64)
    for amount in (1, 100):
        load_kernel(adder("same", amount), target)(cell.ctypes.data)
    assert cell[0] == 101


def test_threads_compile_at_once(target: Target) -> None:
    with ThreadPoolExecutor(4) as pool:
        objects = list(pool.map(lambda n: compile_kernels([adder(f"k{n}", n)], target), range(12)))
    for n, data in enumerate(objects):
        cell = np.zeros(1, np.int64)
        load_kernels(data, [f"k{n}"])[f"k{n}"](cell.ctypes.data)
        assert cell[0] == n


@pytest.mark.skipif(sys.platform != "linux", reason="reserves memory with Linux's flags")
def test_code_and_its_constants_stay_together_where_memory_is_in_pieces(target: Target, tmp_path: Path) -> None:
    """Room for the code alone lies many gigabytes from room for the constants, which its addresses do not reach."""
    shape, zeros = "[64 x i64]", 40 << 20
    numbers = ", ".join(f"i64 {7 * k + 3}" for k in range(64))
    table = f"@table = internal constant <{{ {shape}, [{zeros} x i8] }}> <{{ {shape} [{numbers}],"
    table += f" [{zeros} x i8] zeroinitializer }}>"
    body = (
        "  %p = load ptr, ptr %arguments\n  %k = load i64, ptr %p\n"
        f"  %q = getelementptr {shape}, ptr @table, i64 0, i64 %k\n  %x = load i64, ptr %q\n  store i64 %x, ptr %p"
    )
    (tmp_path / "kernel.o").write_bytes(compile_kernels([source("looks_up", body, table)], target))
    program = f"""
import ctypes
import llvmlite.binding as llvm
import numpy as np
from torch_mlc.runtime.cpu import load_kernels
data = open({str(tmp_path / "kernel.o")!r}, "rb").read()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
private, anonymous, noreserve = 0x02, 0x20, 0x4000
hole, wall = (libc.mmap(None, n, 0, private | anonymous | noreserve, -1, 0) for n in (1 << 20, 8 << 30))
assert hole > wall
libc.munmap(hole, 1 << 20)
kernel = load_kernels(data, ["looks_up"])["looks_up"]
x = np.array([5])
kernel(x.ctypes.data)
assert x[0] == 38
"""
    warm_processes.start(program).output()


def test_another_process_loads_the_object(target: Target, tmp_path: Path) -> None:
    declarations = "declare float @Sleef_unused(float)\ndeclare <8 x float> @Sleef_sinf8_u10(<8 x float>)"
    if target.vector_bytes != 32:
        pytest.skip("written for vectors of 32 bytes")
    body = (
        "  %p = load ptr, ptr %arguments\n  %x = load <8 x float>, ptr %p, align 4\n"
        "  %y = call <8 x float> @Sleef_sinf8_u10(<8 x float> %x)\n  store <8 x float> %y, ptr %p, align 4"
    )
    (tmp_path / "kernel.o").write_bytes(compile_kernels([source("sine", body, declarations)], target))
    program = f"""
import llvmlite.binding as llvm
import numpy as np
from torch_mlc.runtime.cpu import load_kernels
kernel = load_kernels(open({str(tmp_path / "kernel.o")!r}, "rb").read(), ["sine"])["sine"]
x = np.arange(8, dtype="f4")
want = np.sin(x)
kernel(x.ctypes.data)
assert np.allclose(x, want, atol=1e-6)
"""
    warm_processes.start(program).output()


def test_the_team_is_the_one_of_torch() -> None:
    """torch.set_num_threads sets how many threads a region has: there is one OpenMP runtime."""
    get = ctypes.CFUNCTYPE(ctypes.c_int)(symbol_address("omp_get_max_threads"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert get() == 3
    finally:
        torch.set_num_threads(before)


def test_the_gil_is_released(target: Target) -> None:
    """Two kernels that wait for each other both finish."""
    body = """  %p = load ptr, ptr %arguments
  %seen = atomicrmw add ptr %p, i64 1 seq_cst
  br label %wait
wait:
  %now = load atomic i64, ptr %p seq_cst, align 8
  %both = icmp sge i64 %now, 2
  br i1 %both, label %done, label %wait
done:"""
    kernel = load_kernel(source("meet", body), target)
    cell = np.zeros(1, np.int64)
    threads = [threading.Thread(target=kernel, args=(cell.ctypes.data,)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert cell[0] == 2


def test_wrong_arguments_are_an_error_of_python(target: Target) -> None:
    kernel = load_kernel(adder("strict", 1), target)
    with pytest.raises(TypeError):
        kernel("nowhere")  # type: ignore[arg-type]


def test_text_that_is_no_ir_is_refused(target: Target) -> None:
    with pytest.raises(CpuCompileError, match="expected"):
        compile_object(["define nonsense"], target)


def test_a_function_that_nobody_has_is_named() -> None:
    with pytest.raises(CpuCompileError, match="Sleef_of_hand"):
        symbol_address("Sleef_of_hand")


def test_the_fingerprint_tells_machines_apart(target: Target) -> None:
    other = Target("cpu", "x86-64", 4, features="+sse2")
    assert object_fingerprint(target) != object_fingerprint(other)
    assert object_fingerprint(target) == object_fingerprint(cpu_target())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize(("processor", "at_once"), [("znver4", False), ("sapphirerapids", True)])
def test_lanes_that_are_no_neighbours_are_alone_where_that_is_faster(processor: str, at_once: bool) -> None:
    machine = _MACHINES.of(Target("cpu", processor, 1, vector_bytes=64, features="+avx512f,+avx512vl,+avx512dq"), 3)
    text = machine.emit_assembly(llvm.parse_assembly(SPREAD))
    assert ("vgather" in text, "vscatter" in text) == (at_once, at_once)


def test_targets() -> None:
    assert target_for("cpu") == cpu_target()
    assert target_for("cpu", cores=7).cores == 7
    assert target_for("cuda:0", "cuda:sm_90").arch == "sm_90"
    assert target_for("cuda", "hip:gfx942").kind == "hip"
    with pytest.raises(TargetError, match="xpu"):
        target_for("xpu:0")
    if not torch.cuda.is_available():
        with pytest.raises(TargetError, match="MLC_TARGET"):
            target_for("cuda:0")
