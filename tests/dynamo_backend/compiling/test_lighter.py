"""Kernels that compile to more than the GPU has get smaller tiles, and ATen ops where no tiles are small enough."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.codegen.host.steps.kernel_use import Grid
from torch_mlc.codegen.host.steps.step import Launch
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.dynamo_backend.compiling import kernels, lighter
from torch_mlc.dynamo_backend.compiling.compiled import Stages
from torch_mlc.dynamo_backend.compiling.kernels import KernelBuild, KernelError
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.log import KernelFallbackWarning
from torch_mlc.runtime.model.predict import Prediction
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import GpuBinary, GpuCompileError, SharedMemoryError, compile_triton
from torch_mlc.scheduler.rules import Scarce, default_schedule, lighter_schedules
from torch_mlc.scheduler.rules.registry import lighter_values

SM90 = gpu_target("cuda:sm_90")


def elementwise(x: Tensor) -> tuple[Tensor]:
    return (x.sin() + 1,)


def columns(x: Tensor) -> tuple[Tensor]:
    return (x.exp().sum(0),)


def compiled(function: Callable[..., Any], *shape: int, strict: bool = True) -> tuple[Stages, KernelBuild]:
    """A function for a GPU that is not here; the stages and its kernel."""
    (gm,) = capture(function, [torch.empty(shape)])
    retarget([gm], "cuda")
    options = Options.resolve(
        None, {"target": "cuda:sm_90", "strict": strict, "cache": False, "compile_workers": 0}, {}
    )
    stages = compile_graph(gm, (), options=options, load=False, fresh=True).stages
    assert stages is not None
    (build,) = stages.kernels.values()
    return stages, build


def grids(stages: Stages) -> list[Any]:
    return [s.use.grid for s in stages.program.steps if isinstance(s, Launch)]


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[KernelSource]:
    """The first kernels take too much shared memory; the sources that were compiled."""
    make, seen = kernels.compile_source, list[KernelSource]()

    def choosy(source: KernelSource, *rest: Any) -> Any:
        seen.append(source)
        if len(seen) <= times:
            raise SharedMemoryError(f"take {len(seen)} is too much")
        return make(source, *rest)

    monkeypatch.setattr(kernels, "compile_source", choosy)
    return seen


def spilling(monkeypatch: pytest.MonkeyPatch, spills: Sequence[int]) -> None:
    """Kernels spill so many bytes, in the order in which they are compiled."""
    known = dict[str, int]()

    def spilled(binary: GpuBinary) -> int:
        place = known.setdefault(binary.assembly, len(known))
        return spills[place] if place < len(spills) else 0

    monkeypatch.setattr(lighter, "spilled_bytes", spilled)


def test_a_kernel_over_the_limit_gets_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = failing(monkeypatch, 1), counters.snapshot()
    stages, build = compiled(elementwise, 1000, 999)
    first, second = seen
    assert build.code is not None and build.source == second != first
    assert build.schedule is not None and emit_triton(build.schedule.nest, SM90).text == second.text
    # The host program launches as many programs as the smaller tiles are.
    assert grids(stages) == [Grid(second.grid, second.symbols)] != [Grid(first.grid, first.symbols)]
    added = counters.since(before)
    assert added["kernels_lightened"] == added["kernels_generated"] == 1 and "kernel_fallbacks" not in added


def test_where_nothing_fits_its_aten_ops_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = failing(monkeypatch, 100)
    with pytest.warns(KernelFallbackWarning, match="take 1 is too much; nor does a lighter schedule") as caught:
        _, build = compiled(columns, 512, 999, strict=False)
    assert build.code is None and 2 <= len(seen) <= 1 + lighter.TRIES[Scarce.SHARED]
    assert len([w for w in caught if issubclass(w.category, KernelFallbackWarning)]) == 1
    assert len({s.text for s in seen}) == len(seen)
    with pytest.raises(KernelError, match="take 1 is too much"):
        seen.clear()
        compiled(columns, 512, 999)


def timing(monkeypatch: pytest.MonkeyPatch, microseconds: Sequence[int]) -> None:
    """Kernels are predicted to take so long, in the order in which they are compiled; no time is known beyond."""
    known = dict[str, int]()

    def predicted(binary: GpuBinary, *_: Any) -> Prediction | None:
        place = known.setdefault(binary.assembly, len(known))
        return Prediction(microseconds[place] * 1e-6, {}) if place < len(microseconds) else None

    monkeypatch.setattr(lighter, "predicted", predicted)


# Where no times are known, and where they are: a few bytes that spill, fast and much, worth a tenth or not.
LIGHTER: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = [
    ((64, 0), (), 2, 1), ((64, 96, 8, 16), (), 4, 2), ((8, 8, 8), (), 3, 0), ((64, 96, 8), (9, 5), 3, 2),
    ((64, 96, 8, 16), (30, 20, 50, 40), 4, 1), ((64, 8, 0), (50, 40, 20), 3, 2), ((8, 0), (95, 100), 2, 1),
    ((8, 0), (80, 100), 2, 0),
]  # fmt: skip


@pytest.mark.parametrize(("spills", "times", "tries", "chosen"), LIGHTER)
def test_a_kernel_that_spills_is_tried_with_fewer_registers(
    monkeypatch: pytest.MonkeyPatch, spills: tuple[int, ...], times: tuple[int, ...], tries: int, chosen: int
) -> None:
    seen = failing(monkeypatch, 0)
    monkeypatch.setitem(lighter.TRIES, Scarce.REGISTERS, tries - 1)
    spilling(monkeypatch, spills)
    timing(monkeypatch, times)
    stages, build = compiled(columns, 512, 999)
    assert len(seen) == tries
    assert build.source == seen[chosen]
    assert grids(stages) == [Grid(seen[chosen].grid, seen[chosen].symbols)]


def test_a_kernel_that_spills_nothing_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = failing(monkeypatch, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelFallbackWarning)
        compiled(columns, 512, 999)
    assert len(seen) == 1


def test_times_are_predicted_where_there_is_a_choice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Prediction:
        raise AssertionError("asked for the time of a kernel that has no other")

    monkeypatch.setattr(lighter, "predicted", refuse)
    compiled(columns, 512, 999)
    failing(monkeypatch, 1)
    compiled(columns, 512, 998)


def test_another_error_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[KernelSource]()

    def refuse(source: KernelSource, *_: Any) -> Any:
        seen.append(source)
        raise GpuCompileError("no such instruction")

    monkeypatch.setattr(kernels, "compile_source", refuse)
    with pytest.raises(KernelError, match="no such instruction"):
        compiled(columns, 512, 999)
    assert len(seen) == 1


def test_shared_memory_is_checked_when_a_kernel_is_compiled() -> None:
    """Warps exchange what they have summed through shared memory."""
    _, build = compiled(lambda x: torch.softmax(x, -1), 64, 8192)
    assert build.nest is not None
    source = emit_triton(default_schedule(build.nest, SM90).nest, SM90)
    shared = compile_triton(source, SM90).shared
    assert shared > 0
    compile_triton(source, replace(SM90, shared_bytes=shared))
    with pytest.raises(
        SharedMemoryError, match=rf"{shared:,} bytes of shared memory a block.*cuda:sm_90 has {shared - 1:,}"
    ):
        compile_triton(source, replace(SM90, shared_bytes=shared - 1))


def test_lighter_points_of_a_design_space() -> None:
    values = {
        "queries": (64, 32, 128),
        "warps": (4, 8),
        "stages": (2, 3, 1),
        "descriptors": (False, True),
        "kind": ("a", "b"),
    }
    fixed = {"descriptors": False, "kind": "a"}
    shared = [{k: v for k, v in p.items() if k not in fixed} for p in lighter_values(values, Scarce.SHARED)]
    assert shared == [
        {"queries": 64, "warps": 4, "stages": 1},
        {"queries": 32, "warps": 4, "stages": 2},
        {"queries": 32, "warps": 4, "stages": 1},
    ]
    registers = [{k: v for k, v in p.items() if k not in fixed} for p in lighter_values(values, Scarce.REGISTERS)]
    assert registers == [
        {"queries": 64, "warps": 4, "stages": 3},
        {"queries": 64, "warps": 8, "stages": 2},
        {"queries": 32, "warps": 4, "stages": 2},
        {"queries": 64, "warps": 8, "stages": 3},
        {"queries": 32, "warps": 4, "stages": 3},
        {"queries": 32, "warps": 8, "stages": 2},
        {"queries": 32, "warps": 8, "stages": 3},
    ]
    assert all(p.items() >= fixed.items() for s in Scarce for p in lighter_values(values, s))


def test_lighter_schedules_are_of_the_rule_that_was_too_heavy() -> None:
    _, build = compiled(columns, 512, 999)
    assert build.nest is not None and build.schedule is not None
    for scarce in Scarce:
        found = list(lighter_schedules(build.nest, SM90, build.schedule.rule, scarce))
        assert found and {s.rule for s in found} == {build.schedule.rule}
        assert all(s.nest != build.schedule.nest for s in found)
