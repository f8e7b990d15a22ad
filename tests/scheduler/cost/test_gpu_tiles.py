"""Tiles of products follow what tensor cores multiply, and how fast a multiprocessor takes up their steps."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.triton.rules.test_contractions import linear
from tests.scheduler.cost.test_contraction_gpu import decided, empty, products
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.targets import target_for
from torch_mlc.scheduler.cost.products.gpu_tiles import PLAIN_SHAPES, SHAPES, TileShape, stages_of
from torch_mlc.scheduler.rules import design_space

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
BESIDE = 2048


def stages(target: str, shape: TileShape) -> int:
    return stages_of(gpu_target(target).machine, shape, (shape.rows + shape.columns) * shape.step * 2, BESIDE)


@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("shape", [*SHAPES, *PLAIN_SHAPES], ids=str)
def test_shapes_are_as_measured_where_they_were(target: str, shape: TileShape) -> None:
    assert stages(target, shape) == shape.stages


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_120"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fewer_steps_in_flight_are_worth_another_program(target: str, shape: TileShape) -> None:
    """Where they are fewer than what fits, one more would leave room for fewer programs."""
    machine, found = gpu_target(target).machine, stages(target, shape)
    each = (shape.rows + shape.columns) * shape.step * 2
    assert 2 <= found <= shape.stages
    if found < min(shape.stages, (machine.block_shared - BESIDE) // each):
        programs = [machine.shared // (k * each + BESIDE + machine.reserved) for k in (found, found + 1)]
        assert programs[0] > programs[1] >= 1


def test_small_multiprocessors_hold_several_programs_of_small_tiles() -> None:
    small = next(s for s in SHAPES if (s.rows, s.columns) == (32, 32))
    assert [stages(t, small) for t in ("cuda:sm_90", "cuda:sm_80", "cuda:sm_120")] == [5, 4, 3]


@pytest.mark.parametrize("target", ["hip:gfx90a", "hip:gfx942"])
def test_amd_has_two_steps_in_flight(target: str) -> None:
    assert {stages(target, s) for s in SHAPES} == {1, 2}, "1: the step does not fit twice, and is made shorter"


@pytest.mark.parametrize(
    ("dtype", "target", "tile"),
    [
        (F16, "cuda:sm_75", "128x64x16/8/1"), (BF16, "cuda:sm_75", "128x64x16/8/1"),
        (F32, "cuda:sm_75", "128x64x16/8/1"), (F16, "cuda:sm_90", "128x256x64/8/3"),
        (BF16, "cuda:sm_90", "128x256x64/8/3"), (F32, "cuda:sm_90", "128x64x16/8/3"),
    ],
)  # fmt: skip
def test_single_threads_multiply_what_tensor_cores_do_not(dtype: DType, target: str, tile: str) -> None:
    """Half types on Turing as float32, whose tensor cores kernels do not reach; and one step at a time."""
    nest, machine = linear(2048, 2048, 2048, dtype), gpu_target(target)
    (rule, *_) = design_space(nest, machine).rules
    assert rule.name == "gpu_contraction" and rule.parameters(nest, machine)["tile"][0] == tile


def test_a_library_multiplies_bfloat16_on_turing_as_slowly_as_float32() -> None:
    def library(dtype: torch.dtype, target: str) -> float:
        shapes = (empty(s, 2048, dtype=dtype) for s in (512, 2048))
        _, (product,) = products(decided(lambda x, w: x @ w.t(), *shapes, target=gpu_target(target)))
        return float(product.reason.partition("cuBLAS in ")[2].partition(" us")[0])

    half, brain = (library(t, "cuda:sm_75") for t in (torch.float16, torch.bfloat16))
    assert brain > 4 * half
    assert library(torch.bfloat16, "cuda:sm_90") == library(torch.float16, "cuda:sm_90")


def test_float32_is_never_rounded_where_tensor_cores_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    may = {t: target_for("cuda:0", t).multiplies(F32) for t in ("cuda:sm_75", "cuda:sm_80", "cuda:sm_90", "hip:gfx942")}
    assert may == {"cuda:sm_75": False, "cuda:sm_80": True, "cuda:sm_90": True, "hip:gfx942": False}
