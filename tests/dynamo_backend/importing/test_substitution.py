"""A function stands in for another in one thread, and leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest

from torch_mlc.dynamo_backend.tracing.substitution import Substitution


class Printer:
    def show(self, times: int = 1) -> str:
        return "own" * times


def test_a_method_is_substituted_and_bound() -> None:
    other = Substitution(Printer, "show", lambda self, times=1: f"{type(self).__name__} {times}")
    own = Printer.show
    with other.here():
        assert Printer().show(times=2) == "Printer 2"
        with other.here():
            assert Printer().show() == "Printer 1"
        assert Printer().show() == "Printer 1", "leaving the inner one does not end the outer one"
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(Printer().show).result() == "own"
    assert Printer.show is own


def test_threads_that_overlap_keep_theirs_to_the_end() -> None:
    owner = SimpleNamespace(solve=lambda: "own")
    own, other, barrier = owner.solve, Substitution(owner, "solve", lambda: "other"), Barrier(2, timeout=20)

    def first() -> str:
        with other.here():
            barrier.wait()
            barrier.wait()
        barrier.wait()
        return str(owner.solve())

    def second() -> str:
        barrier.wait()
        with other.here():
            barrier.wait()
            barrier.wait()
            return str(owner.solve())

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(f) for f in (first, second)]
        assert [r.result() for r in results] == ["own", "other"], "the first one in is the first one out"
    assert owner.solve is own


def test_errors_put_the_original_back() -> None:
    owner = SimpleNamespace(solve=lambda: "own")
    own, other = owner.solve, Substitution(owner, "solve", lambda: "other")
    with pytest.raises(ValueError, match="inside"), other.here():
        raise ValueError("inside")
    assert owner.solve is own and owner.solve() == "own"
