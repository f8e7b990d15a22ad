"""Scalar functions of users in the IR: what they mean, how they read, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import torch_mlc
from torch_mlc.ir.errors import IRError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.intrinsics import INTRINSICS, definition
from torch_mlc.ir.expr.ops import OPS, Result
from torch_mlc.ir.expr.value import Call, Var, call, const
from torch_mlc.ir.oracle.ops import function
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.parser_expr import result_type as parsed_type
from torch_mlc.ir.text.printer import show

F32, F16, I64, BOOL = DType.FLOAT32, DType.FLOAT16, DType.INT64, DType.BOOL


def softcap(x: Any, cap: Any) -> Any:
    return (x / cap).tanh() * cap


def test_a_call_is_one_of_the_table() -> None:
    with torch_mlc.register_intrinsic("softcap", softcap) as handle:
        row = OPS["softcap"]
        assert (row.arity, row.result, row.flops) == (2, Result.SAME, 4 + 12 + 1)
        x = Var("x", F32)
        made = call("softcap", x, const(30.0, F32))
        formula = torch_mlc.Formula(x)
        assert handle(formula, 30.0).value == made == formula.softcap(30.0).value
        assert isinstance(made, Call) and made.dtype is F32 and parsed_type("softcap", made.args) is F32
    assert "softcap" not in OPS and "softcap" not in INTRINSICS
    with pytest.raises(AttributeError, match="no 'softcap'"):
        _ = formula.softcap


def test_what_the_formula_says_is_what_it_is() -> None:
    with torch_mlc.register_intrinsic("softcap", softcap), np.errstate(all="ignore"):
        for dtype in (F32, DType.FLOAT64, F16):
            got = function("softcap", dtype, dtype)(dtype.numpy.type(5.0), dtype.numpy.type(3.0))
            assert got.dtype == dtype.numpy
            assert math.isclose(got, 3 * math.tanh(5 / 3), rel_tol=1e-3 if dtype is F16 else 1e-6)
    with torch_mlc.register_intrinsic("is_near", lambda x, y: abs(x - y) < 1):
        assert OPS["is_near"].result is Result.BOOL
        assert function("is_near", I64, BOOL)(np.int64(3), np.int64(3)) is np.bool_(True)
        assert function("is_near", F16, BOOL)(np.float16(3), np.float16(1)) is np.bool_(False)


def test_programs_print_and_parse() -> None:
    text = """
@nest(outputs=["out0"])
def f(in0: float32[12], out0: float32[12]):
    for b0_i0 in serial(12):
        with block("b0"):
            i0 = spatial(12, b0_i0)
            out0[i0] = softcap(in0[i0], float32(30.0))
"""
    with torch_mlc.register_intrinsic("softcap", softcap):
        nest = parse(text)
        assert "softcap(in0[i0], float32(30.0))" in show(nest) and parse(show(nest)) == nest
    with pytest.raises(IRError, match="softcap"):
        parse(text)


def test_numpy_goes_over_the_formula() -> None:
    with torch_mlc.register_intrinsic("softcap", softcap, numpy=lambda x, cap: x - cap):
        got = function("softcap", F32, F32)(np.float32(5.0), np.float32(3.0))
    assert got == 2.0 and got.dtype == np.float32


def test_what_a_formula_uses_twice_is_named() -> None:
    """A tree would have two to the fortieth parts."""

    def power(x: Any) -> Any:
        for _ in range(40):
            x = x * x
        return x

    with torch_mlc.register_intrinsic("power", power):
        found = definition(INTRINSICS["power"], F32)
        assert [v.name for v, _ in found.lets] == [f"t{k}" for k in range(39)]
        assert found.result == call("mul", found.lets[-1][0], found.lets[-1][0]) and OPS["power"].flops == 40
        assert function("power", F32, F32)(np.float32(1.0)) == 1.0


def test_a_function_of_another_one() -> None:
    twice = torch_mlc.register_intrinsic("twice", lambda x: x + x)
    with twice, torch_mlc.register_intrinsic("four_times", lambda x: x.twice().twice()):
        assert function("four_times", F32, F32)(np.float32(3.0)) == 12.0


REFUSED: dict[str, tuple[Any, str]] = {
    "exp": (softcap, "there is a function 'exp' already, one of torch-mlc's"),
    "select": (softcap, "'select' cannot be the name"),
    "float32": (softcap, "'float32' cannot be the name"),
    "where": (softcap, "'where' cannot be the name"),
    "two words": (softcap, "'two words' cannot be the name"),
    "of_any": (lambda *x: x[0], "must have positional arguments alone"),
    "of_none": (lambda: 1, "must have positional arguments alone, and one at least"),
    "number": (lambda x: 1, r"gives no value: the formula of number gives a int; it must give a torch_mlc\.Formula"),
    "wrong": (lambda x: x.tanhh(), "gives no value: a formula has no 'tanhh'"),
    "other_type": (lambda x: x.to(DType.INT8), "gives int8 for float32; it must give the type of its arguments"),
    "itself": (lambda x: x.itself(), "a formula has no 'itself'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    formula, text = REFUSED[name]
    with pytest.raises(torch_mlc.RegistrationError, match=text):
        torch_mlc.register_intrinsic(name, formula)
    assert not INTRINSICS and (name in OPS) == (name == "exp")


def test_a_name_that_is_registered_already() -> None:
    with torch_mlc.register_intrinsic("softcap", softcap) as handle:
        with pytest.raises(torch_mlc.RegistrationError, match="a registered one; give yours another name"):
            torch_mlc.register_intrinsic("softcap", softcap)
        with pytest.raises(IRError, match="numbers alone"):
            handle(1.0, 2.0)
