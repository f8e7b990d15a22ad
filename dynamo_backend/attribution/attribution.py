"""What ``torch_mlc.attribute`` gives: a table of places and of what each of them does to the result."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...runtime.plain_text import counted
from .results import Distance

# Kinds of rows that are no place.
NOT_ATTRIBUTED, TRACED, OF_EAGER = "not attributed", "traced as other ops", "roundings of eager"
_NO_PLACE = (NOT_ATTRIBUTED, TRACED)


# The share of the difference that the mapping of ``numerics()`` is for.
SHARE = 0.95


@dataclass(frozen=True, slots=True)
class AttributionRow:
    """What one place, or several that were switched together, do to a result.

    ``share`` is the part of the whole difference, by its projection on that: shares of all rows add up to 1. ``low``
    and ``high`` bound it over the orders that were tried. ``size`` is how far the result moves. ``error`` is how much
    larger the distance from float64 becomes, as a share of the whole difference, where eager has its way here: what is
    above 0 makes fast numerics better than eager's; None against eager. ``entries`` keep eager's numerics here, in
    ``options={"numerics": …}``.
    """

    kind: str
    places: tuple[str, ...]
    lines: tuple[str, ...]
    share: float
    low: float
    high: float
    size: Distance
    error: float | None = None
    layers: tuple[str, ...] = ()
    entries: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_one(self) -> bool:
        """Whether it is one place, with its equals in other layers."""
        return len(self.places) == 1


@dataclass(frozen=True, slots=True, repr=False)
class Attribution:
    """Why a compiled result is not eager's (or float64's): ``rows`` add up to ``whole``, the largest share first.

    ``noise`` is the difference of the compiled program from itself, run twice. ``rest`` is the share that nothing
    explains: how far the program with all switches on is from torch's ops as AOTAutograd traces them. Where those are
    not eager's themselves (a dropout on a CPU), a row says so. ``kept`` is the difference that is left, as a
    share of the whole, where ``numerics()`` is compiled with. ``steps`` may be switched, ``programs`` were compiled.
    """

    against: str
    whole: Distance
    noise: Distance
    rows: tuple[AttributionRow, ...]
    rest: float
    elements: int
    steps: int
    programs: int
    seconds: float
    base: Mapping[str, str]
    kept: float | None = None
    # Rows that ``numerics()`` names at least: with fewer of them, more was left when that was measured.
    least: int = 0
    # Entries of what made no difference in its turn, and may make one where others are not switched: ``numerics()``
    # names them beside all rows, as far as ``least`` asks for it.
    idle: tuple[Mapping[str, str], ...] = field(default=(), repr=False)
    # Of the differences that the rows make, each with each, as shares of the square of the whole.
    products: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def is_zero(self) -> bool:
        """Whether there is no difference at all."""
        return self.whole.norm == 0 and self.whole.elements == 0

    @property
    def explained(self) -> float:
        """How much of the difference the rows of one place are: 1 less the norm of what is left without what they
        make, as a share of the whole. 1 where there is no difference."""
        return 1.0 - self._left([k for k, r in enumerate(self.rows) if r.is_one and r.kind not in _NO_PLACE])

    @property
    def named(self) -> int:
        """How many rows, and of ``idle``, ``numerics()`` names."""
        return len(self._chosen(SHARE)) + self._named_idle

    @property
    def nameable(self) -> int:
        """How many rows, and of ``idle``, ``numerics()`` may name."""
        return self._rows_with_names + len(self.idle)

    @property
    def _rows_with_names(self) -> int:
        return sum(bool(row.entries) for row in self.rows)

    @property
    def _named_idle(self) -> int:
        return min(max(0, self.least - self._rows_with_names), len(self.idle))

    def _left(self, chosen: Sequence[int]) -> float:
        """What is left of the difference, as a share of it, without what some rows make."""
        if not self.products:
            return 1.0 - sum(self.rows[k].share for k in chosen) if self.rows else 0.0
        out = [k for k in range(len(self.rows)) if k not in set(chosen)]
        return math.sqrt(max(0.0, sum(self.products[a][b] for a in out for b in out)))

    def numerics(self, share: float = SHARE) -> dict[str, str]:
        """The mapping for ``options={"numerics": …}`` that keeps eager's numerics at the places that together
        make so large a ``share`` of the difference, those with the largest first; it has what was given already.
        More places are named where what was left with those few was measured, and was more.
        Against float64 those are the places where eager is better, and so much of what they better."""
        made = dict(self.base)
        for k in self._chosen(share):
            made |= self.rows[k].entries
        for entries in self.idle[: self._named_idle]:
            made |= entries
        return made

    def _chosen(self, share: float) -> list[int]:
        """The rows that ``numerics`` names."""
        rows = [k for k, row in enumerate(self.rows) if row.entries]
        if self.against != "eager":
            gains = {k: -(self.rows[k].error or 0.0) for k in rows if (self.rows[k].error or 0.0) < 0}
            wanted, found = share * sum(gains.values()), list[int]()
            for k in sorted(gains, key=lambda k: -gains[k]):
                if sum(gains[f] for f in found) < wanted:
                    found.append(k)
            return found
        chosen: list[int] = []
        while (self._left(chosen) > 1.0 - share or len(chosen) < self.least) and len(chosen) < len(rows):
            chosen.append(min((k for k in rows if k not in chosen), key=lambda k: self._left([*chosen, k])))
        return chosen

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON."""
        made: dict[str, Any] = {
            "schema": 1, "against": self.against, "whole": asdict(self.whole), "noise": asdict(self.noise),
            "explained": self.explained, "rest": self.rest, "kept": self.kept, "elements": self.elements,
            "steps": self.steps, "programs": self.programs, "seconds": self.seconds, "notes": list(self.notes),
            "numerics": self.numerics(),
            "rows": [{**asdict(r), "entries": dict(r.entries)} for r in self.rows],
        }  # fmt: skip
        return json.dumps(made, indent=indent)

    def show(self, limit: int | None = None) -> str:
        """The table as text, so many rows of it at most."""
        other = "eager" if self.against == "eager" else "eager in float64"
        if self.is_zero:
            what = f"equal {other}'s bit for bit" if self.against == "eager" else f"are {other}'s"
            return f"No difference: all {self.elements} elements of the compiled model's results {what}.\n"
        lines = [f"The compiled model differs from {other}: {_sized(self.whole)}."]
        noise = "the same program twice gives the same bits" if not (self.noise.norm or self.noise.elements) else ""
        noise = noise or f"the same program twice differs too: {_sized(self.noise)}"
        lines.append(f"Noise: {noise}.")
        lines.append("")
        shown = self.rows if limit is None else self.rows[:limit]
        is_double = self.against != "eager"
        counts = any(r.size.elements for r in self.rows)
        head = f"{'share':>7}  {'in other orders':>16}  {'largest':>9}  {'ulp':>7}"
        head += f"  {'elements':>8}" * counts + f"  {'error':>8}" * is_double
        lines.append(f"{head}  {'what':29}  where")
        for r in shown:
            span = f"{_percent(r.low)} to {_percent(r.high)}" if r.low < r.high else ""
            start = f"{_percent(r.share):>7}  {span:>16}  {r.size.relative:>9.2g}  {r.size.ulp:>7.3g}"
            start += f"  {r.size.elements:>8}" * counts
            start += f"  {_signed(r.error):>8}" * is_double
            where = _where(r)
            lines.append(f"{start}  {r.kind:29}  {where[0]}".rstrip())
            lines += [" " * 9 + w for w in where[1:]]
        if len(shown) < len(self.rows):
            lines.append(f"… and {counted(len(self.rows) - len(shown), 'row')} more")
        lines.append("")
        lines.append(
            f"Places of their own explain {_percent(self.explained)}; nothing explains {_percent(self.rest)}. "
            f"{counted(self.programs, 'program')} for {counted(self.steps, 'switch', 'switches')}, "
            f"{self.seconds:.0f} s."
        )
        if self.kept is not None:
            lines.append(
                f'With options={{"numerics": attribution.numerics()}} {_percent(self.kept)} of the difference is left.'
            )
        if self._named_idle:
            lines.append(
                f"They name {counted(self._named_idle, 'switch', 'switches')} without a row: no "
                "difference in its turn, and one where others are left as they are."
            )
        lines += self.notes
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.show(limit=24)

    def __repr__(self) -> str:
        if self.is_zero:
            return f"<Attribution against {self.against}: no difference>"
        return (
            f"<Attribution against {self.against}: {counted(len(self.rows), 'row')}, the first "
            f"{_percent(self.rows[0].share)}; print it>"
        )

    def _repr_html_(self) -> str:
        return f'<pre style="font-family: monospace">{html.escape(str(self))}</pre>'


