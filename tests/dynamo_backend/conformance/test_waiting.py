"""The kit stops to wait where nothing moves any more, and not before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torch_mlc.dynamo_backend.conformance.kit import waiting
from torch_mlc.dynamo_backend.conformance.kit.waiting import ended, processor_seconds

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not tell of threads")


@contextmanager
def child(work: Callable[[], None]) -> Iterator[tuple[int, Callable[[float], bool]]]:
    """A forked process that does something: its number, and whether it has ended."""
    number = os.fork()
    if not number:
        try:
            os.setpgid(0, 0)
            work()
        finally:
            os._exit(0)
    gone = False

    def done(pause: float) -> bool:
        nonlocal gone
        time.sleep(pause)
        gone = gone or os.waitpid(number, os.WNOHANG)[0] != 0
        return gone

    try:
        yield number, done
    finally:
        if not gone:
            os.killpg(number, 9)  # what it started, too
            os.waitpid(number, 0)


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def in_a_process_of_its_own() -> None:
    """The one that is waited for sleeps, and what it started works."""
    if os.fork() == 0:
        spin(30)
        os._exit(0)
    time.sleep(60)


def looks_around() -> None:
    """A thread that watches something costs a little."""
    while True:
        time.sleep(0.5)


def test_what_ends_is_waited_for() -> None:
    with child(lambda: spin(0.3)) as (_, done):
        assert ended(done, 30) == ""


@pytest.mark.parametrize("work", [lambda: time.sleep(60), looks_around], ids=["sleeps", "looks around"])
def test_what_does_nothing_is_given_up_early(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with child(work) as (number, done):
        # Not this process: threads that other tests left in it may be at work.
        monkeypatch.setattr(waiting, "_family", lambda: [str(number)])
        assert "nothing moves any more" in ended(done, 30)


@pytest.mark.parametrize("work", [lambda: spin(60), in_a_process_of_its_own], ids=["itself", "what it started"])
def test_what_works_has_all_its_time(work: Callable[[], None]) -> None:
    with child(work) as (_, done):
        assert ended(done, 3) == "did not end in 3 s"


def test_where_nothing_is_told_of_threads_the_time_is_what_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(waiting, "PROCESSES", tmp_path)
    with child(lambda: time.sleep(60)) as (_, done):
        assert ended(done, 2) == "did not end in 2 s"


def test_seconds_of_what_was_started_are_counted_while_it_lives_and_after() -> None:
    before = processor_seconds()
    with child(lambda: spin(0.5)) as (_, done):
        while processor_seconds() < before + 0.3:
            assert not done(0.01)
        assert ended(done, 60) == ""
    assert processor_seconds() >= before + 0.4
