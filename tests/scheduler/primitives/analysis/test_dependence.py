"""What is said of two blocks, against counting: where no conflict is found, no iteration of the loops that they share
touches what another iteration overwrites."""

from __future__ import annotations

from itertools import product
from textwrap import dedent

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mlc.ir.expr.value import Load
from torch_mlc.ir.nest.loops import Access, Loop, LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.primitives.analysis.dependence import BlockPlace, conflict, places
from torch_mlc.scheduler.schedule.schedule import Schedule

ROWS, COLUMNS = 6, 8


def in_place(read: str = "i0, i1", left_out: bool = False) -> LoopNest:
    """A block that reads a plane, and one that writes over it: all of it, or with ``left_out`` its first column."""
    at = "i0, 0" if left_out else "i0, i1"
    nest = parse(
        dedent(f"""
        @nest(outputs=["out0"])
        def f(out0: float32[{ROWS}, {COLUMNS}]):
            t0 = local(float32[{ROWS}, {COLUMNS}])
            for b0_i0 in serial({ROWS}):
                for b0_i1 in serial({COLUMNS}):
                    with block("b0"):
                        i0 = spatial({ROWS}, b0_i0)
                        i1 = spatial({COLUMNS}, b0_i1)
                        t0[i0, i1] = out0[{read}]
                    with block("b1"):
                        i0 = spatial({ROWS}, b0_i0)
                        i1 = spatial({COLUMNS}, b0_i1)
                        out0[{at}] = mul(t0[i0, i1], float32(2.0))
        """)
    )
    assert isinstance(nest, LoopNest)
    return nest


def touched(place: BlockPlace, indices: tuple[sympy.Expr, ...], depth: int) -> dict[tuple[int, ...], set[object]]:
    """The elements that a block touches in each iteration of the outermost loops, so many of them."""
    found: dict[tuple[int, ...], set[object]] = {}
    loops: list[Loop] = list(place.loops)
    for values in product(*(range(int(lp.extent)) for lp in loops)):
        env = {lp.var: sympy.Integer(v) for lp, v in zip(loops, values, strict=True)}
        if all(p.lhs.xreplace(env) < p.rhs.xreplace(env) for p in place.block.predicate):
            at = {a.var: b.xreplace(env) for a, b in zip(place.block.axes, place.block.bindings, strict=True)}
            found.setdefault(values[:depth], set()).add(tuple(int(i.xreplace(at)) for i in indices))
    return found


def is_safe(first: BlockPlace, read: Load, second: BlockPlace, write: Access, depth: int) -> bool:
    """Whether iterations overwrite nothing that others read."""
    reads = touched(first, read.indices, depth)  # type: ignore[arg-type]
    writes = touched(second, write.indices, depth)  # type: ignore[arg-type]
    return all(p == q or reads[p].isdisjoint(writes[q]) for p in reads for q in writes)


def changed(nest: LoopNest, data: st.DataObject) -> LoopNest:
    """The nest with its loops split, fused and put in other orders."""
    s = Schedule(nest)
    for _ in range(data.draw(st.integers(0, 5))):
        loops = s.get_loops("b0")
        k = data.draw(st.integers(0, len(loops) - 1))
        try:
            match data.draw(st.sampled_from(("split", "split", "fuse", "fuse", "reorder"))):
                case "split":
                    s.split(loops[k], data.draw(st.sampled_from(([None, 2], [None, 3], [2, None], [None, 4]))))
                case "fuse":
                    s.fuse(*loops[k : k + data.draw(st.integers(2, 3))])
                case "reorder":
                    s.reorder(*data.draw(st.permutations(loops)))
        except ScheduleError:
            continue
    return s.nest


@pytest.mark.parametrize("read", ["i0, i1", f"i0, {COLUMNS - 1} - i1", f"{ROWS - 1} - i0, i1", "i0, 3"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_overwritten(read: str, data: st.DataObject) -> None:
    nest = changed(in_place(read), data)
    first, second = places(nest).values()
    (load,) = (ld for ld in first.block.reads if ld.buffer == "out0")
    (write,) = second.block.writes
    for depth in range(1, len(first.loops) + 1):
        if not conflict(nest, first, second, depth):
            assert is_safe(first, load, second, write, depth), depth


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_element_read_and_written_at_once_is_no_conflict(data: st.DataObject) -> None:
    """However the loops around it are split, fused and ordered."""
    nest = changed(in_place(), data)
    verify(nest)
    first, second = places(nest).values()
    assert conflict(nest, first, second) == "", nest


def test_iterations_that_write_one_element_are_a_conflict() -> None:
    first, second = places(in_place("i0, 0", left_out=True)).values()
    assert "b1 overwrites out0, which b0 uses" in conflict(in_place("i0, 0", left_out=True), first, second)
