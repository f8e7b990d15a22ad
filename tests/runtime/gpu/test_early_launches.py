"""Kernels that are launched before the one ahead has ended, for which they wait themselves."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.runtime.gpu.test_launches import TEXT, source
from tests.runtime.played_driver import PlayedLibrary, played_code
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.runtime.compile.kernels import gpu_binary, kernel_store
from torch_mlc.runtime.gpu.driver import CDriver
from torch_mlc.runtime.gpu.launch import GpuKernel
from torch_mlc.runtime.triton.compile import GpuBinary, compile_triton
from torch_mlc.runtime.triton.triton_stages import Answer, Request, run_stages

pytest.importorskip("triton")
SM90 = gpu_target("cuda:sm_90")
MEMORY = re.compile(r"\b(ld|st|atom|red)\.[a-z.]*global|cp\.async")


class Recorded:
    """Does nothing where a kernel of ours would run."""

    function = None

    def __init__(self, code: object) -> None:
        self.code = code

    def run(self, launched: object, memory: object) -> None:
        pass


def played(version: int, dependent: bool = True, **named: object) -> tuple[PlayedLibrary, GpuKernel]:
    library = PlayedLibrary(version=version)
    code = played_code(source("i64"), SM90, "")
    library.kernels["double"] = Recorded(code)  # type: ignore[assignment]

    def compile(text: KernelSource, target: Target, aligned: tuple[bool, ...]) -> GpuBinary:
        return replace(gpu_binary(code), aligned=aligned, dependent=dependent)

    kernel = GpuKernel(source("i64"), SM90, compile, CDriver("cuda", library), lambda device: 11, **named)  # type: ignore[arg-type]
    return library, kernel


@pytest.mark.parametrize("name", ["cuda:sm_90", "cuda:sm_100", "cuda:sm_120"])
def test_a_kernel_waits_for_the_one_ahead_before_it_touches_memory(name: str) -> None:
    binary = compile_triton(source("i32"), gpu_target(name))
    text = binary.assembly
    first = MEMORY.search(text)
    assert binary.dependent and first is not None
    assert text.index("griddepcontrol.wait") < text.index("griddepcontrol.launch_dependents") < first.start()


@pytest.mark.parametrize("name", ["cuda:sm_80", "cuda:sm_89"])
def test_older_gpus_wait_for_the_end_of_the_kernel_ahead(name: str) -> None:
    binary = compile_triton(source("i32"), gpu_target(name))
    assert not binary.dependent and "griddepcontrol" not in binary.assembly


def test_lines_of_a_kernel_keep_their_numbers() -> None:
    """By them loops are known in machine code."""
    asked: list[Request] = []

    def run(request: Request) -> Answer:
        asked.append(request)
        return run_stages(request)

    compile_triton(source("i32"), SM90, run=run)
    before, after = TEXT.splitlines(), asked[0].text.splitlines()
    assert len(before) == len(after) and before[-3:] == after[-3:]
    assert [line.strip() for line in after if "gdc" in line] == [
        "tl.extra.cuda.gdc_wait()",
        "tl.extra.cuda.gdc_launch_dependents()",
    ]


def test_both_forms_launch_early() -> None:
    """Python's launch, which loads the variant, and that of machine code."""
    library, kernel = played(12080)
    memory = torch.zeros(64)
    for rows in (3, 5, 7):
        kernel.at(0, memory.data_ptr(), memory.data_ptr(), rows, 1000)
    kernel([memory, memory], [9, 1000])
    assert not library.errors
    assert [launch.early for launch in library.launches] == [True] * 4
    first, *others = library.launches
    assert first.grid == (3, 1, 1) and first.block == (128, 1, 1) and first.shared == 1024 and first.stream == 11
    assert [launch.grid[0] for launch in others] == [5, 7, 9]
    assert [launch.arguments[2] for launch in library.launches] == [3, 5, 7, 9]
    assert {launch.scratch for launch in library.launches} == {(0, 0)}


@pytest.mark.parametrize(
    ("version", "dependent", "checked"), [(12020, True, False), (12080, False, False), (12080, True, True)]
)
def test_other_launches_come_after_the_kernel_ahead(version: int, dependent: bool, checked: bool) -> None:
    """A driver whose graphs know no such edges, a kernel that does not wait, launches of which each is waited for."""
    library, kernel = played(version, dependent, checked=checked)
    memory = torch.zeros(64)
    for rows in (3, 5):
        kernel.at(0, memory.data_ptr(), memory.data_ptr(), rows, 1000)
    assert not library.errors
    assert [launch.early for launch in library.launches] == [False, False]
    assert bool(library.waits) == checked


def test_drivers_of_before_launch_as_they_can() -> None:
    library = PlayedLibrary()
    del library.cuLaunchKernelEx
    assert CDriver("cuda", library).early_launcher == 0
    assert CDriver("cuda", PlayedLibrary()).early_launcher != 0


def test_a_thread_without_a_context_launches_early_all_the_same() -> None:
    library, kernel = played(12080)
    memory = torch.zeros(64)
    kernel.at(0, memory.data_ptr(), memory.data_ptr(), 3, 1000)
    library.context = 0
    for rows in (5, 7):
        kernel.launch(0, (True, True), (rows, 1, 1), (memory.data_ptr(), memory.data_ptr(), rows, 1000))
        library.context = 0
    assert [launch.early for launch in library.launches] == [True] * 3 and not library.errors


def test_a_setting_launches_each_kernel_after_the_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For drivers that misbehave: the code stays what it is, and both forms are loaded side by side."""
    library = PlayedLibrary(version=12080)
    monkeypatch.setattr("torch_mlc.runtime.gpu.launch.driver_of", lambda kind: CDriver(kind, library))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11, raising=False)
    code = played_code(source("i64"), SM90, "")
    meta = {**code.meta, "binary": {**code.meta["binary"], "dependent": True}}
    code = replace(code, meta=meta)
    library.kernels["double"] = Recorded(code)  # type: ignore[assignment]
    memory, store = torch.zeros(64), kernel_store(None)
    for early in (True, False):
        kernel = store.load(code, early=early)
        assert store.load(code, early=early) is kernel
        launched = kernel.owner
        assert isinstance(launched, GpuKernel)
        for rows in (3, 5):
            launched.at(0, memory.data_ptr(), memory.data_ptr(), rows, 1000)
    assert not library.errors and gpu_binary(code).dependent
    assert [launch.early for launch in library.launches] == [True, True, False, False]
