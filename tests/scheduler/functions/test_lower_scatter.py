"""Scatters beside other work in one kernel: what a stage makes and another reads, stored or not."""

from __future__ import annotations

import numpy as np

from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.functions.lower import lower_to_loops

BESIDE = """
@function
def beside(in0: float32[4], in1: int64[6], in2: float32[6], in3: float32[3, 2], out1: output(float32[3, 2]),
           out2: output(float32[3, 2])):
    i0 = row(4)
    x0 = extra(6)
    x1 = extra(3)
    x2 = extra(2)
    t0 = compute(rows, in0[i0])
    scatter(sum, t0, [x0], in2[x0], (in1[x0],))
    t1 = compute([x1, x2], exp(in3[x1, x2]))
    t2 = compute([x1, x2], add(t1[x1, x2], float32(1.0)))
    t3 = compute([x1, x2], mul(t2[x1, x2], add(t2[x1, x2], t1[x1, x2])))
    in0[i0] = t0
    out1[x1, x2] = t1
    out2[x1, x2] = t3
"""


def test_what_other_stages_read_is_computed_for_each() -> None:
    function = parse(BESIDE)
    assert isinstance(function, TensorFunction)
    nest = lower_to_loops(function)
    verify(nest)
    rng = np.random.default_rng(0)
    base, places = rng.normal(size=4).astype("f4"), rng.integers(0, 4, 6)
    added, x = rng.normal(size=6).astype("f4"), rng.normal(size=(3, 2)).astype("f4")
    found = run_nest(nest, {"in0": base, "in1": places, "in2": added, "in3": x}, {})
    expected = base.copy()
    np.add.at(expected, places, added)
    e = np.exp(x)
    for name, want in (("in0", expected), ("out1", e), ("out2", (e + 1) * (e + 1 + e))):
        np.testing.assert_allclose(found[name], want, rtol=1e-6)
