"""The text of a tensor function is read back to the same function."""

from dataclasses import replace

import pytest

from torch_mlc.ir.expr.monoid import SUM
from torch_mlc.ir.expr.value import Load, call, symbol
from torch_mlc.ir.function.function import Stage, TensorFunction
from torch_mlc.ir.text.parser import ParseError, parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import function_key
from torch_mlc.ir.verify.verify import verify

SOFTMAX = """\
@function
def softmax(in0: tensor(float32, [s0, 128], align=16), out0: output(tensor(float32, [s0, 128], align=16))):
    s0 = size(lower=2)
    i0 = row(s0)
    r0 = inner(128)
    t0, t1 = reduce(logsumexp, rows, inner, (in0[i0, r0], float32(1.0)))
    t2 = compute(rows, log(t1[i0]))
    t3 = compute(points, exp(sub(sub(in0[i0, r0], t0[i0]), t2[i0])))
    out0[i0, r0] = t3
"""
COLUMNS = """\
@function
def columns(in0: float32[8, 16], out0: output(bfloat16[16]), out1: output(float32[8])):
    i0 = row(8)
    r0 = inner(16)
    t0, = reduce(sum, rows, inner, (in0[i0, r0],))
    t1, = reduce(sum, [r0], [i0], (mul(in0[i0, r0], t0[i0]),))
    out0[r0] = t1
    out1[i0] = t0
"""
SCAN = """\
@function(table=True)
def running(in0: float32[8, 16], in1: float32[8], out0: output(float32[8, 16])):
    i0 = row(8)
    r0 = inner(16)
    t0, = scan(max, points, (in0[i0, r0],))
    t1 = compute(rows, neg(in1[i0]))
    out0[i0, r0] = t0
    in1[i0] = t1
"""
SCATTER = """\
@function
def scatter(in0: int64[5], in1: float32[5], out0: output(float32[9])):
    i0 = row(9)
    x0 = extra(5)
    t0 = compute(rows, float32(0.0))
    scatter(sum, t0, [x0], in1[x0], (in0[x0],))
    out0[i0] = t0
"""
ATTENTION = """\
@function
def attention(in0: float32[4, 8], in1: float32[6, 8], in2: float32[6, 8], out0: output(float32[4, 8])):
    i0 = row(4)
    r0 = inner(6)
    x0 = extra(8)
    x1 = extra(8)
    t0, = reduce(sum, [i0, r0], [x0], (mul(in0[i0, x0], in1[r0, x0]),), role=score)
    t1, t2, t3 = reduce(attention, [i0, x1], [r0], (t0[i0, r0], float32(1.0), in2[r0, x1]), role=state)
    t4 = compute([i0, x1], div(t3[i0, x1], t2[i0, x1]), role=result)
    out0[i0, x1] = t4
"""
SCRIPTS = {"softmax": SOFTMAX, "columns": COLUMNS, "running": SCAN, "scatter": SCATTER, "attention": ATTENTION}


def read(text: str) -> TensorFunction:
    function = parse(text)
    assert isinstance(function, TensorFunction)
    return function


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_what_is_shown_is_read_back(text: str) -> None:
    function = read(text)
    verify(function)
    assert show(function) == text
    assert read(show(function)) == function


def test_stages_say_how_they_go() -> None:
    function = read(COLUMNS)
    _, across = function.stages
    assert across.axes == (symbol("r0"),) and across.over == (symbol("i0"),)
    assert [d.var for d in function.axes_of(function.stages[0])] == [symbol("i0")]
    assert read(SCAN).table and read(SCAN).stages[0].scan and read(SCAN).outputs[1].buffer == read(SCAN).inputs[1]
    assert read(SCATTER).stages[1].into == "t0" and read(SCATTER).scatters


def test_parts_that_are_shared_are_named() -> None:
    part = call("exp", Load("in0", (symbol("i0"), symbol("r0")), read(SOFTMAX).inputs[0].dtype))
    function = read(COLUMNS)
    first = replace(function.stages[0], values=(call("mul", part, part),))
    shared = replace(function, stages=(first, *function.stages[1:]))
    assert "_t0 = exp(in0[i0, r0])" in show(shared)
    assert read(show(shared)) == shared


def test_where_a_result_is_does_not_depend_on_how_it_is_said() -> None:
    value = Load("in0", (symbol("i0"), symbol("r0")), read(COLUMNS).inputs[0].dtype)
    assert Stage(("t0",), (value,), False, SUM) == Stage(("t0",), (value,), True, SUM)


def test_the_key_is_of_what_code_depends_on() -> None:
    function = read(SOFTMAX)
    assert function_key(function) == function_key(replace(function, name="other"))
    others = [
        read(SOFTMAX.replace("log(t1", "exp(t1")),
        read(SOFTMAX.replace("128", "64")),
        read(SOFTMAX.replace("lower=2", "lower=2, hint=4096")),
        read(SOFTMAX.replace("compute(points, exp", "compute([r0, i0], exp")),
    ]
    assert len({function_key(f) for f in (function, *others)}) == 5
    attention = read(ATTENTION)
    assert function_key(attention) != function_key(read(ATTENTION.replace(", role=score", "")))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("compute(rows, log", "project(rows, log", "expected compute(axes, value), reduce("),
        ("reduce(logsumexp", "reduce(average", "one of the monoids"),
        ("compute(rows, log(t1[i0]))", "compute(rows, log(t1[i0]), role=hero)", "one of the roles row_total"),
        ("compute(rows, log(t1[i0]))", "compute(rows, log(t1[i0]), rule=score)", "one of the options role"),
        ("log(t1[i0])", "log(t9[i0])", "a tensor that is defined above"),
        ("@function", "@function(tables=True)", "one of the options table"),
        ("out0[i0, r0] = t3", "return t3", "a stage, or out[…] = result"),
    ],
)
def test_what_is_no_script_is_refused(old: str, new: str, says: str) -> None:
    assert old in SOFTMAX
    with pytest.raises(ParseError) as caught:
        parse(SOFTMAX.replace(old, new))
    assert says in str(caught.value)
