"""What a part of the net tells: what ran, how long, and what was found, each with a command that shows it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

Say: TypeAlias = "Callable[[str], None]"


@dataclass(frozen=True, slots=True)
class Finding:
    """``fails``: whether the net fails for it, or it is only told. ``again`` is the command that shows it."""

    what: str
    again: str
    fails: bool = True

    def __str__(self) -> str:
        return f"{'FAULT' if self.fails else 'told '} {self.what}\n      again: {self.again}"


@dataclass(slots=True)
class Part:
    """One part of the net. ``ran`` says what has run, when it is over; ``seconds`` how long."""

    name: str
    ran: str = "did not end"
    seconds: float = 0.0
    found: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """What the net fails for."""
        return [f for f in self.found if f.fails]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.ran} ({self.seconds:.0f} s)", *map(str, self.found)]
        return "\n".join(lines)
