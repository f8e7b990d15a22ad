"""What a section of a lock file fixes of a compilation: decisions by the name of their place, and schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...scheduler.schedule.overrides import Override
from .decided import USUAL
from .lock_text import SCHEDULES, LockedDecision, LockFileError, Section, fault
from .names import NodeNames
from .steps import parsed_trace

_SCHEDULE = re.compile(r"(?P<workload>[0-9a-f]{6,64}) on (?P<target>\S+): (?P<rule>.+), by [a-z ]+")


@dataclass(slots=True)
class SectionWays:
    """Decisions of a section, as a decider asks for them (``LockedWays``)."""

    section: Section
    names: NodeNames
    _known: dict[tuple[str, str, str], list[LockedDecision]] = field(init=False, repr=False)
    # Results that have one name, in the order in which they were asked about.
    _asked: dict[tuple[str, str, str], dict[tuple[str, str], int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = {}
        for place, found in self.section.decisions().items():
            for decision in found:
                self._known.setdefault((place, decision.kind, decision.beside), []).append(decision)

    def way(self, kind: str, at: str, beside: str) -> str | None:
        """The way that the file has for a place; None where it tells of no such place."""
        place = self.names.of(at), kind, self.names.of(beside) if beside else ""
        found = self._known.get(place)
        if found is None:
            return USUAL.get(kind)
        asked = self._asked.setdefault(place, {})
        number = asked.setdefault((at, beside), len(asked))
        return found[min(number, len(found) - 1)].way

    def told(self, at: str) -> str:
        """The place by its name, and where the file has it."""
        name = self.names.of(at)
        number = next((d.number for (place, *_), ds in self._known.items() if place == name for d in ds), 0)
        return f"{self.section.path}:{number}: {name}"


def schedules_of(section: Section) -> tuple[Override, ...]:
    """The schedules of a section, for their kernels. Raises LockFileError for lines that are none."""
    found: list[Override] = []
    for line in section.tree().get(SCHEDULES, ()):
        match = _SCHEDULE.fullmatch(line.text)
        if match is None:
            raise fault(
                section.path, line.number, f"{line.text!r} is no schedule: it should be HASH on TARGET: RULE, by …"
            )
        try:
            trace = parsed_trace((step.text for step in line.below), match["rule"])
        except ValueError as error:
            number = next((s.number for s in line.below if repr(s.text) in str(error)), line.number)
            raise fault(section.path, number, str(error)) from None
        found.append(
            Override(match["workload"], match["target"], trace, f"{section.path}:{line.number}", match["rule"])
        )
    return tuple(found)


__all__ = ["LockFileError", "SectionWays", "schedules_of"]
