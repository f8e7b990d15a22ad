"""The space of a nest: what a draft is, that it replays or is refused, and that results stay what they are."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from torch_mlc.codegen.kernel import EmitError
from torch_mlc.codegen.llvm.reductions import reductions
from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.tuning import order
from torch_mlc.scheduler.tuning.edits import KINDS, TraceEdit, arranged
from torch_mlc.scheduler.tuning.space import MOST_EDITS, Draft, Numerics, Space

from .typical_nests import NAMES, TEXTS, lower, nest, results, same_bits

CPU = cpu_target()
AVX2 = Target("cpu", "znver3", 8)
GPU = gpu_target("cuda:sm_90")


def legal(space: Space, count: int, seed: int = 0) -> Iterator[tuple[Draft, Schedule]]:
    """So many different schedules by chance, fewer where the space has no more."""
    rng, seen = random.Random(seed), set[str]()
    for _ in range(40 * count):
        draft = space.random(rng)
        schedule = space.replayed(draft)
        if schedule is not None and space.key(schedule) not in seen:
            seen.add(space.key(schedule))
            yield draft, schedule
            if len(seen) == count:
                return


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_the_default_is_what_a_nest_gets_without_tuning() -> None:
    for name in NAMES:
        space = Space(nest(name), CPU)
        found = space.replayed(space.default())
        assert found is not None and found.nest == default_schedule(nest(name), CPU).nest
        assert space.first()[0] == space.default() and len(space.first()) == len(space.rules)


def test_a_draft_is_a_value() -> None:
    a, b = TraceEdit("unroll", "b0_r0", 4), TraceEdit("factor", "b0_i0.1", 32)
    one, other = (Draft("r", (("unroll", 2),), arranged(edits)) for edits in ([a, b], [b, a]))
    assert one == other and hash(one) == hash(other) and one.edits == (b, a)
    assert arranged([a, TraceEdit("unroll", "b0_r0", 2)]) == (TraceEdit("unroll", "b0_r0", 2),)
    assert Draft.from_plain(json.loads(json.dumps(one.to_plain()))) == one


@pytest.mark.parametrize("target", [AVX2, GPU], ids=["cpu", "gpu"])
def test_two_spaces_draw_alike(target: Target) -> None:
    def drawn() -> list[Draft]:
        space, rng = Space(nest("softmax"), target), random.Random(1)
        drafts = [space.random(rng) for _ in range(50)]
        return [
            *drafts,
            *(space.mutated(d, rng) for d in drafts),
            *(space.crossed(a, b, rng) for a, b in pairwise(drafts)),
        ]

    assert drawn() == drawn()


@pytest.mark.parametrize("numerics", ["any", "same"])
@pytest.mark.parametrize("name", NAMES)
def test_mutants_and_crossovers_stay_in_the_space(name: str, numerics: Numerics) -> None:
    space, rng = Space(nest(name), AVX2, numerics), random.Random(2)
    drafts = [space.random(rng) for _ in range(30)]
    for _ in range(200):
        a, b = rng.choice(drafts), rng.choice(drafts)
        drafts.append(space.mutated(a, rng) if rng.random() < 0.6 else space.crossed(a, b, rng))
    for draft in drafts:
        values = space.values[draft.rule]
        assert [k for k, _ in draft.params] == list(values) and all(v in values[k] for k, v in draft.params)
        assert len(draft.edits) <= MOST_EDITS and draft.edits == arranged(draft.edits)
        assert all(e.kind in KINDS for e in draft.edits)


def test_the_list_begins_at_the_default_and_ends() -> None:
    space = Space(nest("maximum"), AVX2)
    listed = list(space.listed(500))
    assert listed[: len(space.rules)] == space.first()
    assert len(set(listed)) == len(listed) == 500
    first = space.default()
    changes = [
        sum(a != b for a, b in zip(d.params, first.params, strict=True)) + len(d.edits)
        for d in listed
        if d.rule == first.rule
    ]
    assert changes == sorted(changes) and changes[-1] == 2
    assert len(list(space.listed(3))) == 3


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_there_are_thousands_of_schedules(name: str) -> None:
    """Of 400 random drafts most replay, nearly all of these to nests of their own: there are far more than 2,000."""
    space, rng = Space(nest(name), AVX2), random.Random(3)
    found = [space.replayed(d) for d in dict.fromkeys(space.random(rng) for _ in range(400))]
    keys = [space.key(s) for s in found if s is not None]
    assert len(keys) >= 0.3 * len(found)
    # Of n alike likely nests 400 draws would meet n (1 - exp(-400 / n)), so that these are seen of at least 2,000.
    assert len(set(keys)) >= 0.6 * len(keys) and space.size() > 100_000


def test_a_replayed_draft_has_a_trace_that_replays() -> None:
    space = Space(nest("softmax"), AVX2)
    for _, schedule in legal(space, 40):
        again = replay(schedule.trace, nest("softmax"))
        assert again.nest == schedule.nest
        found = space.schedule(schedule.trace)
        assert found is not None and space.key(found) == space.key(schedule)


def test_what_is_illegal_is_none() -> None:
    space = Space(nest("softmax"), AVX2)
    first = space.default()
    for edit in (
        TraceEdit("unroll", "nowhere", 4), TraceEdit("factor", "b0_r0.7", 4), TraceEdit("omit", "merge:a,b"),
        TraceEdit("inline", "b0"), TraceEdit("chunk", "b0_r0", 4), TraceEdit("lanes", "b9", 16),
        TraceEdit("order", "b0_i0", "b0_r0"), TraceEdit("hint", "b0_i0:no_such_hint", 1),
        TraceEdit("compute_at", "b3", "b0_i0"), TraceEdit("cache_read", "b0", "in9@b0_i0"),
        TraceEdit("factor", "b0_r0.1", -3),
    ):  # fmt: skip
        assert space.replayed(Draft(first.rule, first.params, (edit,))) is None, edit


def test_what_is_asked_twice_is_not_changed_by_the_first() -> None:
    space = Space(nest("row sum"), AVX2)
    one = space.replayed(space.default())
    assert one is not None
    one.reorder(*one.get_loops("b0"))
    one.annotate(one.get_loops("b0")[1], "prefetch", 64)
    again = space.replayed(space.default())
    assert again is not None and again.nest != one.nest


def test_a_nest_without_a_rule_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_mlc.scheduler.rules.all_rules", lambda: ())
    with pytest.raises(ScheduleError, match="no rule"):
        Space(nest("gelu"), CPU)


# --- results ----------------------------------------------------------------------------------------------------------


def _close(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    scale = [max(float(y.abs().double().mean()), 1e-30) for y in b]
    return all(
        torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-4 * s) for x, y, s in zip(a, b, scale, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_the_default(name: str) -> None:
    space = Space(nest(name), CPU)
    default = space.replayed(space.default())
    assert default is not None
    wanted, refused = results(name, default), Counter[str]()
    for draft, schedule in legal(space, 16, seed=4):
        verify(schedule.nest)
        try:
            found = results(name, schedule)
        except EmitError as error:
            refused[str(error)] += 1
            continue
        assert _close(found, wanted), f"{draft}\n{schedule.trace}"
    assert refused.total() <= 3, refused


@pytest.mark.parametrize("name", NAMES)
def test_the_same_order_gives_the_same_bits(name: str) -> None:
    space = Space(nest(name), CPU, "same")
    default = space.replayed(space.default())
    assert default is not None
    wanted, count = results(name, default), 0
    for draft, schedule in legal(space, 16, seed=5):
        try:
            found = results(name, schedule)
        except EmitError:
            continue
        assert same_bits(found, wanted), f"{draft}\n{schedule.trace}"
        count += 1
    assert count >= 10


def test_accumulators_are_those_of_the_emitter() -> None:
    assert order.LARGEST_ACCUMULATORS == reductions._LARGEST


def test_an_order_is_told_from_another() -> None:
    """The test of bits can fail: with any order many results differ in them."""
    space = Space(nest("column sum"), CPU)
    default = space.replayed(space.default())
    assert default is not None
    wanted = results("column sum", default)
    others = [same_bits(results("column sum", s), wanted) for _, s in legal(space, 25, seed=6)]
    assert not all(others)


def test_the_same_order_leaves_what_does_not_round_free() -> None:
    for name in ("maximum", "gelu"):
        any_, same = (Space(nest(name), AVX2, numerics) for numerics in ("any", "same"))  # type: ignore[arg-type]
        kinds = {s.kind for s in any_.sites(any_.default())} - {"inline", "cache_read", "cache_write", "pack"}
        assert kinds == {s.kind for s in same.sites(same.default())}
        assert same.values == any_.values


def test_the_same_structure_with_other_sizes_takes_the_same_drafts() -> None:
    space = Space(nest("softmax"), AVX2)
    for other in (TEXTS["symbolic softmax"], TEXTS["softmax"].replace("150", "151").replace("11", "12")):
        there = Space(lower(other), AVX2)
        drafts = [d for d, _ in legal(space, 40, seed=7)]
        assert sum(there.replayed(d) is not None for d in drafts) >= 0.8 * len(drafts)


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_drafts_for_gpus_have_text(name: str) -> None:
    space, refused, count = Space(nest(name), GPU), 0, 0
    for _, schedule in legal(space, 25, seed=8):
        verify(schedule.nest)
        count += 1
        try:
            assert emit_triton(schedule.nest, GPU).text
        except EmitError:
            refused += 1
    assert count >= 15 and refused <= 0.5 * count and space.size() > 2000
