"""annotate and set_scope: what is said to the emitter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.hints import NUM_WARPS, OPERANDS, PREFETCH
from torch_mlc.ir.nest.loops import LoopNest, Scope
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Prove = Callable[..., Schedule]


def test_nest_loop_and_block(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.annotate("", NUM_WARPS, 4)
        s.annotate("b0_i0", PREFETCH, 64)
        s.annotate("b0", "evict:in0", "evict_first")
        s.annotate("", "num_warps", 8)

    s = proved(nests["plane"], build)
    assert s.nest.annotations == (("num_warps", 8),)
    assert s.loop("b0_i0").annotations == (("prefetch", 64),)
    assert s.block("b0").annotations == (("evict:in0", "evict_first"),)


def test_annotations_survive_what_comes_after(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.annotate("b0", OPERANDS, "float16")
        s.annotate("b0_i0", PREFETCH, 64)
        s.split("b0_i0", [None, 4])
        s.compute_at("b0", "b1_i0")

    s = proved(nests["chain"], build)
    assert s.block("b0").annotations == (("operands", "float16"),)


@pytest.mark.parametrize(
    ("at", "key", "value", "reason", "mend"),
    [
        ("b5", "grain", 1, "there is no loop or block b5", ""),
        ("", "num_warp", 4, "there is no hint 'num_warp'", "did you mean 'num_warps'?"),
        ("b0_i0", "prefech", 4096, "there is no hint 'prefech'", "did you mean 'prefetch'?"),
        (
            "b0", "note", 1, "there is no hint 'note'",
            "a block has evict, live_from, live_to, tensorize, operands, input_precision, atomic",
        ),
        ("b0", "num_warps", 4, "'num_warps' is no hint of a block", "it is one of a nest"),
        ("b0_i0", "evict:in0", "evict_last", "'evict' is no hint of a loop", "it is one of a nest or a block"),
        ("", "num_warps", 3, "'num_warps' cannot be 3", "did you mean 2? it takes 1, 2, 4, 8, 16, 32"),
        ("", "num_warps", 4.0, "'num_warps' cannot be 4.0", "did you mean 4? it takes 1, 2, 4, 8, 16, 32"),
        ("", "num_stages", 9, "'num_stages' cannot be 9", "did you mean 8? it takes 1 to 8"),
        ("", "peel", 1, "'peel' cannot be 1", "it takes True, False"),
        ("b0", "operands", "float61", "'operands' cannot be 'float61'",
         "did you mean 'float16'? it takes 'float16', 'bfloat16', 'float32', 'int8'"),
        ("b0_i0", "grain", -1, "'grain' cannot be -1", "did you mean 0? it takes 0 or more"),
        ("", "peel:in0", True, "'peel:in0' is not how the hint 'peel' is written", "write 'peel'"),
        ("", "descriptor", True, "'descriptor' is not how the hint 'descriptor' is written",
         "write 'descriptor:parameter'"),
        ("", "descriptor:in9", True, "'descriptor:in9' speaks of 'in9', which is no parameter", "did you mean 'in1'?"),
        ("b0", "atomic", True, "'atomic' is given by atomic, which proves that it may be", ""),
        ("b0_i0", "unit", True, "'unit' is given by blockize, which proves that it may be", ""),
        ("", "in_place", "out0", "'in_place' is given by lowering, which proves that it may be", ""),
    ],
)  # fmt: skip
def test_refused(nests: Mapping[str, LoopNest], at: str, key: str, value: object, reason: str, mend: str) -> None:
    s = Schedule(nests["plane"])
    with pytest.raises(ScheduleError) as caught:
        s.annotate(at, key, value)  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.hint) == (reason, mend)
    assert s.nest is nests["plane"]


def test_scope(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["chain"], lambda s: s.set_scope("t0", "global"))
    assert s.nest.buffer("t0").scope is Scope.GLOBAL


@pytest.mark.parametrize(
    ("buffer", "scope", "reason"),
    [("t0", "register", "there is no scope 'register'"), ("in0", "local", "in0 is no buffer of the nest's own")],
)
def test_refused_scopes(nests: Mapping[str, LoopNest], buffer: str, scope: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule(nests["chain"]).set_scope(buffer, scope)
