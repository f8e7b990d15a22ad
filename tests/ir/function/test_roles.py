"""Roles are proved: what a stage is said to be and is not is refused."""

import pytest

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify

ATTENTION = """
@function
def attention(in0: float32[4, 8], in1: float32[6, 8], in2: float32[6, 8], out0: output(float32[4, 8])):
    i0 = row(4)
    r0 = inner(6)
    x0 = extra(8)
    x1 = extra(8)
    t0, = reduce(sum, [i0, r0], [x0], (mul(in0[i0, x0], in1[r0, x0]),), role=score)
    t1 = compute([i0, r0], mul(t0[i0, r0], float32(0.5)), role=weight)
    t2, t3, t4 = reduce(attention, [i0, x1], [r0], (t1[i0, r0], float32(1.0), in2[r0, x1]), role=state)
    t5 = compute([i0, x1], div(t4[i0, x1], t3[i0, x1]), role=result)
    out0[i0, x1] = t5
"""
BACKWARD = """
@function
def backward(in0: float32[2, 4, 8], in1: float32[2, 6, 8], in2: float32[2, 4, 8], out0: output(float32[2, 6, 8]),
             out1: output(float32[4, 6])):
    i0 = row(2)
    i1 = row(6)
    r0 = inner(4)
    x0 = extra(8)
    x1 = extra(8)
    x2 = extra(8)
    t0, = reduce(sum, [i0, i1], [x2], (mul(in1[i0, i1, x2], in1[i0, i1, x2]),), role=row_total)
    t1, = reduce(sum, [i0, i1, r0], [x0], (mul(in0[i0, r0, x0], in1[i0, i1, x0]),), role=score)
    t2 = compute([i0, i1, r0], exp(sub(t1[i0, i1, r0], t0[i0, i1])), role=weight)
    t3, = reduce(sum, [i0, i1, x1], [r0], (mul(t2[i0, i1, r0], in2[i0, r0, x1]),), role=weighted_sum)
    t4, = reduce(sum, [r0, i1], [i0], (t2[i0, i1, r0],), role=weight_total)
    t5 = compute([i0, i1, x1], neg(t3[i0, i1, x1]), role=result)
    out0[i0, i1, x1] = t5
    out1[r0, i1] = t4
"""


def refused(text: str) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(parse(text))
    return str(caught.value)


def test_what_is_changed_below_is_sound() -> None:
    for text in (ATTENTION, BACKWARD):
        verify(parse(text))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("reduce(sum, [i0, r0], [x0]", "reduce(max, [i0, r0], [x0]", "no score: a score is a sum"),
        ("mul(in0[i0, x0], in1[r0, x0])", "add(in0[i0, x0], in1[r0, x0])", "no score: a score sums a product of two"),
        ("mul(in0[i0, x0], in1[r0, x0])", "mul(in0[i0, x0], in1[r0, 0])", "no score: a score sums a product of two"),
        ("compute([i0, r0], mul(t0[i0, r0], float32(0.5)), role=weight)",
         "reduce(max, [i0], [r0], (t0[i0, r0],), role=weight)", "no weight: a weight is computed point by point"),
        ("(t1[i0, r0], float32(1.0), in2", "(in1[r0, 0], float32(1.0), in2", "no state: its first value is made of no"),
        ("(t1[i0, r0], float32(1.0), in2[r0, x1])", "(mul(t1[i0, r0], in2[r0, x1]), float32(1.0), in2[r0, x1])",
         "no state: a score has no features"),
        ("div(t4[i0, x1], t3[i0, x1])", "mul(t4[i0, x1], t1[i0, 0])", "no result: it reads what is there for each"),
        ("role=score", "role=weighted_sum", "no weighted_sum: a weighted sum is combined over all keys"),
        ("role=state", "role=weighted_sum", "no weighted_sum: a weighted sum is a sum"),
        (", role=weight)", ")", "it has no role, and other stages have"),
        (", role=score)", ", role=row_total)", "none makes scores"),
    ],
)  # fmt: skip
def test_faults_of_a_forward(old: str, new: str, says: str) -> None:
    assert old in ATTENTION
    text = ATTENTION.replace(old, new, 1)
    if "reduce(max, [i0], [r0]" in new:
        text = text.replace("t1 = ", "t1, = ").replace("t1[i0, r0]", "t1[i0]")
    assert says in refused(text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("reduce(sum, [i0, i1], [x2]", "reduce(sum, [i0], [i1, x2]", "no row_total: a total of a row is combined over"),
        ("mul(t2[i0, i1, r0], in2[i0, r0, x1])", "mul(in2[i0, r0, 0], in2[i0, r0, x1])",
         "no weighted_sum: it sums no product of a weight with a vector"),
        ("mul(t2[i0, i1, r0], in2[i0, r0, x1])", "add(t2[i0, i1, r0], in2[i0, r0, x1])",
         "no weighted_sum: it sums no product of a weight with a vector"),
        ("(t2[i0, i1, r0],), role=weight_total", "(in0[i0, r0, 0],), role=weight_total", "no weight_total: it sums no"),
        ("reduce(sum, [r0, i1], [i0]", "reduce(product, [r0, i1], [i0]", "no weight_total: a total of weights is a"),
        ("neg(t3[i0, i1, x1]), role=result)\n",
         "neg(t3[i0, i1, x1]), role=result)\n    t6 = compute([i0, i1, r0], exp(t2[i0, i1, r0]), role=weight)\n",
         "no result: what stands below still makes or combines scores"),
    ],
)  # fmt: skip
def test_faults_of_a_backward(old: str, new: str, says: str) -> None:
    assert old in BACKWARD
    text = BACKWARD.replace(old, new, 1)
    if "[i1, x2]" in new:
        text = text.replace("t0[i0, i1]", "t0[i0]")
    assert says in refused(text)
