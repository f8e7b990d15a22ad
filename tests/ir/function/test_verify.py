"""Every rule of tensor functions refuses what breaks it, with the culprit underlined."""

from dataclasses import replace

import pytest
import sympy

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.expr.monoid import SUM
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify

COLUMNS = """
@function
def columns(in0: float32[8, 16], in1: int64[8], out0: output(bfloat16[16]), out1: output(float32[8])):
    i0 = row(8)
    r0 = inner(16)
    x0 = extra(8)
    t0, = reduce(sum, rows, inner, (in0[i0, r0],))
    t1, = reduce(sum, [r0], [i0], (mul(in0[i0, r0], t0[i0]),))
    t2 = compute(rows, float32(0.0))
    scatter(sum, t2, [x0], in0[x0, 0], (in1[x0],))
    out0[r0] = t1
    out1[i0] = t2
"""
SCAN = """
@function
def running(in0: float32[8, 16], out0: output(float32[8, 16])):
    i0 = row(8)
    r0 = inner(16)
    t0, = scan(max, points, (in0[i0, r0],))
    out0[i0, r0] = t0
"""


def refused(function: object) -> str:
    assert isinstance(function, TensorFunction)
    with pytest.raises(VerifyError) as caught:
        verify(function)
    return str(caught.value)


def test_what_is_changed_below_is_sound() -> None:
    verify(parse(COLUMNS))
    verify(parse(SCAN))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        # names
        ("t1, = reduce", "t0, = reduce", "2 things are called 't0'"),
        ("x0 = extra(8)", "x0 = extra(8)\n    x0 = extra(8)", "2 things are called 'x0'"),
        # dimensions
        ("row(8)", "row(s0)", "nothing binds the symbol s0"),
        ("in0: float32[8, 16]", "in0: float32[s0, 16]", "nothing binds the symbol s0"),
        ("[r0], [i0]", "[r0], [i1]", "i1 is no dimension of the function; they are i0, r0, x0"),
        ("[r0], [i0]", "[r0, i0], [i0]", "i0 is 2 times among its axes and what it combines over"),
        # values
        ("in0[i0, r0],", "in0[i0],", "in0 has 2 dimensions, indexed by 1"),
        ("t0[i0]", "t0[r0]", "index r0 of dimension 0 runs over 0..15, and t0 has 8 there"),
        ("in0[x0, 0]", "in0[x0, x1]", "nothing binds the symbol x1"),
        ("mul(in0[i0, r0], t0[i0])", "mul(in0[i0, r0], in1[i0])", "mul of mixed types float32, int64"),
        ("in0[x0, 0]", "t2[x0]", "t2 is read, and written where data say"),
        ("rows, inner, (in0[i0, r0],)", "rows, inner, (load(t1[r0], float32),)", "nothing above defines 't1'"),
        ("rows, inner, (in0[i0, r0],)", "[i0, r0], [x0], (in0[i0, x0 + 9],)", "runs over 9..16"),
        # kinds of stages
        ("in0[i0, r0],)", "in0[i0, r0], float32(1.0))", "sum has 1 values and results, here 2 and 1"),
        ("float32(0.0))\n", "float32(0.0))\n    t3, t4 = compute(rows, float32(0.0))\n", "here 1 and 2"),
        ("scatter(sum, t2", "scatter(sum, t9", "no stage above makes 't9'"),
        ("scatter(sum, t2", "scatter(argmax, t2", "argmax has 2 components; a scatter combines one"),
        ("(in1[x0],)", "(in1[x0], in1[x0])", "2 places for out1 of 1 dimensions"),
        ("(in1[x0],)", "(in0[x0, 0],)", "a place is an integer, not float32"),
        ("scatter(sum, t2, [x0], in0[x0, 0], (in1[x0],))", "scatter(sum, t2, rows, in0[i0, 0], (in1[i0],))",
         "a scatter has axes of its own"),
        ("out1[i0] = t2", "out1[i0] = t0", "'t2' leaves the function 0 times, and has to once"),
        ("@function", "@function(table=True)", "a function over a table scatters"),
        # outputs
        ("out0[r0] = t1", "out0[r0] = t7", "no stage makes 't7'; there are t0, t1, t2"),
        ("out0[r0] = t1", "out0[r0, 0] = t1", "out0 has 1 dimensions, indexed by 2"),
        ("out0[r0] = t1", "out0[i0] = t1", "nothing binds the symbol i0"),
        ("out0[r0] = t1", "out0[r0 + 1] = t1", "runs over 1..16"),
        ("out0[r0] = t1", "out0[r0] = t1\n    out0[r0] = t1", "two results go to out0"),
    ],
)  # fmt: skip
def test_faults_of_a_function(old: str, new: str, says: str) -> None:
    assert old in COLUMNS
    message = refused(parse(COLUMNS.replace(old, new, 1)))
    assert says in message
    assert "^" in message and message.startswith("columns: ")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("r0 = inner(16)", "r0 = row(16)", "a scan of a function without inner dimensions"),
        ("scan(max, points", "scan(max, [i0, r0]", "a scan goes along the inner dimensions by a monoid, at points"),
    ],
)
def test_faults_of_a_scan(old: str, new: str, says: str) -> None:
    assert says in refused(parse(SCAN.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("in0[i0, i1]))", "in0[i0, i1 - 1]))", "in0 is read where another point may have written"),
        ("i1 = row(6)", "i1 = inner(6)", "t0 is no result of a row, and goes over the input in0"),
        ("compute(rows", "compute([i0, i1]", "t0 is no result of a row, and goes over the input in0"),
    ],
)
def test_faults_of_what_is_written_over_an_input(old: str, new: str, says: str) -> None:
    text = """
@function
def doubled(in0: float32[4, 6]):
    i0 = row(4)
    i1 = row(6)
    t0 = compute(rows, add(in0[i0, i1], in0[i0, i1]))
    in0[i0, i1] = t0
"""
    verify(parse(text))
    changed = text.replace(old, new)
    changed = changed.replace("compute(rows", "compute(points") if "inner" in new else changed
    assert says in refused(parse(changed))