def _where(row: AttributionRow) -> list[str]:
    if not row.places:
        return [""]
    told, lines = row.places[0], [n.partition(": ")[::2] for n in row.lines[:3]]
    if not row.is_one:
        names = ", ".join(dict.fromkeys(p.partition(" at ")[0] for p in row.places))
        return [f"{len(row.places)} places together", names if len(names) < 60 else f"{names[:57]}…"]
    at, _, line = told.partition(" at ")
    layers = f" ({row.layers[0]})" if len(row.layers) == 1 and row.layers[0] else ""
    layers = f" ({len(row.layers)} layers)" if len(row.layers) > 1 else layers
    at = at.removeprefix("aten.").replace(".default", "")
    first = f"{at}, {line.partition(': ')[0]}{layers}" if line else f"{at}{layers}"
    code = line.partition(": ")[2]
    return [first, code] if code else [first, *(f"{where}: {c}" for where, c in lines if where not in first)]


def _sized(size: Distance) -> str:
    parts = []
    if size.norm:
        parts.append(
            f"by {size.absolute:.3g} at most, {size.relative:.2g} of the largest magnitude of {size.name} "
            f"({size.ulp:.3g} ulp)"
        )
    if size.elements:
        parts.append(f"{counted(size.elements, 'element')} that have no difference to take")
    return ", and in ".join(parts) or "not at all"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f}%"


__all__ = ["NOT_ATTRIBUTED", "OF_EAGER", "TRACED", "Attribution", "AttributionRow"]
