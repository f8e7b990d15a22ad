"""The tests that are marked for a GPU, a file at a time; without one, threads that call programs on a played driver."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..plan import Settings
from ..record import OK, WRONG, Row

ROOT = Path(__file__).resolve().parents[3]
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(?: \[\d+\])? (\S.*)$", re.MULTILINE)
# Calls and threads of a trial without a GPU.
_CALLS, _THREADS = 20, 3


def check(settings: Settings, name: str) -> Iterator[Row]:
    """A file of tests, or one of the programs of ``tests.trials.driver``."""
    if settings.gpu:
        yield from run_tests(name)
        return
    sys.path.insert(0, str(ROOT))
    driver = importlib.import_module("tests.trials.driver")
    for failing in (False, True):
        begin = time.perf_counter()
        faults = driver.trial(name, _THREADS, _CALLS, failing)
        yield {
            "status": WRONG if faults else OK, "driver": "failing" if failing else "well", "faults": faults[:5],
            "seconds": time.perf_counter() - begin,
        }  # fmt: skip


def run_tests(path: str, *options: str) -> Iterator[Row]:
    """A row for each test of a file that did not pass, and one for all."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-rA", "-n0", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider",
        *options, path,
    ]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "500"})
    outcomes = _OUTCOME.findall(done.stdout)
    failed = [(outcome, told) for outcome, told in outcomes if outcome in ("FAILED", "ERROR", "XPASS")]
    for outcome, told in failed:
        yield {"status": WRONG, "test": told.partition(" - ")[0], "outcome": outcome, "why": told.partition(" - ")[2]}
    passed = sum(outcome == "PASSED" for outcome, _ in outcomes)
    # 5: no test of this mark was found.
    well = done.returncode in (0, 5) and not failed
    yield {
        "status": OK if well else WRONG, "passed": passed, "failed": len(failed), "pytest_status": done.returncode,
        "why": "" if well or failed else done.stdout.strip()[-300:] + done.stderr.strip()[-300:],
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip
