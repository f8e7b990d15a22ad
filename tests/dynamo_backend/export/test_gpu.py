"""Libraries for GPUs, on a GPU that the CPU plays behind the names of NVIDIA's driver: numbers, launches, state, wrong
calls, and a driver that fails anywhere."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import torch_mlc
from tests.dynamo_backend.export.test_library import Decoder, programs
from tests.dynamo_backend.played_programs import alternate, play
from tests.runtime.export.played_device import FAILED, OUT_OF_MEMORY, OnGpu, PlayedGpu, known_kernels, results
from tests.runtime.played_driver import PlayedLibrary
from torch_mlc.runtime.export.open import LibraryError, ModelLibrary

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="a driver is played by a shared object that gcc makes"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's own driver is loaded"),
]
Exported = tuple[Path, nn.Module, dict[bytes, Any]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        return torch.softmax(self.down(torch.relu(self.up(self.norm(x)))), -1), self.calls, x


def exported(model: nn.Module, made: Any, folder: Path, **options: Any) -> Exported:
    patch = pytest.MonkeyPatch()
    with known_kernels(patch) as images:
        torch_mlc.export(made, folder, **{"targets": ("cuda:sm_90",), "name": "onGpu", **options})
    return folder, model, images


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(0)
    model = Mlp().eval()
    dim = Dim("batch", min=1, max=1 << 28)
    program = export(model, (torch.randn(33, 64),), dynamic_shapes=({0: dim},))
    return exported(model, program, tmp_path_factory.mktemp("mlp"), targets=("cuda:sm_80", "cuda:sm_90"))


@pytest.fixture
def gpu(mlp: Exported) -> Iterator[PlayedGpu]:
    found = PlayedGpu(mlp[2])
    found.play()
    yield found
    assert not found.errors and found.nothing


def call(gpu: PlayedGpu, library: ModelLibrary, name: str, *arrays: np.ndarray, offset: int = 0) -> list[np.ndarray]:
    given = [gpu.give(a, offset) for a in arrays]
    out = results(gpu, library.shapes(name, *given), [np.dtype(r.dtype) for r in library.functions[name].results])
    try:
        library.call(name, *given, out=out)
        return [o.numpy() for o in out]
    finally:
        for array in (*given, *out):
            array.free()


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, 64)).astype(np.float32)


def test_numbers_and_state(mlp: Exported, gpu: PlayedGpu) -> None:
    path, model, _ = mlp
    eager = copy.deepcopy(model)
    with ModelLibrary(path) as library:
        for count, offset in ((33, 0), (1, 0), (700, 4), (5, 12)):
            found = call(gpu, library, "forward", x := rows(count), offset=offset)
            with torch.no_grad():
                wanted = eager(torch.from_numpy(x))
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-6)
        # State is each context's own.
        mine, fresh = library.context(), gpu.give(np.zeros((1, 64), np.float32))
        out = results(gpu, library.shapes("forward", fresh), [np.float32] * 3)
        mine.call("forward", fresh, out=out)
        assert out[1].numpy() == 1
        mine.close()
        for array in (fresh, *out):
            array.free()
        assert {x.stream for x in gpu.launches} <= gpu.streams | {max(x.stream for x in gpu.launches)}


def test_variants_by_alignment(mlp: Exported, gpu: PlayedGpu) -> None:
    """Rows at multiples of 16 bytes are read by code that takes that for granted, others by code that does not."""
    with ModelLibrary(mlp[0]) as library:
        call(gpu, library, "forward", rows(8))
        aligned = {x.kernel: x.variant for x in gpu.launches}
        gpu.launches.clear()
        call(gpu, library, "forward", rows(8), offset=4)
        odd = {x.kernel: x.variant for x in gpu.launches}
    norm = next(k for k in aligned if "layer_norm" in k)
    kernel = next(p.kernel for p in mlp[2].values() if p.kernel.name == norm and p.kernel.cubins)
    first, second = kernel.cubins[aligned[norm]], kernel.cubins[odd[norm]]
    assert first.assumes & 1 and not second.assumes & 1
    # What lies in the arena or among the weights is aligned whatever the caller gives.
    middle = next(k for k in aligned if "relu" in k)
    assert aligned[middle] == odd[middle] == 0


def test_far_indices_have_code_of_their_own(mlp: Exported) -> None:
    """2**28 rows of 64 are more elements than 32 bits count: there is a form for them beside the usual one."""
    kernels = {p.kernel.name: p.kernel for p in mlp[2].values()}
    norm = next(k for n, k in kernels.items() if "layer_norm" in n)
    assert [c.far for c in norm.cubins] == [False, False, True, True]
    assert {c.parameters for c in norm.cubins} == {norm.cubins[0].parameters}
    fixed = next(k for n, k in kernels.items() if n.startswith("fused_add_"))  # the count of calls
    assert not any(c.far for c in fixed.cubins)


@pytest.mark.parametrize(("capability", "kernels"), [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90")])
def test_code_by_compute_capability(mlp: Exported, capability: tuple[int, int], kernels: str) -> None:
    gpu = PlayedGpu(mlp[2], capability=capability, pools=False)
    gpu.play()
    with ModelLibrary(mlp[0]) as library:
        assert library.signature["gpus"] == ["sm_90", "sm_80"] and library.on_gpu
        call(gpu, library, "forward", rows(9))
    assert gpu.launches and {x.early for x in gpu.launches} == {kernels == "sm_90"}
    assert "cuMemAllocAsync" not in gpu.calls and not gpu.errors


def test_old_drivers_launch_one_after_the_other(mlp: Exported) -> None:
    gpu = PlayedGpu(mlp[2], version=12020)
    gpu.play()
    with ModelLibrary(mlp[0]) as library:
        call(gpu, library, "forward", rows(9))
    assert gpu.launches and not any(x.early for x in gpu.launches) and not gpu.errors


def test_a_stream_of_the_callers(mlp: Exported, gpu: PlayedGpu) -> None:
    with ModelLibrary(mlp[0]) as library:
        context = library.context()
        x = gpu.give(rows(4))
        out = results(gpu, library.shapes("forward", x), [np.float32] * 3)
        gpu.streams.add(5)
        context.stream(5)
        before = len(gpu.calls)
        context.call("forward", x, out=out)
        assert {x.stream for x in gpu.launches} == {5}
        assert "cuStreamSynchronize" not in gpu.calls[before:], "the caller's stream is not waited for"
        context.stream(5)
        assert gpu.calls.count("cuCtxSynchronize") == 1
        context.close()
        gpu.streams.remove(5)
        for array in (x, *out):
            array.free()


def test_wrong_calls(mlp: Exported, gpu: PlayedGpu) -> None:
    library = ModelLibrary(mlp[0])
    x, short = gpu.give(rows(4)), gpu.give(np.zeros((4, 63), np.float32))
    out = results(gpu, library.shapes("forward", x), [np.float32] * 3)
    odd = replace(x, address=x.address + 2)
    same = replace(out[0], address=x.address)
    for arrays, made, told in (
        ((rows(4),), out, "x is a ndarray, and no array on a GPU"),
        ((short,), out, r"forward: dimension 1 of input 0 \(x\) is 63; it has to be 64"),
        ((odd,), out, r"the data of input 0 \(x\) begin at 0x[0-9a-f]*2, which is no multiple of 4"),
        ((x,), [same, *out[1:]], r"result 0 \(result_0\) shares memory with input 0 \(x\)|result 0 .* shares memory"),
        ((x,), out[:2], "forward gives 3 arrays, and out has 2"),
        ((x,), None, r"forward is on a GPU: give arrays for its results there \(out=\)"),
    ):
        with pytest.raises(LibraryError, match=told):
            library.call("forward", *arrays, out=made)
    assert not gpu.launches
    context = library.context()
    given, made = (
        library._given((x,), library.functions["forward"].inputs),
        library._given(out, library.functions["forward"].results),
    )
    for kind, number, told in (
        (1, 0, "is on device 0 of DLPack's kind 1; it has to be on GPU 0"),
        (2, 1, "is on device 1 of"),
    ):
        given[0].device_type, given[0].device_id = kind, number
        with pytest.raises(LibraryError, match=told):
            context.run("forward", given, made)
    given[0].device_type, given[0].device_id = 13, 7  # the driver moves it to where it is read
    context.run("forward", given, made)
    context.close()
    library.close()
    for array in (x, short, *out):
        array.free()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"capability": (7, 5)}, r"GPU 0 is of compute capability 7.5, and the library has code for sm_90, sm_80"),
        ({"capability": (10, 0)}, r"GPU 0 is of compute capability 10.0, and the library has code for sm_90, sm_80"),
        ({"count": 0}, "GPU 0 is asked for, and this machine has 0 of them"),
    ],
)
def test_machines_without_such_a_gpu(mlp: Exported, changes: dict[str, Any], told: str) -> None:
    gpu = PlayedGpu(mlp[2], **changes)
    gpu.play()
    with pytest.raises(LibraryError, match=told) as caught:
        ModelLibrary(mlp[0])
    assert caught.value.kind == "device" and gpu.nothing and not gpu.errors


def test_machines_without_a_driver(mlp: Exported) -> None:
    """In a process that has loaded none."""
    code = "import sys; sys.path.insert(0, sys.argv[2]); from open import ModelLibrary; ModelLibrary(sys.argv[1])"
    from torch_mlc.runtime.export import open as opened  # the file, which stands alone

    command = [sys.executable, "-c", code, str(mlp[0]), str(Path(opened.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert "LibraryError: open: no driver of NVIDIA is on this machine (" in done.stderr
    needed = subprocess.run(["readelf", "-d", mlp[0] / "model.so"], capture_output=True, text=True).stdout
    assert "libdl.so.2" in needed and "libcuda" not in needed


def used(path: Path, gpu: PlayedGpu) -> tuple[str, str]:
    """Open, call, let the arena grow, take another stream: the kind and the sentence of what is refused."""
    outside: list[OnGpu] = []
    context, kind, told = None, "", ""
    try:
        with ModelLibrary(path) as library:
            context = library.context()
            for count in (2, 90):
                outside.append(x := gpu.give(rows(count)))
                outside += (out := results(gpu, library.shapes("forward", x), [np.float32] * 3))
                context.call("forward", x, out=out)
            gpu.streams.add(3)
            context.stream(3)
    except LibraryError as error:
        kind, told = error.kind, str(error)
    if context is not None:
        context.close()
    gpu.streams.discard(3)
    for array in outside:
        array.free()
    return kind, told


# What may be refused where nobody can be told: everything is let go of then.
ENDS = {"cuMemFree_v2", "cuMemFreeAsync", "cuModuleUnload", "cuStreamDestroy_v2", "cuDevicePrimaryCtxRelease_v2",
        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuCtxSynchronize"}  # fmt: skip


@pytest.mark.parametrize(
    ("status", "words"),
    [(FAILED, "unspecified launch failure (status 719)"), (OUT_OF_MEMORY, "out of memory (status 2)")],
)
@pytest.mark.parametrize("pools", [True, False])
def test_a_driver_that_fails_anywhere(mlp: Exported, status: int, words: str, pools: bool) -> None:
    """Each call of the driver's in turn is refused: a sentence names what was asked and why it failed, and nothing of
    the library's stays behind."""
    said, quiet = set(), set()
    for number in range(1000):
        gpu = PlayedGpu(mlp[2], fail=number, status=status, pools=pools)
        gpu.play()
        kind, told = used(mlp[0], gpu)
        assert not gpu.errors and gpu.nothing, (number, gpu.calls[number:])
        if number >= len(gpu.calls):
            break
        name = gpu.calls[number]
        if not told:
            quiet.add(name)
            continue
        said.add(name)
        assert kind == ("memory" if status == OUT_OF_MEMORY else "device"), told
        shown = {"cuLaunchKernelEx": "cuLaunchKernel", "cuMemFree_v2": "cuMemFree", "cuMemFreeAsync": "cuMemFree"}
        assert (f"{shown.get(name, name)} failed: {words}" in told) or "bytes of scratch" in told, (name, told)
        assert told.split(":")[0] in ("open", "context", "forward", "stream")
        assert name != "cuLaunchKernelEx" or ("forward: launch " in told and " (fused_" in told)
    allocate = "cuMemAllocAsync" if pools else "cuMemAlloc_v2"
    assert number > 60 and not told and quiet <= ENDS
    assert {"cuModuleLoadData", "cuLaunchKernelEx", "cuMemcpyHtoD_v2", allocate, "cuStreamCreate", "cuInit"} <= said


