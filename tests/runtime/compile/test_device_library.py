"""What kernels call of libdevice, made ready once."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling.kernels import emit
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.compile import device_library as library
from torch_mlc.runtime.compile import kernels
from torch_mlc.runtime.compile.kernels import KernelStore, kernel_store
from torch_mlc.runtime.triton.compile import compile_triton
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

pytest.importorskip("triton")
SM90 = gpu_target("cuda:sm_90")
FUNCTIONS = (torch.exp, torch.tanh, torch.erf, torch.rsqrt, torch.expm1)


def source(dtype: torch.dtype = torch.float32) -> KernelSource:
    with FakeTensorMode():
        x = torch.empty(1024, dtype=dtype)
    (kernel,) = torch_mlc.explain(
        lambda x: [f(x) for f in FUNCTIONS], x, target="cuda:sm_90", options={"cache": False}
    ).kernels
    assert kernel.function is not None
    return emit(default_schedule(lower_to_loops(kernel.function), SM90).nest, SM90)


@pytest.fixture(scope="module")
def store() -> KernelStore:
    return KernelStore(None)


def arithmetic(assembly: str) -> Counter[str]:
    """How often the code has each instruction that computes numbers."""
    return Counter(re.findall(r"\b((?:fma|mul|add|sub|div|ex2|rcp|rsqrt)\.[a-z.]*f32)\b", assembly))


def test_kernels_are_made_of_the_same_instructions(store: KernelStore) -> None:
    kernel = source()
    path = library.device_library(store, kernel, SM90)
    assert path is not None and path == library.device_library(store, kernel, SM90)
    ready, plain = (arithmetic(compile_triton(kernel, SM90, library=p).assembly) for p in (path, None))
    assert ready == plain and ready["ex2.approx.ftz.f32"] >= 4


def test_rows_that_fill_the_registers_do_not_spill() -> None:
    """The order in which the ready functions come out costs a row of 32,768 a few registers more than there are."""
    with FakeTensorMode():
        x = torch.empty(4096, 32768)
    (kernel,) = torch_mlc.explain(lambda x: x.softmax(-1), x, target="cuda:sm_90", options={"cache": False}).kernels
    assert kernel.resources is not None and kernel.resources.spills == 0


def test_the_text_is_made_once(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.device_library(store, source(), SM90)
    assert path is not None
    text = Path(path).read_text()
    assert "__CUDA_FTZ" not in re.sub(r"^@.*$", "", text, flags=re.MULTILINE) and "@__nv_expf(" in text
    monkeypatch.setattr(library, "_made", lambda target: pytest.fail("it is there"))
    assert library.device_library(store, source(), SM90) == path


def test_tritons_own_serves_where_ours_cannot(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = source()
    assert library.device_library(store, source(torch.float64), SM90) is None
    assert library.device_library(store, kernel, gpu_target("hip:gfx942")) is None

    class Other:
        def __init__(self, target: object) -> None:
            raise AttributeError("bindings of another version")

    monkeypatch.setattr(library, "_Tools", Other)
    assert library.device_library(KernelStore(None), kernel, SM90) is None


def test_a_kernel_that_needs_more_is_compiled_with_tritons_own(tmp_path: Path) -> None:
    kernel = source()
    empty = tmp_path / "empty.ll"
    empty.write_text("; nothing\n")
    code = kernels.compile_source(kernel, SM90, "key", str(empty))
    assert kernels.gpu_binary(code).assembly == compile_triton(kernel, SM90).assembly


def test_memory_alone_keeps_it_for_the_process() -> None:
    kernel = source()
    assert library.device_library(kernel_store(None), kernel, SM90) is not None


def test_nothing_is_left_to_the_defaults_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 warns where nobody says whether products and sums may be fused, and 3.10 fuses none."""
    language = type(importlib.import_module("triton.knobs").language)
    if not hasattr(language, "fp_fusion_enabled"):
        pytest.skip("this version of Triton has one default")
    asked: list[bool | None] = []
    monkeypatch.setattr(language, "fp_fusion_enabled", lambda self, requested: asked.append(requested) or True)
    kernel = source()
    compile_triton(kernel, SM90, library=library.device_library(KernelStore(None), kernel, SM90))
    assert len(asked) >= 2 and all(asked)
