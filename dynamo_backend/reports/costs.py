"""What runs in a graph as one table for people: what costs most first, each with its share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 118


@dataclass(frozen=True, slots=True)
class CostRow:
    """A kernel, or the calls of one library op. Bytes and operations are of all ``runs`` in one call of the graph, None
    where they are not known; ``seconds`` what these are predicted to take; ``lines`` those of the model."""

    name: str
    runs: int
    moved: int | None
    least: int | None = None
    operations: int | None = None
    seconds: float | None = None
    rule: str = ""
    workload: str = ""
    lines: tuple[str, ...] = ()


# What the words of the table mean; the share is of time or of bytes.
_SHARES = tuple(
    f"  share: of the {of}. moves: bytes to and from memory, in all runs; least: the fewest that could be."
    for of in ("bytes moved", "predicted time")
)
_WORDS = "  ops: operations on numbers. Below a kernel: its rule, the name of its workload, and where it is from."
_LEGEND = frozenset({*_SHARES, _WORDS})


def cost_lines(rows: Sequence[CostRow]) -> list[str]:
    """The table and its legend; nothing for no rows.

    Rows are sorted by predicted time where that is known of all, else by bytes.
    """
    if not rows:
        return []
    timed = all(r.seconds is not None for r in rows)
    costs = [(r.seconds if timed else r.moved) or 0 for r in rows]
    whole = math.fsum(costs) or 1
    ordered = sorted(zip(costs, rows, strict=True), key=lambda pair: -pair[0])
    lines = [f"  {'share':>6}  {'runs':>5}  {'moves':>9}  {'least':>9}  {'ops':>6}  what"]
    for cost, r in ordered:
        figures = [bytes_text(n) if n is not None else "" for n in (r.moved, r.least)]
        ops = count_text(r.operations) if r.operations is not None else ""
        lines.append(f"  {cost / whole:>6.1%}  {r.runs:>5}  {figures[0]:>9}  {figures[1]:>9}  {ops:>6}  {r.name}")
        start = "".join(f"{part}  " for part in (" " * 9, r.rule, r.workload) if part)
        lines.append((start + origin_text(r.lines, WIDTH - len(start))).rstrip())
    return [*lines, _SHARES[timed], _WORDS]


def legends_once(texts: Sequence[str]) -> list[str]:
    """Texts of several graphs, where a legend that a later one has again is left out of those before it."""
    kept: list[str] = []
    said: set[str] = set()
    for text in reversed(texts):
        lines = text.splitlines()
        kept.append("\n".join(line for line in lines if line not in said))
        said |= _LEGEND.intersection(lines)
    return kept[::-1]


def origin_text(lines: Sequence[str], width: int) -> str:
    """The last model line, cut to a width, and how many more there are."""
    if not lines:
        return ""
    more = f" (+{len(lines) - 1} more line{'s' if len(lines) > 2 else ''})" if len(lines) > 1 else ""
    told = lines[-1]
    if len(told) + len(more) > width:
        told = told[: max(width - len(more) - 1, 1)].rstrip() + "…"
    return told + more


def together(told: Iterable[tuple[str, str]], shown: int) -> list[str]:
    """Each reason once, with what it is for: "a, b and 3 more: reason"."""
    found: dict[str, list[str]] = {}
    for what, reason in told:
        found.setdefault(reason, []).append(what)
    lines = []
    for reason, names in found.items():
        names = list(dict.fromkeys(names))
        more = f" and {len(names) - shown} more" if len(names) > shown else ""
        lines.append(f"{', '.join(names[:shown])}{more}: {reason}")
    return lines


def bytes_text(n: float) -> str:
    """Bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def count_text(n: float) -> str:
    """A number of operations, short."""
    for unit in ("", "K", "M"):
        if n < 1000:
            return f"{n:.0f}{unit}"
        n /= 1000
    return f"{n:.1f}G"
