"""The page of primitives is what the docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_mlc.scheduler.schedule.docs import SECTIONS, primitives_page
from torch_mlc.scheduler.schedule.schedule import PRIMITIVES


def test_the_page_is_current(request: pytest.FixtureRequest, repository: Path) -> None:
    page = repository / "docs" / "primitives.md"
    if request.config.getoption("--update-golden"):
        page.write_text(primitives_page())
    assert page.read_text() == primitives_page(), "run pytest tests/scheduler/schedule --update-golden"


def test_every_primitive_has_an_entry_with_its_nests() -> None:
    functions = [f for _, group in SECTIONS for f in group]
    assert sorted(f.__name__ for f in functions) == sorted(PRIMITIVES)
    for f in functions:
        assert f.__doc__ is not None
        for part in ("Rewrites::", "->", "Raises: ScheduleError.", "Source: "):
            assert part in f.__doc__, (f.__name__, part)
