"""Iteration domains of fused groups: every axis of every node as a mixed-radix number over shared atomic dimensions.

Two nodes may share a loop nest when their axes can be written over the same dimensions such that one reads the other
at the iteration in which it is made. An axis of extent ``B*T`` next to axes ``B`` and ``T`` is the digits ``(b,
t)``; where a dimension is too coarse it is refined, for all nodes at once. So views that merge or split dimensions
cost nothing, and no index needs a division.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from ...ir.expr.value import Index, is_value

# Atomic dimensions, most significant first.
Digits: TypeAlias = tuple[int, ...]


def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """``a / b`` where b divides a for all sizes (a polynomial with integer coefficients), else None."""
    if a.is_Integer and b.is_Integer:
        return sympy.Integer(int(a) // int(b)) if int(b) != 0 and int(a) % int(b) == 0 else None
    if a == b:
        return sympy.S.One
    if a.is_Integer:
        return None
    numerator, denominator = sympy.cancel(a / b).as_numer_denom()  # of a sum, that of all its terms
    return numerator if denominator == 1 else None


@dataclass(slots=True)
class Domain:
    """The atomic dimensions of one group, in loop order, with their extents; ``inner`` are those a reduction runs over.

    ``inner`` is None while no node tells rows from elements.
    """

    extents: dict[int, sympy.Expr] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    inner: frozenset[int] | None = None
    # Refinements made so far, oldest first: dimension -> its two parts.
    splits: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    fresh: int = 0

    def copy(self) -> Domain:
        return Domain(dict(self.extents), list(self.order), self.inner, list(self.splits), self.fresh)

    def add(self, extent: sympy.Expr) -> int:
        """A new dimension, innermost."""
        dim = self.fresh
        self.fresh += 1
        self.extents[dim] = extent
        self.order.append(dim)
        return dim

    def split(self, dim: int, outer: sympy.Expr, inner: sympy.Expr) -> tuple[int, int]:
        """Refine a dimension into two. Digits held elsewhere are brought up to date by ``refresh``."""
        pair = (self.fresh, self.fresh + 1)
        self.fresh += 2
        self.extents[pair[0]], self.extents[pair[1]] = outer, inner
        at = self.order.index(dim)
        self.order[at : at + 1] = pair
        del self.extents[dim]
        if self.inner is not None and dim in self.inner:
            self.inner = (self.inner - {dim}) | set(pair)
        self.splits.append((dim, pair))
        return pair

    def refresh(self, digits: Digits, since: int = 0) -> Digits:
        """The digits after the refinements made since the ``since``-th."""
        for dim, pair in self.splits[since:]:
            if dim in digits:
                at = digits.index(dim)
                digits = (*digits[:at], *pair, *digits[at + 1 :])
        return digits

    def rows(self) -> list[int]:
        return [d for d in self.order if self.inner is None or d not in self.inner]

    def inner_order(self) -> list[int]:
        return [d for d in self.order if self.inner is not None and d in self.inner]

    def size(self, digits: Digits | list[int]) -> sympy.Expr:
        return sympy.Mul(*(self.extents[d] for d in digits))

    def align(self, extents: list[sympy.Expr], digits: Digits | list[int]) -> list[Digits] | None:
        """Cut a row of dimensions into axes of the given extents, refining where needed; None where they do not line
        up."""
        queue = list(digits)
        result: list[Digits] = []
        for extent in extents:
            left, mine = extent, []
            while left != 1:
                if not queue:
                    return None
                dim = queue.pop(0)
                size = self.extents[dim]
                if size == 1:
                    mine.append(dim)
                    continue
                if (rest := quotient(left, size)) is not None:
                    mine.append(dim)
                    left = rest
                elif (rest := quotient(size, left)) is not None:
                    high, low = self.split(dim, left, rest)
                    mine.append(high)
                    queue.insert(0, low)
                    left = sympy.S.One
                else:
                    return None
            result.append(tuple(mine))
        if any(self.extents[d] != 1 for d in queue):
            return None
        return result


Binding: TypeAlias = dict[sympy.Symbol, Digits]
# Whether an axis runs backward over its digits: it is at its last position where they are all zero.
Direction: TypeAlias = dict[sympy.Symbol, bool]


def backward(index: Index, extents: dict[sympy.Symbol, sympy.Expr]) -> sympy.Symbol | None:
    """The axis ``i`` of an index ``n - 1 - i``, where n is its extent."""
    if not isinstance(index, sympy.Add):
        return None
    found = [s for s in index.free_symbols if s in extents]
    return found[0] if len(found) == 1 and sympy.expand(index + found[0] + 1 - extents[found[0]]) == 0 else None


def bind_access(
    domain: Domain,
    indices: tuple[Index, ...],
    target: list[Digits | None],
    extents: dict[sympy.Symbol, sympy.Expr],
    binding: Binding,
    turned: Sequence[bool] = (),
    direction: Direction | None = None,
) -> bool:
    """Learn from one access what digits the reader's axes have, given the digits of the accessed tensor's dimensions.

    ``target[k]`` is None where dimension k is not written over the domain, and ``turned[k]`` says whether it is
    written backward. Extends ``binding``, and ``direction``, without which all axes run forward; False where the access
    cannot be of the same iteration. A dimension of extent 1 has no digits.
    """
    direction = {} if (forward := direction is None) else direction
    known = set(binding)
    back = [*turned, *(False for _ in indices[len(turned) :])]
    plain: list[Index] = []
    for k, index in enumerate(indices):
        var = backward(index, extents)
        if var is None and not (isinstance(index, sympy.Symbol) and index in extents):
            if back[k]:
                return False
            plain.append(index)
            continue
        axis = index if var is None else var
        runs_back = back[k] != (var is not None)
        if target[k] and direction.setdefault(axis, runs_back) != runs_back:
            return False
        plain.append(axis)
    if not _bind_forward(domain, tuple(plain), target, extents, binding):
        return False
    mixed = {s for i in plain if not is_value(i) and not i.is_Symbol for s in i.free_symbols if s in extents}
    if any(direction.get(s) for s in mixed):
        return False
    direction.update((s, False) for s in binding if s not in known and s not in direction)
    return not (forward and any(direction.values()))


def _bind_forward(
    domain: Domain,
    indices: tuple[Index, ...],
    target: list[Digits | None],
    extents: dict[sympy.Symbol, sympy.Expr],
    binding: Binding,
) -> bool:
    parts: dict[sympy.Symbol, list[tuple[sympy.Expr, sympy.Expr | None, int]]] = {}
    for k, index in enumerate(indices):
        digits = target[k]
        if digits is None or is_value(index):
            return False
        mark = len(domain.splits)
        if digits and all(domain.extents[d] == 1 for d in digits):
            digits = ()
        if not digits:
            if index != 0 and not (index.is_Symbol and extents.get(index) == 1):
                return False
            if index.is_Symbol:
                binding.setdefault(index, ())
            continue
        if index.is_Symbol and index in extents:
            # Reading only the front of a dimension is another iteration space.
            if extents[index] != domain.size(digits) or not _learn(domain, binding, index, digits):
                return False
        elif index.is_Add:
            if not _bind_merged(domain, index, digits, extents, binding):
                return False
        else:
            piece = _piece(index)
            if piece is None or piece[0] not in extents:
                return False
            parts.setdefault(piece[0], []).append((piece[1], piece[2], k))
        _refresh_all(domain, binding, mark, target)
    return all(_bind_split(domain, var, pieces, target, extents, binding) for var, pieces in parts.items())


def _refresh_all(domain: Domain, binding: Binding, mark: int, target: list[Digits | None]) -> None:
    if len(domain.splits) == mark:
        return
    for var, digits in binding.items():
        binding[var] = domain.refresh(digits, mark)
    for k, d in enumerate(target):
        if d is not None:
            target[k] = domain.refresh(d, mark)


def _learn(domain: Domain, binding: Binding, var: sympy.Symbol, digits: Digits) -> bool:
    known = binding.get(var)
    if known is None:
        binding[var] = digits
        return True
    return known == digits


def _bind_merged(
    domain: Domain, index: sympy.Expr, digits: Digits, extents: dict[sympy.Symbol, sympy.Expr], binding: Binding
) -> bool:
    """The tensor's dimension is axes of the reader in a row."""
    ordered = axes_in_row(index, extents)
    if ordered is None:
        return False
    mark = len(domain.splits)
    cut = domain.align([extents[v] for v in ordered], digits)
    if cut is None:
        return False
    for var, known in list(binding.items()):
        binding[var] = domain.refresh(known, mark)
    return all(_learn(domain, binding, v, domain.refresh(c, mark)) for v, c in zip(ordered, cut, strict=True))


