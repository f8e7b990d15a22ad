"""Functions with an error: the code of CPUs against what the table promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.ir.oracle.test_oracle_ops import reference
from torch_mlc.codegen.llvm.functions.elementary import APPROXIMATE
from torch_mlc.ir.expr.ops import APPROXIMATIONS
from torch_mlc.ir.expr.value import call

Array = np.ndarray[Any, Any]
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3e38, -3e38, 1e30, -1e30, 1e-30, -1e-30, 1e-45, 2.0**-126)


def arguments() -> Array:
    """Near zero, of moderate size, where powers of two end, and what is special."""
    rng = np.random.default_rng(5)
    near = rng.choice([-1, 1], 20000) * 2.0 ** rng.uniform(-40, 40, 20000)
    return np.concatenate([near, rng.uniform(-14, 14, 40000), rng.uniform(-180, 135, 20000), SPECIAL]).astype("f4")


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("fn", APPROXIMATE)
def test_errors_are_as_promised(fn: str, lanes: int, compute: Callable[..., Array]) -> None:
    x = arguments()
    got = compute(lambda v: call(fn, v), x, lanes=lanes)
    want = reference(fn)(torch.from_numpy(x.astype(np.float64))).numpy()
    with np.errstate(over="ignore"):
        rounded = want.astype(np.float32)
    promise, finite = APPROXIMATIONS[fn], np.isfinite(rounded)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    off = np.abs(got[finite] - want[finite])
    most = np.maximum(np.abs(want[finite]) * (promise.error + 2.0**-24), promise.floor)
    assert (off <= most).all(), (x[finite][off > most][:5], off[off > most][:5])
