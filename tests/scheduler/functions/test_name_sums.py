"""What sums of functions say that they are: before and after, and what the verifier proves of it."""

from __future__ import annotations

import pytest

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import LoopNest, blocks
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.functions.lower import lower_stages
from torch_mlc.scheduler.functions.name_sums import name_sums

TEXT = """
@function
def f(in0: float32[8, 6], in1: float32[6, 16], in2: float32[8, 18], out0: output(float32[8, 16])):
    i0 = row(8)
    i1 = row(16)
    r0 = inner({over})
    t0, = reduce({monoid}, rows, inner, ({value},){role})
    out0[i0, i1] = t0
"""
CASES = {
    Role.PRODUCT: (6, "mul(in0[i0, r0], in1[r0, i1])"),
    Role.POOLING: (3, "in2[i0, i1 + r0]"),
    Role.CONVOLUTION: (3, "mul(in2[i0, i1 + r0], in0[i0, r0])"),
    None: (6, "mul(in0[i0, r0], in0[i0, 0])"),
}
# A sum over places for each of three taps: of what is read, and of its product with a gradient.
TAPS = """
@function
def f(in0: float32[8, 256], in1: float32[8, 258], out0: output(float32[8, 3])):
    i0 = row(8)
    i1 = row(3)
    r0 = inner(256)
    t0, = reduce(sum, rows, inner, ({value},){role})
    out0[i0, i1] = t0
"""
OF_TAPS = {Role.TAP_SUM: "in1[i0, i1 + r0]", Role.FILTER_GRADIENT: "mul(in0[i0, r0], in1[i0, i1 + r0])"}


def function(text: str) -> TensorFunction:
    parsed = parse(text)
    assert isinstance(parsed, TensorFunction)
    verify(parsed)
    return parsed


def text(of: Role | None, said: Role | None, monoid: str = "sum") -> str:
    role = "" if said is None else f", role={said.value}"
    if of in OF_TAPS:
        return TAPS.format(value=OF_TAPS[of], role=role)
    over, value = CASES[of]
    return TEXT.format(over=over, monoid=monoid, value=value, role=role)


@pytest.mark.parametrize("role", [*CASES, *OF_TAPS], ids=str)
def test_what_is_said(role: Role | None) -> None:
    named = name_sums(function(text(role, None)))
    assert named == function(text(role, role))
    assert parse(show(named)) == named and name_sums(named) is named
    nest = lower_stages(named)
    assert [b.role for b, _ in blocks(nest)] == [role]
    verify(nest)
    assert parse(show(nest)) == nest


def test_a_maximum_is_a_pooling_and_no_product() -> None:
    assert name_sums(function(text(Role.POOLING, None, "max"))) == function(text(Role.POOLING, Role.POOLING, "max"))
    assert name_sums(function(text(Role.PRODUCT, None, "max"))) == function(text(Role.PRODUCT, None, "max"))


def test_windows_that_are_longer_than_what_they_slide_along() -> None:
    value, over = "in2[i0, i1 + r0]", 200
    wide = TEXT.replace("float32[8, 18]", "float32[8, 215]").format(over=over, monoid="sum", value=value, role="")
    assert [s.role for s in name_sums(function(wide)).stages] == [Role.TAP_SUM]


def test_stages_with_roles_of_attention_keep_theirs() -> None:
    of = function("""
@function
def attention(in0: float32[64, 128], in1: float32[64, 128], in2: float32[64, 32], out0: output(float32[64, 32])):
    i0 = row(64)
    r0 = inner(64)
    x0 = extra(128)
    x1 = extra(32)
    t0, = reduce(sum, [i0, r0], [x0], (mul(in0[i0, x0], in1[r0, x0]),), role=score)
    t1, = reduce(sum, [i0, x1], [r0], (mul(t0[i0, r0], in2[r0, x1]),), role=weighted_sum)
    out0[i0, x1] = t1
""")
    assert name_sums(of) is of


@pytest.mark.parametrize(
    ("of", "said", "says"),
    [
        (None, Role.PRODUCT, "no product: it sums no product of two operands"),
        (Role.POOLING, Role.PRODUCT, "no product: it sums no product of two operands"),
        (Role.PRODUCT, Role.CONVOLUTION, "no convolution: it combines no taps of windows"),
        (Role.POOLING, Role.CONVOLUTION, "no convolution: it sums no product"),
        (Role.PRODUCT, Role.TAP_SUM, "no tap_sum: no window slides along its sum"),
        (Role.TAP_SUM, Role.FILTER_GRADIENT, "no filter_gradient: it sums no product"),
        (Role.PRODUCT, Role.SCORE, "no score: a score is summed over features"),
    ],
    ids=str,
)
def test_what_is_refused(of: Role | None, said: Role, says: str) -> None:
    with pytest.raises(VerifyError, match=says):
        function(text(of, said))


def test_a_block_that_sums_no_product_is_none() -> None:
    nest = lower_stages(name_sums(function(text(Role.PRODUCT, None))))
    wrong = parse(show(nest).replace("mul(in0[i0, r0], in1[r0, i1])", "mul(in0[i0, r0], float32(2.0))"))
    assert isinstance(wrong, LoopNest)
    with pytest.raises(VerifyError, match="b0 is no product"):
        verify(wrong)
