"""Random numbers of tiles: those of the oracle, in whatever tile they are drawn and for whatever reads them, and four
of a call.

The oracle's are those of the CPU's kernels too (``tests/codegen/llvm``), so forward and backward agree across targets.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")
SEED = {"seed": np.array([0x1234_5678_9ABC_DEF0], np.int64)}
# Drawn once, read by a mask and by a result of another width.
POINTS = """
@function
def f(seed: int64[1], in0: bfloat16[{n}], out0: output(bool[{n}]), out1: output({kind}[{n}])):
    i0 = row({n})
    t0 = compute(rows, {draw}(seed[0], index({at}, int64), dtype={kind}))
    t1 = compute(rows, lt(t0[i0], {kind}({limit})))
    t2 = compute(rows, select(t1[i0], t0[i0], cast(in0[i0], {kind})))
    out0[i0] = t1
    out1[i0] = t2
"""
ROWS = """
@function
def f(seed: int64[1], in0: float32[{m}, {n}], out0: output(float32[{m}]), out1: output(float32[{m}, {n}])):
    i0 = row({m})
    r0 = inner({n})
    t0 = compute(points, mul(in0[i0, r0], rand(seed[0], index({at}, int64), dtype=float32)))
    t1, = reduce(sum, rows, inner, (t0[i0, r0],))
    t2 = compute(points, sub(t0[i0, r0], t1[i0]))
    out0[i0] = t1
    out1[i0, r0] = t2
"""
TURNED = """
@function
def f(seed: int64[1], in0: float32[{m}, {n}], out0: output(float32[{n}, {m}])):
    i0 = row({n})
    i1 = row({m})
    t0 = compute(rows, add(in0[i1, i0], rand(seed[0], index({n}*i1 + i0, int64), dtype=float32)))
    out0[i0, i1] = t0
"""


def nest_of(text: str, **parts: object) -> LoopNest:
    function = parse(text.format(**parts))
    assert isinstance(function, TensorFunction)
    return default_schedule(lower_to_loops(function, SM90), SM90).nest


@pytest.mark.parametrize(
    ("draw", "kind", "limit"), [("rand", "float32", 0.75), ("randn", "float32", 0.5), ("randbits", "int64", 0)]
)
@pytest.mark.parametrize(
    ("n", "at"), [(4096, "i0"), (1031, "i0"), (1031, "i0 + 8"), (520, "i0 + 4294967296"), (3, "i0")]
)
def test_a_mask_beside_a_result(agrees, draw: str, kind: str, limit: float, n: int, at: str) -> None:
    source = agrees(nest_of(POINTS, n=n, draw=draw, kind=kind, limit=limit, at=at), inputs=SEED)
    assert f"mlc_{draw}_tile(" in source.text


@pytest.mark.parametrize("at", ["i0 + 1", "2*i0", "1023 - i0", "Mod(i0, 30)"])
def test_lanes_that_are_no_neighbours_draw_each(agrees, at: str) -> None:
    source = agrees(nest_of(POINTS, n=1024, draw="rand", kind="float32", limit=0.75, at=at), inputs=SEED)
    assert "mlc_rand(" in source.text and "_tile(" not in source.text


@pytest.mark.parametrize(("m", "n", "tiled"), [(5, 1024, True), (70, 60, True), (9, 33, False), (2, 70_000, True)])
def test_rows(agrees, m: int, n: int, tiled: bool) -> None:
    source = agrees(nest_of(ROWS, m=m, n=n, at=f"{n}*i0 + r0"), inputs=SEED, tolerance=1e-3)
    assert ("mlc_rand_tile(" in source.text) == tiled


@pytest.mark.parametrize(("m", "n"), [(64, 128), (37, 68), (33, 66)])
def test_tiles_that_are_turned(agrees, m: int, n: int) -> None:
    """Neighbours of the stream lie along the first dimension of such a tile."""
    source = agrees(nest_of(TURNED, m=m, n=n), inputs=SEED)
    assert ("mlc_rand_tile(" in source.text) == (n % 4 == 0)


def test_sizes_that_are_not_known(agrees) -> None:
    x = torch.randn(50, 36)
    (kernel,) = torch_mlc.explain(lambda x: F.dropout(x, 0.25), x, target="cuda:sm_90", dynamic=True).kernels
    assert kernel.nest.symbols.sizes
    assert "mlc_rand_tile(" in agrees(kernel.scheduled, {"s0": 50, "s1": 36}).text


def training(f, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, target: str = "cuda:sm_90") -> list:
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=dtype, requires_grad=True) for s in shapes]
    return torch_mlc.explain(f, *inputs, target=target, training=True).kernels


def softmax(x: Tensor) -> Tensor:
    return F.dropout(torch.softmax(x, -1), 0.1)


@pytest.mark.parametrize(
    ("f", "shape", "dtype", "most"),
    [
        (lambda x: F.dropout(x, 0.1), (16384, 4096), torch.bfloat16, 6.2),
        (lambda x: F.dropout(x, 0.1), (16384, 4096), torch.float32, 3.8),
        (softmax, (8192, 2048), torch.bfloat16, 6.5),
    ],
)
def test_a_stored_mask_costs_no_more_draws(f, shape: tuple[int, ...], dtype: torch.dtype, most: float) -> None:
    """Philox of each element alone is eleven slots a byte of these."""
    forward = training(f, shape, dtype=dtype)[0]
    assert "mlc_rand_tile(" in forward.source and round(forward.slots_a_byte, 1) <= most, forward.show()


def test_dropped_probabilities_of_attention() -> None:
    """Scores and, in the gradient of keys, scores that are turned."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(torch.softmax(q @ k.mT / 8, -1), 0.1) @ v

    kernels = training(attend, *[(8, 16, 1024, 64)] * 3)
    assert len(kernels) == 3
    for kernel in kernels:
        assert "mlc_rand_tile(" in kernel.source and kernel.slots_a_byte < 70, kernel.show()
