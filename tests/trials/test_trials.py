"""The trials as the command runs them, few of each."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_trials_of_the_cache(repository: Path) -> None:
    command = [sys.executable, "-m", "tests.trials.cache", "--kills", "6", "--processes", "4"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
