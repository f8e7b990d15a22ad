"""Attention in pieces of the keys: two functions that together are the one they were made of."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.pieces.split_keys import split_keys

SIZES: dict[str, dict[str, Any]] = {
    "even": {"b": 1, "h": 2, "m": 1, "n": 1024, "e": 4, "d": 3},
    "a tail": {"b": 2, "h": 2, "m": 2, "n": 1031, "e": 2, "d": 3, "groups": 2},
}


def run(function: TensorFunction, inputs: list[np.ndarray], sizes: dict[str, int]) -> list[np.ndarray]:
    nest = lower_to_loops(function)
    found = run_nest(nest, [a.reshape(-1) for a in inputs], sizes)
    values = {symbol(k): sympy.Integer(v) for k, v in sizes.items()}
    return [found[o.buffer.name].reshape([int(n.xreplace(values)) for n in o.buffer.shape]) for o in function.outputs]


@pytest.mark.parametrize("name", ["plain", "alibi", "bias", "window5", "documents"])
@pytest.mark.parametrize("shape", [*SIZES, "dynamic"])
def test_two_functions_are_the_whole(attention_functions: ModuleType, name: str, shape: str) -> None:
    torch.manual_seed(0)
    kind = next(v for v in attention_functions.VARIANTS if v.name == name)
    values = {"s0": 700} if shape == "dynamic" else {}
    sizes = SIZES.get(shape, {"h": 1, "m": 2, "n": symbol("s0"), "e": 2, "d": 3})
    function = attention_functions.attention(kind, attention_functions.Sizes(**sizes), {"s0": 2000})
    pieces = split_keys(function, gpu_target("cuda:sm_90").machine)
    assert pieces is not None
    inputs = attention_functions.inputs(function, values)
    expected = attention_functions.expected(kind, inputs)
    given = [t.numpy() for t in inputs]
    states = run(pieces.first, given, values)
    (out,) = run(pieces.second, [*states, *(given[k] for k in pieces.taken)], values)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_what_is_not_cut(attention_functions: ModuleType) -> None:
    """Rows that occupy a GPU, and keys that are few."""

    def cut(**sizes: int) -> bool:
        function = attention_functions.attention(attention_functions.PLAIN, attention_functions.Sizes(**sizes))
        return split_keys(function, gpu_target("cuda:sm_90").machine) is not None

    assert cut(h=32, m=1, n=4096) and cut(h=2, m=1000, n=4096)
    assert not cut(h=32, m=1, n=400)
    assert not cut(b=8, h=32, m=1, n=4096)
    assert not cut(h=32, m=512, n=4096)
