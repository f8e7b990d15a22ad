"""powers_of_two: exponentials as powers of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.text.printer import show
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]
WEIGHTS = """
    @nest(outputs=["out0"])
    def weights(in0: float32[40], in1: float32[40], out0: float32[40]):
        for i in serial(40):
            with block("b0"):
                i0 = spatial(40, i)
                out0[i0] = mul(exp(sub(in0[i0], exp(in1[i0]))), in1[i0])
    """


@pytest.mark.parametrize("function", ["exp2", "exp2_approx"])
def test_all_exponentials_of_a_block(parsed: Parse, proved: Prove, function: str) -> None:
    nest = parsed(WEIGHTS)
    s = proved(nest, lambda s: s.powers_of_two("b0", function))
    assert show(s.nest).count(f"{function}(") == 2 and "exp(" not in show(s.nest)


def test_infinities_and_nan_are_those_of_exponentials(parsed: Parse) -> None:
    nest = parsed(WEIGHTS)
    s = Schedule(nest)
    s.powers_of_two("b0", "exp2")
    odd = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 88.0, -104.0, 0.0], np.float32)
    given = {"in0": np.repeat(odd, 5), "in1": np.tile(odd[:5], 8)}
    with np.errstate(all="ignore"):
        wanted, found = (run_nest(n, given, {})["out0"] for n in (nest, s.nest))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


def test_what_it_refuses(parsed: Parse, nests: Mapping[str, LoopNest]) -> None:
    with pytest.raises(ScheduleError, match="it has no exponential of float32"):
        Schedule(nests["column_sum"]).powers_of_two("b0", "exp2")
    with pytest.raises(ScheduleError, match="function is 'exp', not one of exp2, exp2_approx"):
        Schedule(parsed(WEIGHTS)).powers_of_two("b0", "exp")
