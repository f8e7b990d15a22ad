"""One function that every choice between ways of known costs goes through, and the record of what was chosen.

Whoever weighs costs names the place, the ways with their costs, and the one that the cost model chose. Unless somebody
chose otherwise for that place, this is the answer. Nothing is written down, and no key computed, in compilations that
nobody asks about their decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ...ir.errors import MlcError

# Bytes a nanosecond of a memory of which nothing else is known.
USUAL_BANDWIDTH = 10.0
# Kinds whose ways differ in memory or launches, which no race of programs on a CPU weighs: they are not searched.
SUBSTITUTE, LAUNCH, ORDER = "substitute", "launch", "order"
UNSEARCHED = frozenset((SUBSTITUTE, LAUNCH, ORDER))


class DecisionError(MlcError, ValueError):
    """A decision was to be made otherwise in a way that there is not; names the place and the ways there are."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way: its name, and what it costs in ``nanoseconds`` by the cost model, None where that does not tell."""

    name: str
    nanoseconds: float | None = None


class ChosenFor(Enum):
    """Why a way was taken."""

    COST = "by cost"
    MEASURED = "by tuning"
    RECORDED = "by an earlier tuning"
    OVERRIDE = "by hand"
    LOCK = "by the lock file"


class LockedWays(Protocol):
    """What a lock file has of the places of a graph (``dynamo_backend/locking``)."""

    def way(self, kind: str, at: str, beside: str) -> str | None:
        """The way that is to be taken where the result ``at`` is made, ``beside`` another; None where the file tells
        of no such place."""

    def told(self, at: str) -> str:
        """What the file calls the place, and where it stands in the file."""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """What was decided at one place, or at several that are alike.

    ``key`` tells places of a ``kind`` apart: 16 hex digits that no name decides, equal in every process; "" where
    nobody asked for keys. ``at`` are the results that the places make, and ``beside`` for each the other result that it
    is about, "" for none. ``bytes`` are what is read and written there, at typical sizes, of all of them.
    ``reason`` is the cost model's.
    """

    kind: str
    key: str
    options: tuple[Alternative, ...]
    default: str
    chosen: str
    source: ChosenFor
    at: tuple[str, ...] = ()
    bytes: int = 0
    reason: str = ""
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``kind:key``, as an override names it."""
        return f"{self.kind}:{self.key}"

    @property
    def is_flipped(self) -> bool:
        """Whether another way was taken than the cost model's."""
        return self.chosen != self.default

    def cost(self, option: str) -> float | None:
        """Nanoseconds of a way at all places together; None where the cost model does not tell."""
        found = next((o.nanoseconds for o in self.options if o.name == option), None)
        return None if found is None else found * max(len(self.at), 1)

    @property
    def nanoseconds(self) -> float:
        """The time at stake: that of the way taken, else of the cheapest one known; 0 where none is known."""
        known = [c for o in self.options if (c := self.cost(o.name)) is not None]
        chosen = self.cost(self.chosen)
        return chosen if chosen is not None else min(known, default=0.0)

    @property
    def stake(self) -> float:
        """What decisions are put in order by: the nanoseconds at stake, or where those are not known what reading the
        bytes would take."""
        return self.nanoseconds or self.bytes / USUAL_BANDWIDTH


@dataclass(frozen=True, slots=True)
class DecisionOverrides:
    """What is to be chosen, by kind and key: sorted (kind, key, option). Equal ones have equal texts."""

    items: tuple[tuple[str, str, str], ...] = ()

    @staticmethod
    def of(chosen: Mapping[tuple[str, str], str]) -> DecisionOverrides:
        return DecisionOverrides(tuple(sorted((kind, key, option) for (kind, key), option in chosen.items())))

    @property
    def chosen(self) -> dict[tuple[str, str], str]:
        """The options by kind and key."""
        return {(kind, key): option for kind, key, option in self.items}

    def having(self, others: Mapping[tuple[str, str], str]) -> DecisionOverrides:
        """With others as well, which go before."""
        return DecisionOverrides.of({**self.chosen, **others})

    def plain(self) -> dict[str, str]:
        """As ``parse_overrides`` takes it."""
        return {f"{kind}:{key}": option for kind, key, option in self.items}

    def __bool__(self) -> bool:
        return bool(self.items)

    def __str__(self) -> str:
        return ", ".join(f"{kind}:{key}={option}" for kind, key, option in self.items)


def parse_overrides(given: Mapping[str, str]) -> DecisionOverrides:
    """Overrides of a mapping from ``kind:key`` to options. Raises DecisionError for a name of another form."""
    chosen: dict[tuple[str, str], str] = {}
    for name, option in given.items():
        kind, _, key = str(name).partition(":")
        if not kind or not key or not isinstance(option, str):
            raise DecisionError(
                f"{name!r}: {option!r} is no decision: give kind:key and the name of a way, as explain has"
            )
        chosen[kind, key] = option
    return DecisionOverrides.of(chosen)


