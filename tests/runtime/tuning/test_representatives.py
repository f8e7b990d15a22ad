"""Symbolic sizes: which ones stand for a range, and that what wins is faster at all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.runtime.compile.kernels import KernelCode
from torch_mlc.runtime.tuning.measure import Arguments, Run
from torch_mlc.runtime.tuning.measure_service import MeasureService
from torch_mlc.runtime.tuning.representatives import MOST_BYTES, representatives, worst

TEXT = """
@nest(outputs=["out0"])
def double(in0: float32[s0, s1], out0: float32[s0, s1]):
    s0 = size(SIZE)
    s1 = size(lower=2, upper=512, hint=96)
    for a in serial(s0):
        for b in serial(s1):
            with block("b0"):
                i = spatial(s0, a)
                j = spatial(s1, b)
                out0[i, j] = mul(in0[i, j], float32(2.0))
"""


def nest(size: str = "lower=2, hint=100") -> LoopNest:
    return cast(LoopNest, parse(TEXT.replace("SIZE", size)))


def hints(given: LoopNest) -> list[list[int | None]]:
    return [[s.hint for s in n.symbols.sizes] for n in representatives(given)]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("lower=2, hint=100", [[100, 96], [12, 12], [63, 61], [400, 384]]),
        ("lower=64, upper=128, hint=100", [[100, 96], [64, 12], [64, 61], [128, 384]]),
        ("lower=0, divisor=16, hint=160", [[160, 96], [16, 12], [96, 61], [640, 384]]),
    ],
)
def test_sizes_stand_for_the_range(size: str, expected: list[list[int]]) -> None:
    """Small, odd and large ones beside the typical, within bounds and divisors."""
    assert hints(nest(size)) == expected
    for n in representatives(nest(size)):
        assert n == nest(size) and n.body == nest(size).body  # hints are no part of what a nest is


def test_no_size_is_tried_twice_or_takes_too_much() -> None:
    static = cast(LoopNest, parse(TEXT.replace("s0 = size(SIZE)\n    s1 = size(lower=2, upper=512, hint=96)\n    ", "")
                                  .replace("s0", "9").replace("s1", "5")))  # fmt: skip
    assert representatives(static) == [static]
    assert hints(nest("lower=7, upper=7, hint=7"))[0] == [7, 96]
    huge = nest(f"lower=2, hint={MOST_BYTES // 8 // 96}")
    assert len(representatives(huge)) == 3 and [MOST_BYTES // 8 // 96 * 4, 384] not in hints(huge)


def test_the_worst_ratio_over_sizes_counts() -> None:
    """Twice as fast at the first size and slower at the other: that is slower. Rounds that only some have are left
    out."""
    samples = {
        1: [[4.0, 4.0], [10.0, 10.0, 10.0]],
        2: [[2.0, 2.0], [11.0, 12.0, 9.0]],
        3: [[3.0, 3.0], [9.0, 8.0, 8.0]],
    }
    assert worst(samples, 1) == {1: [4.0, 4.0], 2: [pytest.approx(4.4), pytest.approx(4.8)], 3: [3.6, 3.2]}
    assert worst({1: [[4.0]], 2: [[2.0]]}, 1) == {1: [4.0], 2: [2.0]}


class Sized:
    """Kernels take time by their size: ``name`` of a code is what a call takes, in ``n``."""

    place = "cpu"

    def run_of(self, code: KernelCode, arguments: Arguments) -> Run:
        def run() -> None:
            arguments.tensors[-1].copy_(arguments.tensors[0] * 2)

        run.seconds = eval(code.name, {"n": arguments.sizes[0]})  # type: ignore[attr-defined]
        return run

    def synchronize(self) -> None: ...

    def samples(
        self, runs: Mapping[int, Any], rounds: int, begun: int, move: Callable[[], None]
    ) -> dict[int, list[float]]:
        move()
        return {k: [r.seconds] * rounds for k, r in runs.items()}

    def drop(self, numbers: Sequence[int]) -> None: ...

    def forget(self) -> None: ...


def test_a_candidate_is_timed_at_every_size() -> None:
    """Faster than the default at the typical size, and slower at large ones: the race has it slower."""
    service = MeasureService(lambda request: Sized())

    def ask(parts: Sequence[bytes] = (), **request: Any) -> dict[str, Any]:
        answer, _ = service(request, [*parts])
        assert "verdict" not in answer, answer
        return answer

    ask(do="begin", nests=[show(n) for n in representatives(nest())])
    for k, seconds in enumerate(("n", "n", "n * n / 200", "n * 0.9")):
        code = {"key": "", "name": seconds, "language": "llvm", "symbols": (), "meta": {}}
        ask([b""], do="prepare", id=k, code=code)
    answer = ask(do="time", ids=[0, 1, 2, 3], rounds=2, begun=0, sizes=4)["samples"]
    assert answer["2"] == [[50.0] * 2, [0.72] * 2, [63 * 63 / 200] * 2, [800.0] * 2]
    found = worst({int(k): s for k, s in answer.items()}, 0)
    assert found[1] == [100.0] * 2 and found[2] == [200.0] * 2 and found[3] == [pytest.approx(90.0)] * 2
    assert ask(do="time", ids=[2], rounds=1, begun=2, sizes=1)["samples"] == {"2": [[50.0]]}
