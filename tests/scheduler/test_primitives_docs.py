"""The page of primitives is made from their docstrings, and the docstrings say what they must."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from torch_mlc.scheduler import schedule
from torch_mlc.scheduler.primitives_docs import primitives_markdown, section
from torch_mlc.scheduler.schedule import PRIMITIVES, Schedule


def test_the_page_is_up_to_date(repository: Path, request: pytest.FixtureRequest) -> None:
    page = repository / "docs" / "primitives.md"
    if request.config.getoption("--update-golden"):
        page.write_text(primitives_markdown())
    again = "run pytest tests/scheduler/test_primitives_docs.py --update-golden"
    assert page.read_text() == primitives_markdown(), again


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_docstring_shows_the_nest_and_names_errors_and_source(name: str) -> None:
    doc = inspect.getdoc(getattr(schedule, name)) or ""
    for part in ("Rewrites::", "->", "Raises: ScheduleError", "Source:"):
        assert part in doc, f"{name} has no {part}"
    text = section(name)
    assert text.count("```") == 2 and "``x``" not in text


def test_a_section_is_a_page_of_its_own() -> None:
    text = section("vectorize")
    assert text.startswith("## vectorize\n\n`vectorize(loop)`\n\n")
    assert "```python\nfor i in range(8):     ->     for i in vectorized(8):\n```" in text
    assert "**Requires:**" in text and "**Source:** Halide `Func.vectorize`" in text


def test_every_recording_method_is_a_primitive() -> None:
    methods = {n for n, f in vars(Schedule).items() if inspect.isfunction(f) and "_record" in f.__code__.co_names}
    assert methods == set(PRIMITIVES)
