"""What the steps of a host program hold at once: the peak of memory as an expression of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy


@dataclass(slots=True)
class Memory:
    """Bytes held by tensors beyond the inputs, as polynomials of sizes, at each moment that could be the peak."""

    held: dict[str, sympy.Expr] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)
    now: sympy.Expr = sympy.S.Zero
    seen: dict[sympy.Expr, None] = field(default_factory=dict)

    def add(self, name: str, nbytes: sympy.Expr) -> None:
        self.held[name], self.base[name], self.users[name] = nbytes, name, 1
        self.now = self.now + nbytes
        self.seen[self.now] = None

    def share(self, name: str, source: str) -> None:
        base = self.base.get(source)
        if base is not None:
            self.base[name] = base
            self.users[base] += 1

    def drop(self, name: str) -> None:
        base = self.base.pop(name, None)
        if base is None:
            return
        self.users[base] -= 1
        if self.users[base] == 0:
            self.now = self.now - self.held.pop(base)

    def peaks(self) -> tuple[sympy.Expr, ...]:
        """Those moments that no other outgrows for all sizes."""
        kept: list[tuple[sympy.Expr, dict[sympy.Expr, int]]] = []
        for total in self.seen:
            terms = {k: int(v) for k, v in sympy.expand(total).as_coefficients_dict().items() if v.is_Integer}
            if any(_covers(other, terms) for _, other in kept):
                continue
            kept = [(t, other) for t, other in kept if not _covers(terms, other)]
            kept.append((total, terms))
        return tuple(total for total, _ in kept)


def _covers(a: Mapping[sympy.Expr, int], b: Mapping[sympy.Expr, int]) -> bool:
    return all(a.get(k, 0) >= n for k, n in b.items()) and all(n >= 0 or b.get(k, 0) <= n for k, n in a.items())
