"""Inputs are read in the dimensions that windows slide along, and the memory that is read stays the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.expr.value import loads
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.functions.name_sums import name_sums
from torch_mlc.scheduler.functions.split_windows import split_windows

TEXT = """
@function
def f(in0: float32[4, {size}], in1: float32[4, 3, 3], out0: output(float32[4, 7, 5])):
    i0 = row(4)
    i1 = row(7)
    i2 = row(5)
    r0 = inner({taps})
    r1 = inner(3)
    t0, = reduce(sum, rows, inner, (mul({value}, in1[i0, 0, r1]),))
    out0[i0, i1, i2] = t0
"""
INSIDE = "logical_and(ge(index({place}, int64), int64(0)), lt(index({place}, int64), int64({extent})))"


def made(load: str, size: int, guards: dict[str, int], taps: int = 3) -> TensorFunction:
    value = load
    for place, extent in guards.items():
        value = f"select({INSIDE.format(place=place, extent=extent)}, {value}, float32(0.0))"
    parsed = parse(TEXT.format(size=size, taps=taps, value=value))
    assert isinstance(parsed, TensorFunction)
    verify(parsed)
    return parsed


CASES = {
    "border of one": ("in0[i0, 5*i1 + i2 + 5*r0 + r1 - 6]", 35, {"i1 + r0 - 1": 7, "i2 + r1 - 1": 5}, [4, 7, 5]),
    "no border": ("in0[i0, 7*i1 + i2 + 7*r0 + r1]", 63, {}, [4, 9, 7]),
    "stride": ("in0[i0, 22*i1 + 2*i2 + 11*r0 + r1]", 165, {}, [4, 15, 11]),
    "dilation": ("in0[i0, 9*i1 + i2 + 18*r0 + 2*r1]", 99, {}, [4, 11, 9]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_dimension_with_two_windows_is_two(name: str) -> None:
    load, size, guards, shape = CASES[name]
    before = made(load, size, guards)
    after = split_windows(before)
    verify(after)
    (buffer, _) = after.inputs
    assert list(buffer.shape) == shape and list(buffer.strides) == [size, shape[2], 1]
    assert [s.role for s in name_sums(before).stages] != [Role.CONVOLUTION]
    assert [s.role for s in name_sums(after).stages] == [Role.CONVOLUTION]
    ((old,), (new,)) = ([ld for ld in loads(f.stages[0].values[0]) if ld.buffer == "in0"] for f in (before, after))
    assert (before.inputs[0].offset(old.indices) - buffer.offset(new.indices)).expand() == 0
    assert split_windows(after) is after


def test_rows_of_several_images_are_told_apart() -> None:
    text = TEXT.replace("float32[4, {size}]", "float32[140, 4]").replace("i2 = row(5)", "i2 = row(5)\n    i3 = row(4)")
    text = text.replace("[4, 7, 5]", "[4, 7, 5, 4]").replace("in1[i0, 0, r1]", "in1[i3, r0, r1]")
    value = "in0[35*i0 + 5*i1 + i2 + 5*r0 + r1 - 6, i3]"
    for place, extent in {"i1 + r0 - 1": 7, "i2 + r1 - 1": 5}.items():
        value = f"select({INSIDE.format(place=place, extent=extent)}, {value}, float32(0.0))"
    before = parse(text.replace("out0[i0, i1, i2]", "out0[i0, i1, i2, i3]").format(taps=3, value=value))
    assert isinstance(before, TensorFunction)
    verify(before)
    after = split_windows(before)
    verify(after)
    assert list(after.inputs[0].shape) == [4, 7, 5, 4] and list(after.inputs[0].strides) == [140, 20, 4, 1]
    assert [s.role for s in name_sums(after).stages] == [Role.CONVOLUTION]
    assert split_windows(after) is after


@pytest.mark.parametrize(
    ("load", "size", "taps"),
    [
        ("in0[i0, 8*i1 + i2 + 8*r0 + r1]", 71, 3),  # the size is no multiple
        ("in0[i0, 3*i1 + i2 + 3*r0 + r1]", 33, 3),  # rows overlap: no place tells which one it is of
        ("in0[i0, 7*i1 + i2 + 7*r0 + r1]", 1834, 256),  # too many taps
        ("in0[i0, 7*i1 + i2 + r1]", 63, 3),  # windows along one dimension of two
    ],
)
def test_what_is_no_two_windows_stays(load: str, size: int, taps: int) -> None:
    before = made(load, size, {}, taps)
    assert split_windows(before) is before


def bottleneck(x: Tensor, wide: Tensor, deep: Tensor, bias: Tensor, stride: int, spread: int) -> Tensor:
    y = F.relu6(F.conv2d(x, wide, bias))
    pad = spread * (deep.shape[-1] // 2)
    return F.relu6(F.conv2d(y, deep, None, stride, pad, spread, deep.shape[0])) + (y if stride == 1 else 0)


@pytest.mark.parametrize(("kernel", "stride", "spread"), [(3, 1, 1), (3, 2, 1), (5, 1, 1), (3, 1, 2)])
@pytest.mark.parametrize("size", [(28, 28), (9, 13), (14, 7)])
def test_inverted_bottlenecks_are_stencils(kernel: int, stride: int, spread: int, size: tuple[int, int]) -> None:
    x, wide = torch.randn(3, 16, *size), torch.randn(48, 16, 1, 1) / 4
    deep, bias = torch.randn(48, 1, kernel, kernel) / 3, torch.randn(48)
    args = x, wide, deep, bias, stride, spread
    expected = bottleneck(*(a.double() if isinstance(a, Tensor) else a for a in args))  # type: ignore[arg-type]
    got = torch.compile(bottleneck, backend="mlc", dynamic=False)(*args)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    if stride == 1:
        torch._dynamo.reset()  # which would take the sizes for ones that vary
        rules = [k.rule for k in torch_mlc.explain(bottleneck, *args).kernels]
        assert "cpu_stencil" in rules and "cpu_contraction" not in rules


def test_sizes_of_images_may_vary() -> None:
    wide, deep, bias = torch.randn(48, 16, 1, 1) / 4, torch.randn(48, 1, 3, 3) / 3, torch.randn(48)
    x = torch.randn(3, 16, 28, 26)
    for dim in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, dim)
    assert [k.rule for k in torch_mlc.explain(bottleneck, x, wide, deep, bias, 1, 1).kernels] == ["cpu_stencil"]
    run = torch.compile(bottleneck, backend="mlc", dynamic=True)
    for batch, height, width in ((3, 28, 26), (2, 5, 7), (4, 3, 17), (1, 64, 9)):
        x = torch.randn(batch, 16, height, width)
        expected = bottleneck(x.double(), wide.double(), deep.double(), bias.double(), 1, 1)
        torch.testing.assert_close(run(x, wide, deep, bias, 1, 1).double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_bottlenecks_are_eagers() -> None:
    args = torch.randn(2, 8, 14, 14), torch.randn(24, 8, 1, 1) / 3, torch.randn(24, 1, 3, 3) / 3, torch.randn(24)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        ours, theirs = ([a.to(dtype, copy=True).requires_grad_() for a in args] for _ in range(2))
        torch.compile(bottleneck, backend="mlc")(*ours, 1, 1).sin().sum().backward()
        bottleneck(*theirs, 1, 1).sin().sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)
