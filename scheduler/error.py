"""The one error that scheduling raises, cheap until somebody reads it."""

from __future__ import annotations

from ..ir.errors import MlcError
from ..ir.nest.loops import LoopNest
from ..ir.text.printer import show


class DatabaseWarning(UserWarning):
    """The tuning database, or a record of it, could not be used; schedules are the default ones."""


class ScheduleError(MlcError):
    """A primitive was asked for what would change the program's meaning, or cannot be expressed.

    ``reason`` is one sentence, made at once; the text with the nest, in which ``at`` (a loop variable or a block's
    name) is underlined, is rendered when the error is printed, since search raises thousands of these and reads none.
    """

    def __init__(self, asked: str, reason: str, nest: LoopNest | None = None, at: str = "", hint: str = "") -> None:
        super().__init__(reason)
        self.asked, self.reason, self.nest, self.at, self.hint = asked, reason, nest, at, hint

    def __str__(self) -> str:
        lines = [f"{self.asked}: {self.reason}"]
        if self.nest is not None:
            lines += _underlined(show(self.nest), self.at)
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def _underlined(text: str, at: str) -> list[str]:
    """The lines of a script, with a caret line under the first that introduces ``at``."""
    lines: list[str] = []
    found = not at
    for line in text.splitlines():
        lines.append("  " + line)
        if not found and (f"for {at} in" in line or f"block({at!r}" in line):
            column = line.index(at)
            lines.append("  " + " " * column + "^" * len(at) + " here")
            found = True
    return lines