def test_faults_that_no_script_has() -> None:
    function = parse(COLUMNS)
    assert isinstance(function, TensorFunction)
    total, *rest = function.stages
    over = replace(rest[1], over=(sympy.Symbol("i0", integer=True, nonnegative=True),))
    wrong = replace(function, stages=(total, rest[0], over, rest[2]))
    assert "only a reduction combines over dimensions" in refused(wrong)
    other = replace(function.inputs[0], align=64)
    assert "is the name of an input that is not the same" in refused(
        replace(function, outputs=(replace(function.outputs[0], buffer=other), function.outputs[1]))
    )
    twice = replace(function.inputs[1], name="t0")
    assert "2 things are called 't0'" in refused(replace(function, inputs=(function.inputs[0], twice)))
    named = replace(function.rows[0], var=sympy.Symbol("i0"))
    assert "is not ir.expr.value.symbol('i0')" in refused(replace(function, rows=(named,)))
    scan = replace(total, monoid=SUM, scan=True, over=(function.inner[0].var,))
    assert "only a reduction combines" in refused(replace(function, stages=(scan, *rest)))


def test_the_culprit_is_underlined() -> None:
    lines = refused(parse(COLUMNS.replace("t0[i0]", "t0[r0]"))).split("\n")
    at = next(k for k, line in enumerate(lines) if line.endswith("^^^^^^ here"))
    assert lines[at - 1][lines[at].index("^") :].startswith("t0[r0]")


def test_a_single_feature_is_read_at_zero() -> None:
    """Attention of heads of width one, whose only feature was taken out of the indices."""
    text = """
@function
def attention_0(in0: tensor(float32, [3, 1]), out0: output(tensor(float32, [3, 1]))):
    i0 = row(3)
    r0 = inner(3)
    x0 = extra(1)
    x1 = extra(1)
    t0, = reduce(sum, [i0, r0], [x1], (mul(in0[i0, 0], {other}),), role=score)
    t1, t2, t3 = reduce(attention, [i0, x0], [r0], (t0[i0, r0], float32(1.0), in0[r0, 0]), role=state)
    t4 = compute([i0, x0], div(t3[i0, x0], t2[i0, x0]), role=result)
    out0[i0, x0] = t4
"""
    verify(parse(text.format(other="in0[r0, 0]")))
    with pytest.raises(VerifyError, match="a score sums a product of two loads"):
        verify(parse(text.format(other="float32(2.0)")))