def axes_in_row(index: sympy.Expr, extents: dict[sympy.Symbol, sympy.Expr]) -> list[sympy.Symbol] | None:
    """The axes i and j of ``i*E + j`` with ``j < E``, and so on, the most significant one first."""
    terms: list[tuple[sympy.Expr, sympy.Symbol]] = []
    for term in index.args:
        symbols = [s for s in term.free_symbols if s in extents]
        if len(symbols) != 1:
            return None
        factor = quotient(term, symbols[0])
        if factor is None or symbols[0] in factor.free_symbols:
            return None
        terms.append((factor, symbols[0]))
    # Order by significance: each factor must be the product of the extents of all lower axes.
    ordered: list[sympy.Symbol] = []
    step: sympy.Expr = sympy.S.One
    while terms:
        found = [(f, v) for f, v in terms if f == step]
        if len(found) != 1:
            return None
        terms.remove(found[0])
        ordered.insert(0, found[0][1])
        step = sympy.expand(step * extents[found[0][1]])
    return ordered


def _piece(index: sympy.Expr) -> tuple[sympy.Symbol, sympy.Expr, sympy.Expr | None] | None:
    """``(var, divisor, modulus)`` of ``var // divisor`` or ``(var // divisor) % modulus``."""
    match index:
        case FloorDiv() if index.args[0].is_Symbol:
            return index.args[0], index.args[1], None
        case ModularIndexing() if index.args[0].is_Symbol:
            return index.args[0], index.args[1], index.args[2]
        case Mod() | PythonMod() if index.args[0].is_Symbol:
            return index.args[0], sympy.S.One, index.args[1]
    return None


def _bind_split(
    domain: Domain,
    var: sympy.Symbol,
    pieces: list[tuple[sympy.Expr, sympy.Expr | None, int]],
    target: list[Digits | None],
    extents: dict[sympy.Symbol, sympy.Expr],
    binding: Binding,
) -> bool:
    """Several dimensions of the tensor are the quotients and remainders of one axis of the reader."""
    result: Digits = ()
    step: sympy.Expr = sympy.S.One
    left = list(pieces)
    while left:
        found = [p for p in left if p[0] == step]
        if len(found) != 1:
            return False
        divisor, modulus, k = found[0]
        digits = target[k]
        if digits is None:
            return False
        size = domain.size(digits)
        if modulus is not None and modulus != size:
            return False
        result = (*digits, *result)
        step = sympy.expand(divisor * size)
        left.remove(found[0])
    if step != extents[var]:
        return False
    return _learn(domain, binding, var, result)
