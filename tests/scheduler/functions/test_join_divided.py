"""Memory that lies together is read by one number, and the numbers that are read stay the same."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from torch_mlc.ir.expr.index import divisions
from torch_mlc.ir.expr.value import is_value, loads
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.functions.join_divided import join_divided

TEXT = """
@function
def f(in0: tensor(float32, [{shape}], strides=[{strides}]), in1: float32[5, 24], out0: output(float32[5])):
    i0 = row(5)
    r0 = inner(24)
    t0, = reduce(sum, rows, inner, (mul({value}, in1[i0, r0]),))
    out0[i0] = t0
"""


def made(shape: str, strides: str, value: str) -> TensorFunction:
    parsed = parse(TEXT.format(shape=shape, strides=strides, value=value))
    assert isinstance(parsed, TensorFunction)
    verify(parsed)
    return parsed


def divided(function: TensorFunction) -> bool:
    reads = [i for s in function.stages for v in s.values for ld in loads(v) for i in ld.indices]
    return any(divisions(i) for i in reads if not is_value(i))


JOINED = {
    "beside each other": ("5, 3, 8", "24, 8, 1", "in0[i0, r0//8, r0 % 8]"),
    "apart": ("3, 5, 8", "8, 24, 1", "in0[r0//8, i0, r0 % 8]"),
    "turned": ("8, 5, 3", "1, 24, 8", "in0[r0 % 8, i0, r0//8]"),
    "three": ("5, 2, 3, 4", "24, 12, 4, 1", "in0[i0, r0//12, r0//4 % 3, r0 % 4]"),
    "twice": ("5, 3, 8", "24, 8, 1", "add(in0[i0, r0//8, r0 % 8], in0[0, r0//8, r0 % 8])"),
    "every other": ("5, 3, 8", "48, 16, 2", "in0[i0, r0//8, r0 % 8]"),
}
LEFT = {
    "a gap": ("5, 3, 8", "27, 9, 1", "in0[i0, r0//8, r0 % 8]"),
    "another order": ("5, 8, 3", "24, 3, 1", "in0[i0, r0 % 8, r0//8]"),
    "others read otherwise": ("5, 3, 8", "24, 8, 1", "add(in0[i0, r0//8, r0 % 8], in0[i0, r0 % 3, r0 % 8])"),
    "the same row again": ("5, 3, 8", "24, 8, 1", "in0[i0, 0, r0 % 8]"),
}


@pytest.mark.parametrize("name", JOINED)
def test_what_lies_together_is_read_by_one_number(name: str) -> None:
    function = join_divided(made(*JOINED[name]))
    verify(function)
    assert not divided(function) and len(function.inputs[0].shape) == 2
    (first, *_), (step, *_) = function.inputs[0].shape, function.inputs[0].strides
    assert {int(n) for n in function.inputs[0].shape} == {5, 24} and first and step


@pytest.mark.parametrize("name", LEFT)
def test_what_does_not_is_left(name: str) -> None:
    function = made(*LEFT[name])
    assert join_divided(function) == function


@pytest.mark.parametrize("seed", range(6))
def test_products_over_heads_and_their_elements(seed: int) -> None:
    rng = random.Random(seed)
    b, h, s, d, n = (rng.choice((1, 2, 3, 5, 8)) for _ in range(5))
    torch.manual_seed(seed)
    x, w, g = torch.randn(b, s, h, d).transpose(1, 2), torch.randn(n, h * d), torch.randn(b, s, n)

    def f(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        rows = x.transpose(1, 2).reshape(b, s, h * d)
        return g + (rows.unsqueeze(-2) * w).sum(-1)

    wanted = f(x.double(), w.double(), g.double())
    for given in (x, x.contiguous()):
        found = torch.compile(f, backend="mlc", fullgraph=True)(given, w, g)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
        torch._dynamo.reset()
