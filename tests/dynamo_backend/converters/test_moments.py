"""Variances are as exact as eager's, which adds up in double precision, however far from zero the elements lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.converters.reduce import moments

ROOT = Path(__file__).resolve().parents[3]
# Elements of these means and standard deviations.
PLACES = ((0.0, 1.0), (300.0, 0.1), (1000.0, 0.01))
# Reduced dimensions of tensors of three: rows, columns, both sides of what is kept, and everything.
DIMS = ((2,), (0,), (1,), (0, 2), (0, 1), (1, 2), (0, 1, 2))
# What these tests set is no part of a key.
FRESH = {"cache": False}
# As float32 has them: sums of a few hundred elements in a lane are no better.
ULPS = 16 * torch.finfo(torch.float32).eps


@pytest.fixture(params=["whole", "pieces"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Elements at once, or in pieces as small as these tensors need, most of them with a rest."""
    if request.param != "whole":
        monkeypatch.setattr(moments, "WHOLE", 20)
        monkeypatch.setattr(moments, "PIECE", 32)
        monkeypatch.setattr(moments, "PIECE_OF_ROWS", 8)
    return str(request.param)


def variances(x: Tensor) -> list[Tensor]:
    found = [x.var(dims) for dims in DIMS]
    found += [x.std(dims, correction=0) for dims in ((2,), (0, 2))]
    return found + [torch.var_mean(x, dims, correction=3)[0] for dims in (1, (0, 2))]


def means(x: Tensor) -> list[Tensor]:
    return [torch.var_mean(x, dims)[1] for dims in DIMS]


def norms(x: Tensor) -> list[Tensor]:
    return [
        F.batch_norm(x, None, None, training=True),
        F.layer_norm(x, x.shape[1:]),
        F.layer_norm(x, x.shape[2:]),
        F.group_norm(x, 2),
        F.instance_norm(x),
    ]


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).abs() / wanted.abs()).max().item()


def far(mean: float, deviation: float, shape: tuple[int, ...] = (19, 6, 241)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) * deviation + mean


@pytest.mark.parametrize("dynamic", [False, True])
def test_variances_are_as_exact_as_those_of_eager(fresh_compiler: None, way: str, dynamic: bool) -> None:
    compiled = torch.compile(lambda x: (variances(x), means(x)), backend="mlc", options=FRESH, dynamic=dynamic)
    for mean, deviation in PLACES:
        x = far(mean, deviation)
        squares, averages = compiled(x)
        for k, (ours, eager, exact) in enumerate(zip(squares, variances(x), variances(x.double()), strict=True)):
            assert relative(ours, exact) <= max(2 * relative(eager, exact), ULPS), (mean, deviation, k)
        for k, (ours, exact) in enumerate(zip(averages, means(x.double()), strict=True)):
            assert (ours - exact).abs().max().item() <= ULPS / 8 * (mean + deviation), (mean, deviation, k)


def test_normalised_elements_are_as_exact_as_those_of_eager(fresh_compiler: None, way: str) -> None:
    compiled = torch.compile(norms, backend="mlc", options=FRESH, dynamic=False)
    for mean, deviation in PLACES:
        x = far(mean, deviation)
        # Half a unit in the last place of the mean, which is what the layers keep of it.
        rounded = abs(mean) / deviation * 2**-24
        for k, (ours, eager, exact) in enumerate(zip(compiled(x), norms(x), norms(x.double()), strict=True)):
            error = (ours - exact).abs().max().item()
            assert error <= max(2 * (eager - exact).abs().max().item(), 2 * rounded, ULPS), (mean, deviation, k)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(fresh_compiler: None, way: str, dtype: torch.dtype) -> None:
    x = far(300.0, 1.0).to(dtype)
    for ours, eager in zip(torch.compile(variances, backend="mlc", options=FRESH)(x), variances(x), strict=True):
        torch.testing.assert_close(ours, eager)


def test_more_elements_than_single_precision_counts(fresh_compiler: None) -> None:
    x = far(1000.0, 0.01, (3, (1 << 20) + 7))
    compiled = torch.compile(lambda x: (x.var(1), x.var()), backend="mlc", options=FRESH)
    for ours, exact in zip(compiled(x), (x.double().var(1), x.double().var()), strict=True):
        assert relative(ours, exact) <= ULPS


def test_whatever_comes_first(fresh_compiler: None, way: str) -> None:
    """No first element, border or piece is what squares are taken about."""
    x = torch.zeros(4, 1, 480)
    x[0, :, 0] = 1e4
    x[1, :, :100] = -3e3
    x[2, :, 100:] = far(1000.0, 0.01, (380,))
    x[3, :, 479] = 1.0
    ours = torch.compile(lambda x: x.var((1, 2)), backend="mlc", options=FRESH)(x)
    assert relative(ours, x.double().var((1, 2))) <= 8 * ULPS


def test_equal_elements_infinities_and_none(fresh_compiler: None, way: str) -> None:
    def function(x: Tensor) -> tuple[Any, ...]:
        return x.var((0, 2)), x.std((0, 2)), *torch.var_mean(x, 2, correction=0), x[:, :, :0].var(2)

    compiled = torch.compile(function, backend="mlc", options=FRESH)
    for value in (0.0, 1.0, -7.0):
        x = torch.full((5, 3, 120), value)
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0, equal_nan=True)
    x = torch.full((5, 3, 120), 0.1)
    torch.testing.assert_close(compiled(x), function(x), rtol=1e-6, atol=1e-16, equal_nan=True)
    for odd in (float("inf"), float("-inf"), float("nan")):
        x = torch.randn(5, 3, 120)
        x[1, 2, 5] = odd
        ours, eager = compiled(x), function(x)
        for k in (0, 1, 2):
            torch.testing.assert_close(ours[k], eager[k], equal_nan=True)


def on_gpu(function: Callable[[Tensor], list[Tensor]], x: Tensor) -> list[Tensor]:
    from tests.fuzz.interpreted import interpreted

    with interpreted():
        settings = {"target": "cuda:sm_90", "cache": False}
        return torch.compile(function, backend="mlc", dynamic=False, options=settings)(x)


def gpu_errors() -> list[float]:
    """What kernels for a GPU that is not here are off by, in Triton's interpreter."""
    found = []
    for whole, shape, dims in (
        (1 << 16, (4, 1, 700), (2,)),
        (1 << 16, (1300, 1, 3), (0,)),
        (1000, (4, 2, 300), (0, 2)),
        (1000, (1300, 1, 3), (0,)),
    ):
        moments.WHOLE, moments.PIECE, moments.PIECE_OF_ROWS = whole, 256, 128
        x = far(1000.0, 0.01, shape)
        torch._dynamo.reset()
        (ours,) = on_gpu(lambda x, dims=dims: [x.var(dims)], x)  # type: ignore[misc]
        found.append(relative(ours, x.double().var(dims)))
    return found


def test_kernels_of_gpus(tmp_path: Path) -> None:
    """The interpreter adds up a tile one element after the other, where a GPU does so by halves."""
    environment = dict(os.environ, TRITON_INTERPRET="1", MLC_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT))
    this = ".".join(Path(__file__).relative_to(ROOT).with_suffix("").parts)
    command = f"import json\nimport {this} as t\nprint(json.dumps(t.gpu_errors()))"
    ran = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    errors = json.loads(ran.stdout.splitlines()[-1])
    assert len(errors) == 4 and max(errors) <= 8 * ULPS, errors
