"""Functions with an error: the text that each target gets, interpreted, against what the table promises.

Single instructions are exact in the interpreter; what is made of several is measured here.
"""

import numpy as np
import pytest
import sympy
import torch

from tests.ir.oracle.test_oracle_ops import reference
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.ops import APPROXIMATIONS, OPS
from torch_mlc.ir.expr.value import Load, call, symbol
from torch_mlc.ir.nest.loops import Axis, Block, Buffer, Loop, LoopKind, LoopNest, Store, contiguous_strides
from torch_mlc.ir.target import gpu_target

N = 1 << 14
F32 = DType.FLOAT32
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3e38, -3e38, 1e30, -1e30, 1e-30, -1e-30, 2.0**-126)
TARGETS = ("cuda:sm_70", "cuda:sm_90", "hip:gfx942")


def nest_of(fn: str) -> LoopNest:
    n = (sympy.Integer(N),)
    place = (symbol("i0"),)
    args = [Load(f"in{k}", place, F32) for k in range(OPS[fn].arity)]
    block = Block("b0", (Axis(symbol("i0"), n[0]),), (symbol("t"),), (Store("out0", place, call(fn, *args)),))
    names = (*(a.buffer for a in args), "out0")
    params = tuple(Buffer(name, n, contiguous_strides(n), F32) for name in names)
    return LoopNest("kernel", params, ("out0",), (Loop(symbol("t"), n[0], (block,), LoopKind.THREAD_X),))


def arguments(fn: str) -> list[np.ndarray]:
    """Near zero, of moderate size and of all magnitudes, and what is special, each with each other."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(OPS[fn].arity):
        x = rng.uniform(-14, 14, N)
        x[: N // 4] = rng.choice([-1, 1], N // 4) * 2.0 ** rng.uniform(-40, 40, N // 4)
        made.append(x.astype(np.float32))
    made[0][: len(SPECIAL) ** 2] = np.repeat(SPECIAL, len(SPECIAL))
    if len(made) > 1:
        made[1][: len(SPECIAL) ** 2] = np.tile(SPECIAL, len(SPECIAL))
    if fn == "reciprocal_approx":  # beyond, an argument counts as infinite
        made[0][np.isfinite(made[0]) & (np.abs(made[0]) > 2.0**126)] = 2.0**126
    return made


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fn", APPROXIMATIONS)
def test_errors_are_as_promised(interpreter, fn, target):
    source = emit_triton(nest_of(fn), gpu_target(target))
    given = arguments(fn)
    (got,) = interpreter.run(source, ("out0",), {f"in{k}": x for k, x in enumerate(given)}, {}).values()
    want = reference(fn)(*(torch.from_numpy(x.astype(np.float64)) for x in given)).numpy()
    with np.errstate(over="ignore"):
        rounded = want.astype(np.float32)
    promise = APPROXIMATIONS[fn]
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    off = np.abs(got[finite] - want[finite])
    # A result that float32 does not hold is rounded.
    most = np.maximum(np.abs(want[finite]) * (promise.error + 2.0**-24), promise.floor)
    assert (off <= most).all(), (given[0][finite][off > most][:5], off[off > most][:5])


def test_single_instructions():
    """What a target has an instruction for is that, whatever it is called."""
    texts = {target: emit_triton(nest_of("tanh_approx"), gpu_target(target)).text for target in TARGETS}
    assert ["tanh.approx.f32" in texts[t] for t in TARGETS] == [False, True, False]
    assert ["rcp.approx.ftz.f32" in texts[t] for t in TARGETS] == [True, False, False]
