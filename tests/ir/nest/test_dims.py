"""Of which dimensions of its function an axis is one: in the text, in the rules, and through lowering."""

from __future__ import annotations

import pytest

from torch_mlc.ir.errors import IRError, VerifyError
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import DimKind, LoopNest, blocks
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.functions.lower import lower_to_loops

FUNCTION = """
@function
def f(in0: float32[4, 8, 6], in1: float32[6, 16], out0: output(float32[4, 8, 16]), out1: output(float32[4])):
    i0 = row(4)
    r0 = inner(8)
    x0 = extra(6)
    x1 = extra(16)
    t0, = reduce(sum, [i0, r0, x1], [x0], (mul(in0[i0, r0, x0], in1[x0, x1]),))
    t1, = reduce(sum, rows, inner, (in0[i0, r0, 0],))
    out0[i0, r0, x1] = t0
    out1[i0] = t1
"""
NEST = """
@nest(outputs=['out0'])
def f(in0: float32[3, 5], out0: float32[3, 5]):
    t0 = local(float32[3])
    for b0_i0 in serial(3):
        for b0_r0 in serial(5):
            with block('b0'):
                i0 = spatial(3, b0_i0)
                r0 = reduction(5, b0_r0, dim=inner)
                t0[i0] = sum.update(in0[i0, r0])
    for b1_i0 in serial(3):
        for b1_r0 in serial(5):
            with block('b1'):
                i0 = spatial(3, b1_i0)
                r0 = spatial(5, b1_r0, dim=inner)
                out0[i0, r0] = sub(in0[i0, r0], t0[i0])
"""


def nest(text: str = NEST) -> LoopNest:
    parsed = parse(text)
    assert isinstance(parsed, LoopNest)
    return parsed


def test_lowering_tells_them() -> None:
    function = parse(FUNCTION)
    assert isinstance(function, TensorFunction)
    lowered = lower_to_loops(function)
    verify(lowered)
    first, second = (b for b, _ in blocks(lowered))
    assert [a.dim for a in first.axes] == [DimKind.ROW, DimKind.INNER, DimKind.EXTRA, DimKind.EXTRA]
    assert [a.dim for a in second.axes] == [DimKind.ROW, DimKind.INNER]
    assert parse(show(lowered)) == lowered


def test_the_text_tells_them() -> None:
    assert parse(show(nest())) == nest()
    assert [a.dim for b, _ in blocks(nest()) for a in b.axes] == [DimKind.ROW, DimKind.INNER] * 2
    assert structural_key(nest()) == structural_key(nest(NEST.replace(", dim=inner", "")))
    verify(nest())


def test_another_kind_is_no_kind() -> None:
    with pytest.raises(IRError, match="expected one of row, inner, extra"):
        parse(NEST.replace("dim=inner", "dim=keys"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("spatial(5, b1_r0, dim=inner)", "spatial(5, b1_r0)", "r0 is of the row dimensions here, of the inner ones"),
        ("spatial(3, b1_i0)", "spatial(3, b1_i0, dim=extra)", "i0 is of the extra dimensions here, of the row ones"),
        ("block('b0')", "block('b0', role=score)", "b0 is no score: it combines over r0, dim=inner"),
        ("block('b0')", "block('b0', role=row_total)", "b0 is no row_total: it combines over r0, dim=inner"),
        ("block('b1')", "block('b1', role=state)", "b1 is no state: it has r0, dim=inner"),
    ],
)
def test_what_is_refused(old: str, new: str, says: str) -> None:
    assert NEST.count(old) == 1
    with pytest.raises(VerifyError, match=says):
        verify(nest(NEST.replace(old, new)))
