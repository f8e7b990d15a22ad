"""The net: what takes minutes and is run before a change lands, ``pytest -m net``. One part, ``-k programs``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .commands import command
from .commit import Commit
from .operators import operators
from .programs import programs
from .report import Part, Say
from .tenth import tenth

pytestmark = pytest.mark.net
Begin = Callable[[str], Part]
WORKERS = min(4, os.cpu_count() or 1)
# Minutes of random programs. NET_MINUTES=1 pytest -m net -k programs is shorter.
MINUTES = float(os.environ.get("NET_MINUTES", "5"))


def test_operators(part: Begin, tmp_path: Path, say: Say) -> None:
    found = part("operators of torch, by torch.compile")
    operators(found, tmp_path, WORKERS, say)
    assert not found.faults, found


def test_programs(part: Begin, folder: Path, commit: Commit, say: Say) -> None:
    found = part("random programs")
    programs(found, folder, WORKERS, commit.seed, MINUTES * 60, say)
    assert not found.faults, found


def test_a_tenth_of_the_slow_tests(part: Begin, commit: Commit, say: Say) -> None:
    found = part("a tenth of the slow tests")
    tenth(found, commit.part, WORKERS, say)
    assert not found.faults, found


def test_trials_of_the_cache(part: Begin, say: Say) -> None:
    found = part("trials of the cache")
    command(found, "tests.trials.cache", ("--kills", "6", "--processes", "4"), 600, say)
    assert not found.faults, found


def test_trials_of_the_driver(part: Begin, say: Say) -> None:
    pytest.importorskip("triton")
    found = part("trials of the GPU's driver")
    command(found, "tests.trials.driver", ("--calls", "60"), 300, say)
    assert not found.faults, found
