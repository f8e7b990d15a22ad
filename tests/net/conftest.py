"""What the net tells while it runs, and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .commit import Commit
from .report import Part, Say

_PARTS = pytest.StashKey[list[Part]]()


@pytest.fixture(scope="session")
def commit() -> Commit:
    """The commit under test."""
    return Commit.at()


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Say:
    """Prints a line at once, whatever else is captured."""

    def print_now(text: str) -> None:
        with capfd.disabled():
            print(text, flush=True)

    return print_now


@pytest.fixture
def part(request: pytest.FixtureRequest, say: Say) -> Iterator[Callable[[str], Part]]:
    """``part(name)`` begins a part of the net, of which the end of the run tells."""
    began, made = time.monotonic(), list[Part]()

    def begin(name: str) -> Part:
        made.append(Part(name))
        request.config.stash.setdefault(_PARTS, []).append(made[0])
        say(f"\n-- {name} --")
        return made[0]

    yield begin
    for p in made:
        p.seconds = time.monotonic() - began


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if parts := config.stash.get(_PARTS, []):
        terminalreporter.section(f"the net, {Commit.at()}")
        for p in parts:
            terminalreporter.write_line(str(p))


@pytest.fixture
def folder(repository: Path) -> Path:
    """Where scripts of what was found are kept."""
    path = repository / "build" / "net"
    path.mkdir(parents=True, exist_ok=True)
    return path
