"""Texts of two commits side by side: counts as a table, and differences line by line."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rich.table import Table
from rich.text import Text

EQUAL, CHANGED, MISSING, ADDED = OUTCOMES = ("equal", "changed", "missing", "added")
KERNELS, HOSTS = "kernels", "host programs"
# Lines of one difference that are printed.
LINES = 60
_STYLES = {EQUAL: "green", CHANGED: "bold red", MISSING: "bold red", ADDED: "bold red"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A text that is not what it was; None where it was not, or is not, there."""

    place: str
    before: str | None
    after: str | None

    @property
    def outcome(self) -> str:
        return ADDED if self.before is None else MISSING if self.after is None else CHANGED

    def lines(self, most: int = LINES) -> list[str]:
        """The unified difference, its first lines."""
        before, after = ((text or "").splitlines() for text in (self.before, self.after))
        names = f"before/{self.place}", f"after/{self.place}"
        told = difflib.unified_diff(before, after, *names, lineterm="")
        lines = list(islice(told, most))
        rest = sum(1 for _ in told)
        return [*lines, f"… and {rest} more lines"] if rest else lines


@dataclass(slots=True)
class Comparison:
    """Counts by suite, target and kind of text, and what differs."""

    counts: dict[tuple[str, str, str], Counter[str]] = field(default_factory=dict)
    workloads: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def add(self, before: Mapping[str, str] | None, after: Mapping[str, str]) -> None:
        """The texts of one case by place. Without ``before`` nothing is compared, and only counted."""
        for place in sorted({*(before or ()), *after}):
            suite, workload, target, _, name = place.split("/")
            kind = HOSTS if name.startswith("host ") else KERNELS
            counts = self.counts.setdefault((suite, target, kind), Counter())
            self.workloads.setdefault((suite, target), set()).add(workload)
            counts["all"] += place in after
            if before is not None:
                found = Difference(place, before.get(place), after.get(place))
                same = found.before == found.after
                counts[EQUAL if same else found.outcome] += 1
                if not same:
                    self.differences.append(found)

    def table(self, title: str, *, compared: bool) -> Table:
        """A row for each suite, target and kind of text, and one of all."""
        table = Table(title=title, title_style="", show_footer=True)
        total = sum(self.counts.values(), Counter())
        names = {(suite, w) for (suite, _), found in self.workloads.items() for w in found}
        table.add_column("suite", "all", no_wrap=True)
        table.add_column("target", no_wrap=True)
        table.add_column("workloads", str(len(names)), justify="right")
        table.add_column("texts", no_wrap=True)
        table.add_column("made", str(total["all"]), justify="right")
        for outcome in OUTCOMES if compared else ():
            table.add_column(outcome, _count(total, outcome), justify="right")
        for (suite, target, kind), counts in sorted(self.counts.items()):
            cells = [_count(counts, outcome) for outcome in (OUTCOMES if compared else ())]
            table.add_row(suite, target, str(len(self.workloads[suite, target])), kind, str(counts["all"]), *cells)
        return table


def _count(counts: Counter[str], outcome: str) -> Text:
    return Text(str(counts[outcome]), style=_STYLES[outcome] if counts[outcome] else "dim")


def told(differences: Iterable[Difference], most: int) -> Iterator[Text]:
    """The first differences line by line, changed texts before those that are there once."""
    ordered = sorted(differences, key=lambda d: OUTCOMES.index(d.outcome))
    for found in ordered[:most]:
        if found.outcome != CHANGED:
            yield Text(f"{found.outcome}: {found.place}", style="bold")
            continue
        for line in found.lines():
            yield Text(line, style={"+": "green", "-": "red", "@": "cyan"}.get(line[:1], ""))
    for outcome, number in Counter(d.outcome for d in ordered[most:]).items():
        yield Text(f"… and {number} more {outcome}", style="dim")