def test_the_program_stays_the_users(tmp_path: Path) -> None:
    """The same program is exported for a GPU and for processors, in any order."""
    model = Mlp().eval()
    program = export(model, (torch.randn(33, 64),))
    before = {n.name: str(getattr(n.meta.get("val"), "device", "")) for n in program.graph.nodes}
    for targets in (("cuda:sm_90",), ("host",), ("cuda:sm_80",)):
        torch_mlc.export(program, tmp_path, targets=targets)
        assert before == {n.name: str(getattr(n.meta.get("val"), "device", "")) for n in program.graph.nodes}


class Alternate(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return alternate(x)


def test_launches_are_those_of_native_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = export(Alternate(), (torch.randn(30, 20),), dynamic_shapes=({0: Dim("a", min=2), 1: Dim("b", min=2)},))
    path, _, images = exported(Alternate(), program, tmp_path / "library")
    driver = PlayedLibrary()
    driver.play(monkeypatch)
    both = play(driver, alternate, (30, 20), dynamic=True)
    gpu = PlayedGpu(images)
    gpu.play()
    with ModelLibrary(path) as library:
        for shape in ((30, 20), (2, 999), (500, 3)):
            x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            gpu.launches.clear()
            found = call(gpu, library, "forward", x)
            wanted, native = both.run(both.machine, torch.from_numpy(x))
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-5)
            ours = [(x.grid, x.threads, x.arguments) for x in gpu.launches]
            assert ours == [(x.grid, x.block[0], x.arguments[x.pointers :]) for x in native]
    assert not gpu.errors


def test_two_functions_with_one_state(tmp_path: Path) -> None:
    """Prefill and decode of a model with caches and attention, products included: nothing is a library's."""
    torch.manual_seed(0)
    model = Decoder().eval()
    path, _, images = exported(model, programs(model), tmp_path / "decoder")
    told = json.loads((path / "model.json").read_text())
    assert told["device"] == "cuda" and [t["processor"] for t in told["targets"]] == ["sm_90"]
    gpu = PlayedGpu(images)
    gpu.play()
    eager = copy.deepcopy(model)
    with ModelLibrary(path) as library:
        for name, positions in (("prefill", range(6)), ("decode", [6]), ("decode", [7]), ("prefill", [8, 9])):
            tokens, at = torch.randint(0, 31, (1, len(positions))), torch.tensor([*positions])
            with torch.no_grad():
                wanted = eager(tokens, at)["logits"]
            (logits,) = call(gpu, library, name, tokens.numpy(), at.numpy())
            np.testing.assert_allclose(logits, wanted.numpy(), rtol=1e-4, atol=1e-5)
    gc.collect()
    assert not gpu.errors and gpu.nothing
