"""Names by position: nests that differ in names alone become one, and what they mean stays."""

from __future__ import annotations

import re

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.nest.positions import matched, named_by_position
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key

ROWS = """
@nest(outputs=["y"], annotations={"in_place": "y"})
def rows(x: float32[64, s0], w: int64[64], y: float32[64]):
    total = local(float32[64])
    spare = local(float32[64])
    for a in serial(64):
        for b in serial(s0):
            with block("sum"):
                i = spatial(64, a)
                r = reduction(s0, b, dim=inner)
                spare[i] = sum.update(x[w[i], r])
    for c in serial(64):
        with block("last"):
            k = spatial(64, c)
            total[k] = exp(spare[k])
            y[k] = add(y[k], total[k])
"""
NAMES = {"x": "in0", "w": "in1", "y": "out0", "total": "t0", "spare": "t1", "sum": "b0", "last": "b1"}


def nest(text: str) -> LoopNest:
    found = parse(text)
    assert isinstance(found, LoopNest)
    return found


def test_names_go_by_position() -> None:
    found = named_by_position(nest(ROWS))
    assert [b.name for b in found.params] == ["in0", "in1", "out0"] and found.outputs == ("out0",)
    assert [b.name for b in found.locals] == ["t0", "t1"] and dict(found.annotations)["in_place"] == "out0"
    text = show(found)
    assert "for b0_r0 in serial(s0):" in text and "t1[i0] = sum.update(in0[in1[i0], r0])" in text
    assert "for b1_i1 in serial(64):" in text and "out0[i1] = add(out0[i1], t0[i1])" in text
    assert named_by_position(found) is found


@pytest.mark.parametrize("swap", [("a", "b"), ("total", "spare"), ("i", "r"), ("x", "y_")])
def test_other_names_are_the_same_nest(swap: tuple[str, str]) -> None:
    """Also where two names change places, which a renaming one after the other would confuse."""
    one, two = swap
    other = re.sub(rf"\b({one}|{two})\b", lambda m: two if m[0] == one else one, ROWS)
    assert other != ROWS
    assert show(named_by_position(nest(other))) == show(named_by_position(nest(ROWS)))
    plain = ROWS.replace(', annotations={"in_place": "y"}', "")
    assert structural_key(named_by_position(nest(plain))) == structural_key(nest(plain))


def test_names_are_matched_by_position() -> None:
    ours = nest(ROWS)
    theirs = named_by_position(ours)
    found = matched(ours, theirs)
    assert found is not None and found.buffers | found.blocks == NAMES
    assert found.loops == {"a": "b0_i0", "b": "b0_r0", "c": "b1_i1"}
    fewer = nest(ROWS[: ROWS.index("    for c")].replace('"y"', '"spare_"').replace("y: f", "spare_: f"))
    assert matched(ours, fewer) is None
