"""A check that goes wrong costs itself alone, whatever it does to its process."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torch_mlc.runtime.stages.process import last_words, run_checks

CHILD = Path(__file__).with_name("misbehaving.py")


def rows_of(checks, how="well", command=None, each=20.0, seconds=60.0):
    """Rows by check, and the names that did not begin."""
    found = {}
    left = run_checks(
        command or [sys.executable, str(CHILD), how], checks, lambda name, row: found.setdefault(name, []).append(row),
        each=each, seconds=seconds,
    )  # fmt: skip
    return found, left


@pytest.mark.parametrize(
    ("check", "why"),
    [
        ("crash", "was ended by SIGSEGV: Segmentation fault in string_at"),
        ("leave", "ended with status 7"),
        ("unread", "ended with status 0, and wrote 3 lines that are no rows"),
    ],
)
def test_a_process_that_is_lost_costs_one_check(check, why):
    found, left = rows_of(["first", check, "last"])
    assert [found[name][0] for name in found] == [{"value": "first"}, {"value": check}, {"value": "last"}]
    assert found[check][-1]["lost"].startswith(why) and len(found["last"]) == 1 and not left


@pytest.mark.parametrize("check", ["hang", "stuck"])
def test_a_check_that_hangs_is_ended_with_the_place_where_it_hangs(check):
    begin = time.monotonic()
    found, _ = rows_of([check, "last"], each=2.0)
    assert found[check][-1]["lost"].startswith("took more than 2 s: in check, ") and "last" in found
    assert time.monotonic() - begin < 30


def test_what_a_check_raises_is_its_row_and_the_process_goes_on():
    found, _ = rows_of(["raise", "last"])
    assert found["raise"][-1] == {"error": "ValueError: not a number of mine"} and len(found["last"]) == 1


def test_a_process_that_is_ill_leaves_the_rest_to_another():
    found, left = rows_of(["raise 1", "raise 2", "last"], how="ill")
    assert all(found[f"raise {k}"][-1]["error"] for k in (1, 2)) and found["last"] == [{"value": "last"}] and not left


def test_what_a_check_prints_is_no_row():
    found, _ = rows_of(["garbage"])
    assert found["garbage"] == [{"value": "garbage"}, {"value": "after"}]


def test_what_a_check_started_ends_with_it_and_is_not_waited_for():
    begin = time.monotonic()
    found, _ = rows_of(["child"])
    assert found["child"] == [{"value": "child"}] and time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([sys.executable, "-c", "raise SystemExit('no such thing')"], "ended with status 1: no such thing"),
        (["/does/not/exist"], "cannot be started"),
        ([sys.executable, "-c", "print('hello')"], "ended with status 0: hello"),
    ],
)
def test_a_process_that_does_not_start_is_told_once_and_leaves_all_checks(command, why):
    found, left = rows_of(["a", "b", "c"], command=command)
    assert found.keys() == {"a"} and found["a"][0]["lost"].startswith(why) and left == ["b", "c"]


def test_checks_that_there_is_no_time_for_are_told():
    found, left = rows_of(["hang 1", "hang 2", "hang 3"], each=30.0, seconds=1.0)
    assert list(found) == ["hang 1"] and left == ["hang 2", "hang 3"]
    assert "the time of all checks was up" in found["hang 1"][-1]["lost"]


def test_an_interrupt_ends_the_process_and_keeps_what_was_told(tmp_path):
    script = f"""
        import json, sys
        from torch_mlc.runtime.stages.process import run_checks
        def on_row(name, row):
            print(json.dumps([name, row]), flush=True)
        run_checks([sys.executable, {str(CHILD)!r}, "well"], ["first", "hang"], on_row, each=60.0, seconds=60.0)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    lines = [run.stdout.readline() for _ in range(2)]
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert '"first"' in lines[0] and '"hang"' in lines[1] and "KeyboardInterrupt" in errors
    assert children and not [c for c in children if Path(f"/proc/{c}").exists() and os.path.exists(f"/proc/{c}/exe")]


def test_last_words_are_the_last_line_where_nothing_faulted():
    assert last_words("a\nValueError: b\n\n") == "ValueError: b" and last_words("") == ""
