"""Hints: what the parser and the verifier refuse, and what a target has no notion of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torch_mlc.codegen.kernel import EmitError, refuse_foreign
from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.nest.hints import DESCRIPTOR, EVICT, HINTS, NUM_STAGES, NUM_WARPS, PREFETCH, Hint, Place
from torch_mlc.ir.nest.loops import Loop, LoopKind, LoopNest
from torch_mlc.ir.text.parser import ParseError, parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule


def script(nest: str = "", loop: str = "", block: str = "") -> str:
    given = [f", annotations={{{t}}}" if t else "" for t in (nest, loop, block)]
    return f"""\
@nest(outputs=['out0']{given[0]})
def double(in0: float32[8], out0: float32[8]):
    for i in serial(8{given[1]}):
        with block('b0'{given[2]}):
            i0 = spatial(8, i)
            out0[i0] = add(in0[i0], in0[i0])
"""


def nest(text: str) -> LoopNest:
    found = parse(text)
    assert isinstance(found, LoopNest)
    return found


def test_what_is_said_and_what_holds() -> None:
    found = nest(script("'num_warps': 8, 'descriptor:in0': True", "'prefetch': 64"))
    (loop,) = found.body
    assert isinstance(loop, Loop) and parse(show(found)) == found
    assert (NUM_WARPS.of(found), NUM_STAGES.of(found), NUM_STAGES.found(found)) == (8, 1, None)
    assert DESCRIPTOR.of(found, "in0") and not DESCRIPTOR.of(found, "in1")
    assert (PREFETCH.of(loop), EVICT.of(loop.body[0], "in0")) == (64, "")
    verify(found)


WRONG = [
    (("'num_warp': 4", "", ""), "there is no hint 'num_warp'", "did you mean 'num_warps'?"),
    (("", "'prefech': 64", ""), "there is no hint 'prefech'", "did you mean 'prefetch'?"),
    (("", "", "'prefetch': 64"), "'prefetch' is no hint of a block", "it is one of a loop"),
    (("'num_warps': 5", "", ""), "'num_warps' cannot be 5", "did you mean 4?"),
    (("'num_warps': True", "", ""), "'num_warps' cannot be True", "it takes 1, 2, 4, 8, 16, 32"),
    (("", "", "'input_precision': 'tf23'"), "'input_precision' cannot be 'tf23'", "did you mean 'tf32'?"),
]


@pytest.mark.parametrize(("given", "says", "mend"), WRONG)
def test_the_parser_refuses(given: tuple[str, str, str], says: str, mend: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(script(*given))
    assert says in str(caught.value) and mend in str(caught.value)


@pytest.mark.parametrize(("given", "says", "mend"), WRONG)
def test_the_verifier_refuses(given: tuple[str, str, str], says: str, mend: str) -> None:
    notes = [tuple(eval(f"{{{t}}}").items()) for t in given]
    (loop,) = nest(script()).body
    assert isinstance(loop, Loop)
    block = replace(loop.body[0], annotations=notes[2])
    loop = replace(loop, body=(block,), annotations=notes[1])
    with pytest.raises(VerifyError) as caught:
        verify(replace(nest(script()), body=(loop,), annotations=notes[0]))
    assert says in str(caught.value) and mend in str(caught.value)


@pytest.mark.parametrize(
    ("note", "says"),
    [
        (("descriptor:in1", True), "'descriptor:in1' speaks of 'in1', which is no parameter"),
        (("in_place", "out0,in0"), "'in_place' speaks of 'in0', which is no output"),
    ],
)
def test_the_verifier_knows_the_parameters(note: tuple[str, bool | str], says: str) -> None:
    with pytest.raises(VerifyError, match=says):
        verify(replace(nest(script()), annotations=(note,)))


def test_a_target_refuses_what_means_nothing_to_it() -> None:
    for_gpu, for_cpu = nest(script("'num_warps': 4")), nest(script("", "'prefetch': 64"))
    refuse_foreign(for_gpu, "gpu")
    refuse_foreign(for_cpu, "cpu")
    with pytest.raises(EmitError, match="double has the hint 'num_warps', which means nothing to a CPU"):
        refuse_foreign(for_gpu, "cpu")
    with pytest.raises(EmitError, match="i has the hint 'prefetch', which means nothing to a GPU"):
        refuse_foreign(for_cpu, "gpu")


@pytest.mark.parametrize("kind", LoopKind, ids=lambda k: k.name)
@pytest.mark.parametrize("hint", [h for h in HINTS.values() if Place.LOOP in h.places], ids=lambda h: h.name)
def test_a_hint_stands_on_its_kinds_of_loops(hint: Hint[Any], kind: LoopKind) -> None:
    """Elsewhere nothing would read it: the parser, the verifier, ``annotate`` and what gives a kind refuse it."""
    (loop,) = nest(script()).body
    value = True if isinstance(hint.default, bool) else max(hint.low, 2)
    plain = replace(nest(script()), body=(replace(loop, kind=kind),))
    given = replace(plain, body=(replace(loop, kind=kind, annotations=((hint.name, value),)),))
    schedule = Schedule(plain)
    if kind in hint.kinds:
        verify(given)
        assert parse(show(given)) == given
        if hint.given_by == "annotate":
            schedule.annotate("i", hint, value)
            assert schedule.nest == given
        return
    says = f"{hint.name!r} says nothing on a {kind.value} loop"
    mend = f"it may stand on one that is {' or '.join(k.value for k in hint.kinds)}"
    for error, wrong in (
        (VerifyError, lambda: verify(given)),
        (ParseError, lambda: parse(show(given))),
        (ScheduleError, lambda: schedule.annotate("i", hint, value)),
    ):
        with pytest.raises(error) as caught:
            wrong()
        assert says in str(caught.value) and mend in str(caught.value) and "i" in str(caught.value)
    if LoopKind.SERIAL in hint.kinds:
        early = Schedule(replace(plain, body=(replace(loop, annotations=((hint.name, value),)),)))
        with pytest.raises(ScheduleError) as caught:
            give_kind(early, kind)
        assert says in str(caught.value) and mend in str(caught.value)


def give_kind(schedule: Schedule, kind: LoopKind) -> None:
    match kind:
        case LoopKind.PARALLEL:
            schedule.parallel("i")
        case LoopKind.VECTORIZED:
            schedule.vectorize("i")
        case LoopKind.UNROLLED:
            schedule.unroll("i")
        case _:
            schedule.bind("i", kind.value)


def test_every_hint_of_a_loop_has_kinds() -> None:
    assert all(bool(h.kinds) == (Place.LOOP in h.places) for h in HINTS.values())


def test_defaults_are_values() -> None:
    for hint in HINTS.values():
        assert hint.default == "" or hint.takes(hint.default), hint.name
