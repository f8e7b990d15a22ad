"""The interpreter's own checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import Buffer

TEXT = """import triton
import triton.language as tl


@triton.jit
def kernel(in0_ptr, out0_ptr, s0):
    i = tl.arange(0, 16)
    {line}
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tl.store(out0_ptr + i, tl.load(in0_ptr + i, mask=i < s0, other=0), mask=i < s0)", ""),
        ("tl.store(out0_ptr + i, tl.load(in0_ptr + i), mask=i < s0)", "load beside the arguments in 3 of 16 lanes"),
        ("tl.store(out0_ptr + i - 1, i.to(tl.float32), mask=i < s0)", "store beside the arguments in 1 of 13 lanes"),
        ("tl.atomic_add(out0_ptr + i, 1.0, mask=i <= s0)", "atomic beside the arguments in 1 of 14 lanes"),
    ],
)
def test_kernels_touch_nothing_but_their_arguments(interpreter: Any, line: str, said: str) -> None:
    x = np.arange(13, dtype=np.float32)
    buffers = tuple(Buffer(n, (sympy.Integer(13),), (sympy.S.One,), DType.FLOAT32) for n in ("in0", "out0"))
    job = {
        "source": KernelSource("kernel", "triton", TEXT.format(line=line), buffers, ("s0",)), "grid": [1],
        "sizes": [13], "outputs": [1],
        "params": [(x, (1,), "float32"), (np.zeros_like(x), (1,), "float32")],
    }  # fmt: skip
    if said:
        with pytest.raises(AssertionError, match=said):
            interpreter.ask(job)
    else:
        np.testing.assert_array_equal(interpreter.ask(job)[0], x)
