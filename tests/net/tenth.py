"""A tenth of the slow tests."""

from __future__ import annotations

import re

from .commands import run
from .report import Finding, Part, Say

# Seconds for all of them, some times what they take on two cores; and after how many it is shown where one has got to.
LIMIT, SHOWN = 1200.0, 300


def tenth(part: Part, which: int, workers: int, say: Say) -> None:
    """Run the slow tests of one part of ten (``commit.part_of``)."""
    options = ["-m", "slow", "--tenth", str(which)]
    status, lines = run(
        ["-m", "pytest", "-q", *options, "-n", str(workers), "-rfE", "-o", f"faulthandler_timeout={SHOWN}"], LIMIT, say
    )
    part.ran = f"part {which}: {lines[-1].strip('= ') if lines else 'nothing was printed'}"
    for line in lines:
        if found := re.match(r"(?:FAILED|ERROR) (tests/\S+\.py::.*?)(?: - .*)?$", line):
            part.found.append(Finding(line, f"python -m pytest -m slow -n 0 '{found[1]}'"))
    again = f"python -m pytest {' '.join(options)}"
    if status is None:
        part.found.append(Finding(f"the slow tests did not end in {LIMIT:g} s", again))
    elif status != 0 and not part.faults:
        part.found.append(Finding(f"pytest ended with {status}", again))
