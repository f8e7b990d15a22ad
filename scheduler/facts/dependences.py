"""Which units of a growing graph need which, transitively: the exact test for cycles of fusion.

A unit is a bit, and what it needs a mask: a query is one operation on integers, and what changes is told only to the
units that it concerns. Units that are united keep their bits, so that masks made before stay right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


def set_bits(mask: int) -> Iterator[int]:
    """Positions of the bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def last_bits(mask: int, count: int) -> Iterator[int]:
    """Positions of the last bits of a mask, highest first."""
    while mask and count:
        high = mask.bit_length() - 1
        yield high
        mask ^= 1 << high
        count -= 1


@dataclass(slots=True)
class Dependences:
    """Units by number, in the order in which they were added."""

    # For each unit its own bit and those of the units that became part of it; what it needs, transitively; the units
    # that need it at first hand, under the numbers that they had.
    bits: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    _users: list[int] = field(default_factory=list)
    _home: list[int] = field(default_factory=list)

    @staticmethod
    def of(count: int) -> Dependences:
        """So many units, none of which needs another yet."""
        return Dependences([1 << k for k in range(count)], [0] * count, [0] * count, list(range(count)))

    def add(self, on: Iterable[int] = ()) -> int:
        """A new unit that needs others; its number."""
        at = len(self.bits)
        self.bits.append(1 << at)
        self.needs.append(0)
        self._users.append(0)
        self._home.append(at)
        self.depend(at, on)
        return at

    def depend(self, at: int, on: Iterable[int]) -> None:
        """Let a unit need others. The caller has made sure that none of them needs it."""
        known = needs = self.needs[at]
        for k in on:
            if k != at:
                needs |= self.needs[k] | self.bits[k]
                self._users[k] |= 1 << at
        if needs != known:
            self.needs[at] = needs
            self._tell(at)

    def is_needed(self, at: int, by: int) -> bool:
        """Whether one unit must run before another."""
        return bool(self.needs[by] & self.bits[at])

    def blocked(self, on: Iterable[int]) -> int:
        """The mask of units to which nothing may be added that needs these, since a path leads from them to one of
        these through others."""
        mask = 0
        for k in on:
            mask |= self.needs[k]
        return mask

    def may_unite(self, a: int, b: int) -> bool:
        """Whether no path leads from one unit to the other through a third, so that the two may be one."""
        own = ~(self.bits[a] | self.bits[b])
        return not (self._users[a] & self.needs[b] & own or self._users[b] & self.needs[a] & own)

    def unite(self, source: int, target: int) -> None:
        """Make one unit part of another; ``may_unite`` has been asked."""
        bits = self.bits[target] = self.bits[target] | self.bits[source]
        self._home[source] = target
        self._users[target] = (self._users[target] | self._users[source]) & ~bits
        self.needs[target] = (self.needs[target] | self.needs[source]) & ~bits
        self._tell(target)

    def _tell(self, at: int) -> None:
        """Hand what a unit needs on to those that need it."""
        changed = [at]
        while changed:
            k = changed.pop()
            mask = self.needs[k] | self.bits[k]
            for user in set_bits(self._users[k]):
                home = self._live(user)
                if mask & ~self.needs[home]:
                    self.needs[home] |= mask
                    changed.append(home)

    def _live(self, at: int) -> int:
        while (home := self._home[at]) != at:
            self._home[at] = self._home[home]
            at = home
        return at