@dataclass(slots=True)
class Decider:
    """The decisions of one compilation: what others than the cost model chose, by hand before a lock file before by
    searching before what an earlier search has found, and what came of it. What was found earlier is passed over where
    there is no such way any more.

    Unless it is ``keyed``, no key is computed: each place is a record, told apart by the results that it makes.
    """

    by_hand: DecisionOverrides = DecisionOverrides()
    measured: DecisionOverrides = DecisionOverrides()
    recorded: DecisionOverrides = DecisionOverrides()
    locked: LockedWays | None = None
    keyed: bool = True
    _given: tuple[tuple[ChosenFor, dict[tuple[str, str], str]], ...] = field(init=False, repr=False)
    # By kind, key (or place) and way: of places with one key a lock file may have several ways.
    _found: dict[tuple[str, str, str], DecisionRecord] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._given = (
            (ChosenFor.OVERRIDE, self.by_hand.chosen),
            (ChosenFor.MEASURED, self.measured.chosen),
            (ChosenFor.RECORDED, self.recorded.chosen),
        )

    def decide(
        self, kind: str, key: str | Callable[[], str], options: Sequence[Alternative], default: str, *, at: str = "",
        nbytes: int = 0, reason: str = "", beside: str = "",
    ) -> str:  # fmt: skip
        """The name of the way to take at a place. ``at`` is the result that it makes, ``beside`` another that it is
        about; a place that is asked about again has one entry.

        Raises:
            DecisionError: somebody chose a way that this place has not.
        """
        names = [o.name for o in options]
        assert default in names, f"{kind}: {default} is none of {names}"
        text = "" if not self.keyed else key if isinstance(key, str) else key()
        chosen, source = self._chosen(kind, text, names, default, at, beside)
        place = kind, text or f"{at} {beside}", chosen
        before = self._found.get(place)
        pairs = [(at, beside)] if before is None else [*zip(before.at, before.beside, strict=True)]
        if (at, beside) not in pairs:
            pairs.append((at, beside))
        self._found[place] = DecisionRecord(
            kind, text, tuple(options), default, chosen, source, tuple(a for a, _ in pairs), nbytes * len(pairs),
            reason, tuple(b for _, b in pairs),
        )  # fmt: skip
        return chosen

    def _chosen(
        self, kind: str, key: str, names: Sequence[str], default: str, at: str, beside: str
    ) -> tuple[str, ChosenFor]:
        for who, given in self._given:
            if who is ChosenFor.MEASURED and self.locked is not None:
                wanted = self.locked.way(kind, at, beside)
                if wanted is not None and wanted not in names:
                    raise DecisionError(
                        f"{self.locked.told(at)} has {kind} {wanted!r}, and there {'is' if len(names) == 1 else 'are'} "
                        f"{', '.join(names)} at this place now"
                    )
                if wanted is not None:
                    return wanted, ChosenFor.LOCK if wanted != default else ChosenFor.COST
            wanted = given.get((kind, key))
            if wanted in names:
                return str(wanted), who
            if wanted is not None and who is not ChosenFor.RECORDED:
                raise DecisionError(f"decision {kind}:{key} has no way {wanted!r}; there are {', '.join(names)}")
        return default, ChosenFor.COST

    @property
    def records(self) -> tuple[DecisionRecord, ...]:
        """What was decided, that with the most time or bytes at stake first."""
        return tuple(sorted(self._found.values(), key=lambda r: (-r.stake, -r.bytes, r.name)))

    @property
    def unused(self) -> tuple[str, ...]:
        """Overrides of places that were not met."""
        met = {(kind, key) for kind, key, _ in self._found}
        return tuple(f"{kind}:{key}" for kind, key in self.by_hand.chosen if (kind, key) not in met)


def flipped(record: DecisionRecord) -> Iterator[tuple[str, float | None]]:
    """The other ways of a decision, with the nanoseconds that they are predicted to take longer."""
    taken = record.cost(record.chosen)
    for option in record.options:
        if option.name != record.chosen:
            cost = record.cost(option.name)
            yield option.name, None if cost is None or taken is None else cost - taken


def table(records: Iterable[DecisionRecord], limit: int | None = None) -> list[str]:
    """Decisions as lines, that with the most time at stake first: time and bytes at stake, places, what was chosen and
    why, and what else there was."""
    found = list(records)
    if not found:
        return []
    shown = found if limit is None else found[:limit]
    kinds = max(len("decision"), *(len(r.name) for r in shown))
    chosen = max(len("chosen"), *(len(r.chosen) for r in shown))
    lines = [f"{'time':>9}  {'bytes':>9}  {'places':>6}  {'decision':{kinds}}  {'chosen':{chosen}}  others"]
    for r in shown:
        others = ", ".join(_told(r, name, more) for name, more in flipped(r))
        why = "" if r.source is ChosenFor.COST else f" ({r.source.value}; {r.default} by cost)"
        start = f"{_time(r.nanoseconds):>9}  {_bytes(r.bytes):>9}  {max(len(r.at), 1):>6}  {r.name:{kinds}}"
        lines.append(f"{start}  {r.chosen:{chosen}}  {others}{why}".rstrip())
    more = len(found) - len(shown)
    return [*lines, *([f"… and {more} more"] if more else [])]


def _told(record: DecisionRecord, option: str, more: float | None) -> str:
    taken = record.cost(record.chosen)
    if more is None or not taken or not math.isfinite(more):
        return option
    return f"{option} ({1.0 + more / taken:.2f}x)"


def _time(nanoseconds: float) -> str:
    if not nanoseconds:
        return "?"
    return f"{nanoseconds / 1e3:.1f} us" if nanoseconds < 1e6 else f"{nanoseconds / 1e6:.1f} ms"


def _bytes(count: int) -> str:
    if not count:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 10240 or unit == "GiB":
            return f"{count} {unit}"
        count //= 1024
    return ""
