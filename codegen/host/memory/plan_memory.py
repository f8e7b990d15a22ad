"""Where the intermediates of a host program lie in its arena: one piece of memory a call, with symbolic offsets.

Memory that only launches look at needs no tensor, and so no allocation of its own: an address in the arena is enough.
Offsets and the size of the arena are expressions of sizes. What lives at the same time is apart for all sizes, which
``check_arena`` proves without asking how the places were found.

Source: greedy placement by size, Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice

import sympy
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, ModularIndexing

from ....ir.errors import MlcError
from ..steps.program import Arena, HostProgram
from .liveness import Polynomial, Row, Storage, as_rows, covers, expression, peaks_of, plus, polynomial, storages

# Offsets are multiples of a line of the cache, as torch's own allocations are; on GPUs, of what a warp reads at once at
# most, and twice the line that it reads from memory.
ALIGN, ALIGN_GPU = 64, 256
# Rounding the coefficients of a size up to that may make it so much larger; else the size as a whole is rounded.
WASTE = 1.25
# An arena of fewer is no gain.
LEAST = 2
# An arena of more bytes would be fetched from the system anew in each call, page by page, on a CPU: malloc keeps what
# is smaller (M_MMAP_THRESHOLD grows to 32 MiB). Torch's allocator for GPUs keeps whatever it has got; there the limit
# is for sizes that are symbols, of which a typical one says little about the peak at others.
MOST = 24 << 20
# A page more at the peak is nothing.
SLACK = 4096


class ArenaError(MlcError):
    """Two tensors of an arena share memory while both live, or one lies outside of it."""


def plan_memory(program: HostProgram) -> HostProgram:
    """The program with an arena for what only launches look at, where that does not raise its peak, but for a page.

    Large tensors are left out of it as long as it would: an arena is held from its first tensor to its last. It is on
    the device that has most of such tensors.
    """
    every = storages(program)
    device = _device(every)
    sizes = _Sizes.of(program, every, ALIGN if device == "cpu" else ALIGN_GPU)
    inside = [s for s in every if s.ours and s.by_address and s.type.device == device and s.nbytes in sizes.rows]
    known = device != "cpu" and all(s.nbytes.is_Integer for s in inside)
    most_bytes = math.inf if known else MOST
    steps = sum(1 for _ in program.every_step())
    profile = _Profile(steps + 1, [sizes.typical[s.nbytes] for s in every], every)
    most = max(profile.total, default=0) + SLACK
    for limit in sorted({sizes.typical[s.nbytes].bit_length() for s in inside}, reverse=True):
        inside = [s for s in inside if sizes.typical[s.nbytes].bit_length() <= limit]
        if len(inside) < LEAST:
            break
        within = profile.of(inside)
        if profile.with_arena(inside, within, max(within)) > most or max(within) > most_bytes:
            continue  # no arena is smaller than what lives in it at once
        arena, size = sizes.placed(inside)
        if profile.with_arena(inside, within, size) <= most and size <= most_bytes:
            held = [s for s in every if s.name not in arena.offsets]
            arena = replace(arena, bound=program.table.bounds(arena.size)[1])
            return replace(program, arena=arena, peaks=peaks_of(held, arena))
    return program


def place_all(program: HostProgram) -> HostProgram:
    """The program with an arena for everything that it allocates.

    Raises ArenaError where data decide how much that is, or something wants it as a tensor.
    """
    every = storages(program)
    sizes = _Sizes.of(program, every, ALIGN if _device(every) == "cpu" else ALIGN_GPU)
    for s in every:
        if s.nbytes not in sizes.rows or not (s.ours and s.by_address):
            why = "something wants it as a tensor" if s.nbytes in sizes.rows else "data or fractions decide how many"
            raise ArenaError(f"{program.name}: {s.name} of {s.nbytes} bytes has no place in an arena: {why}")
    if not every:
        return program
    arena, _ = sizes.placed(every)
    return replace(program, arena=arena, peaks=peaks_of([], arena))


def _device(every: Sequence[Storage]) -> str:
    """The device on which most tensors are that only launches look at."""
    counts = Counter(s.type.device for s in every if s.ours and s.by_address)
    return counts.most_common(1)[0][0] if counts else "cpu"


class _Profile:
    """Bytes that are held at each step, at typical sizes."""

    def __init__(self, steps: int, nbytes: Sequence[int], every: Sequence[Storage]) -> None:
        self.steps = steps
        self.nbytes = {s.name: n for s, n in zip(every, nbytes, strict=True)}
        self.total = self.of(every)

    def of(self, some: Iterable[Storage]) -> list[int]:
        change = [0] * (self.steps + 2)
        for s in some:
            change[s.begin + 1] += self.nbytes[s.name]
            change[s.end + 2] -= self.nbytes[s.name]
        return list(accumulate(change))

    def with_arena(self, inside: Sequence[Storage], within: Sequence[int], size: int) -> int:
        """The peak where some of it, ``within`` at each step, lies in an arena of a size."""
        begin, end = min(s.begin for s in inside) + 1, max(s.end for s in inside) + 1
        beside = [a - b for a, b in zip(self.total, within, strict=True)]
        return max(max(beside), max(beside[begin : end + 1]) + size)


# --- places -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Place:
    """Where something lies, and in which steps; ``typical`` is a typical value of ``end``."""

    storage: Storage
    begin: Row
    end: Row
    typical: int


@dataclass(slots=True)
class _Sizes:
    """Sizes in bytes, rounded up, as rows of coefficients that are not negative.

    ``monomials`` are in symbols that count from their lower bounds; ``weights`` are typical values of them. What may be
    below zero for some sizes has no row.
    """

    monomials: tuple[sympy.Expr, ...]
    rows: Mapping[sympy.Expr, Row]
    weights: tuple[int, ...]
    typical: Mapping[sympy.Expr, int]
    back: Mapping[sympy.Symbol, sympy.Expr]

    @classmethod
    def of(cls, program: HostProgram, every: Sequence[Storage], align: int) -> _Sizes:
        symbols = program.table
        shifted = {s.symbol: s.symbol + s.lower for s in symbols.sizes if s.lower}
        back = {s.symbol: s.symbol - s.lower for s in symbols.sizes if s.lower}
        known = set(program.symbols)  # what data decide is not known when the arena is made
        distinct = dict.fromkeys(s.nbytes for s in every)
        typical = {e: symbols.hint(e) for e in distinct}
        aligned: dict[sympy.Expr, Polynomial] = {}
        for e in dict.fromkeys(s.nbytes for s in every if s.ours and s.by_address):
            moved = e.xreplace(shifted)
            if e.free_symbols <= known and _is_placeable(moved):
                aligned[e] = _aligned(moved, typical[e], align, lambda m: symbols.hint(m.xreplace(back)))
        monomials, rows = as_rows(aligned)
        weights = tuple(symbols.hint(m.xreplace(back)) for m in monomials)
        return cls(monomials, rows, weights, typical, back)

    def value(self, row: Row) -> int:
        """A typical value."""
        return sum(c * w for c, w in zip(row, self.weights, strict=True))

    def sum(self, row: Row) -> sympy.Expr:
        """The sum in the symbols of the graph."""
        return expression(row, [m.xreplace(self.back) for m in self.monomials])

    def placed(self, inside: Sequence[Storage]) -> tuple[Arena, int]:
        """An arena for these, and its typical size: the largest first, each at the least offset where it is provably
        apart from all that live with it."""
        nothing: Row = (0,) * len(self.monomials)
        found = _Neighbours()
        whole = nothing
        for storage in sorted(inside, key=lambda s: -self.typical[s.nbytes]):
            size = self.rows[storage.nbytes]
            begin = _least(size, nothing, found.of(storage))
            end = plus(begin, size)
            found.add(_Place(storage, begin, end, self.value(end)))
            whole = _upper(whole, end)
        sums: dict[Row, sympy.Expr] = {}
        offsets = {}
        for place in found.places:
            if place.begin not in sums:
                sums[place.begin] = self.sum(place.begin)
            offsets[place.storage.name] = sums[place.begin]
        first, last = min(s.begin for s in inside), max(s.end for s in inside)
        return Arena(inside[0].type.device, self.sum(whole), offsets, first, last), self.value(whole)


@dataclass(slots=True)
class _Neighbours:
    """Places by the time at which they are taken: ``places`` in the order of their first steps, ``begins`` those steps,
    and ``at`` what is held when a step begins."""

    places: list[_Place] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    at: dict[int, list[_Place]] = field(default_factory=dict)

    def add(self, place: _Place) -> None:
        begin, end = place.storage.begin, place.storage.end
        where = bisect_right(self.begins, begin)
        self.begins.insert(where, begin)
        self.places.insert(where, place)
        for step in range(begin, end + 1):
            self.at.setdefault(step, []).append(place)

    def of(self, storage: Storage) -> list[_Place]:
        """What is there at any time while something lives: when it begins, or later on."""
        first, last = (bisect_right(self.begins, at) for at in (storage.begin, storage.end))
        return [*self.at.get(storage.begin, ()), *self.places[first:last]]


def _least(size: Row, nothing: Row, others: Sequence[_Place]) -> Row:
    """The first offset behind nothing or behind one of the others where all of them are apart; else behind all."""
    top = nothing
    for other in others:
        top = _upper(top, other.end)
    ordered = sorted(others, key=lambda p: p.typical)
    tried: set[Row] = set()
    for k, begin in enumerate((nothing, *(p.end for p in ordered))):
        if begin in tried:
            continue
        tried.add(begin)
        end = plus(begin, size)
        # What ends next is most likely in the way, so it is asked first.
        if all(
            covers(other.begin, end) or covers(begin, other.end)
            for other in chain(islice(ordered, k, None), islice(ordered, k))
        ):
            return begin
    return top


def _upper(a: Row, b: Row) -> Row:
    """No less than either."""
    return tuple(map(max, a, b))


def _aligned(nbytes: sympy.Expr, typical: int, align: int, hint: Callable[[sympy.Expr], int]) -> Polynomial:
    """No less than a size for all sizes of its symbols, and a multiple of ``align``."""
    # Products of sizes are whole numbers, so that each term may be rounded by itself.
    rounded = {m: -(-c // align) * align for m, c in polynomial(nbytes).items()}
    if nbytes.is_Integer or sum(c * hint(m) for m, c in rounded.items()) <= WASTE * typical + align:
        return rounded
    return {FloorDiv(nbytes + (align - 1), sympy.Integer(align)): align}


def _is_placeable(nbytes: sympy.Expr) -> bool:
    return all(m.is_integer and c >= 0 and _is_never_negative(m) for m, c in polynomial(nbytes).items())


_MONOTONE = (sympy.Add, sympy.Mul, sympy.Max, sympy.Min, Max, Min, FloorDiv, CeilDiv, CleanDiv, ModularIndexing)


def _is_never_negative(expr: sympy.Expr) -> bool:
    """Whether a size is at least zero because all is that it is made of, where no symbol is below."""
    match expr:
        case sympy.Symbol():
            return True
        case sympy.Rational():
            return bool(expr >= 0)
        case sympy.Pow(args=(base, exponent)):
            return exponent.is_Integer and exponent > 0 and _is_never_negative(base)
    return isinstance(expr, _MONOTONE) and all(map(_is_never_negative, expr.args))


# --- the proof --------------------------------------------------------------------------------------------------------


def check_arena(program: HostProgram) -> None:
    """Prove that what lives at the same time in the arena of a program is apart, and inside of it, for all sizes.

    Raises: ArenaError, which names two tensors and their places.
    """
    arena = program.arena
    if arena is None:
        return
    lower = {s.symbol: s.symbol + s.lower for s in program.table.sizes if s.lower}
    inside = [s for s in storages(program) if s.name in arena.offsets]
    lost = set(arena.offsets) - {s.name for s in inside}
    if lost:
        raise ArenaError(f"{program.name}: {', '.join(sorted(lost))} have a place in the arena and are never allocated")
    for s in inside:
        begin = arena.offsets[s.name]
        if s.type.device != arena.device:
            raise ArenaError(f"{program.name}: {s.name} is on {s.type.device}, and the arena on {arena.device}")
        if not s.by_address:
            raise ArenaError(f"{program.name}: {s.name} is in the arena, but something wants it as a tensor")
        if not (arena.begin <= s.begin and s.end <= arena.end):
            raise ArenaError(f"{program.name}: {s.name} lives longer than the arena")
        if not (_proved(begin, lower) and _proved(arena.size - begin - s.nbytes, lower)):
            raise ArenaError(f"{program.name}: {s.name} of {s.nbytes} bytes at {begin} is not in {arena.size} bytes")
    living: list[Storage] = []
    for one in inside:
        living = [s for s in living if s.end >= one.begin]
        for other in living:
            a, b = (arena.offsets[s.name] for s in (one, other))
            if not (_proved(b - a - one.nbytes, lower) or _proved(a - b - other.nbytes, lower)):
                raise ArenaError(
                    f"{program.name}: {other.name} at {b} and {one.name} at {a} live at the same time, and "
                    f"{other.nbytes} and {one.nbytes} bytes from there share memory"
                )
        living.append(one)


def _proved(expr: sympy.Expr, lower: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether an expression is at least zero wherever its symbols are at their lower bounds or above."""
    shifted = sympy.expand(expr.xreplace(dict(lower)))  # in quotients as well, so that equal ones are one
    quotients = {d: sympy.Dummy(integer=True) for d in shifted.atoms(sympy.Function)}
    if not all(_is_never_negative(a) for d in quotients for a in d.args):
        return False
    value = shifted.xreplace(quotients)
    for quotient in sorted(quotients, key=sympy.count_ops, reverse=True):  # what others are made of comes behind them
        if isinstance(quotient, (FloorDiv, CleanDiv)) and not _is_never_negative(value):
            base, by = (a.xreplace(quotients) for a in quotient.args)
            factor = value.coeff(quotients[quotient])
            # What is rounded down is less by no more than the divisor less one.
            if factor.is_Integer and by.is_Integer:
                least = base - (by - 1) if factor > 0 and isinstance(quotient, FloorDiv) else base
                value = sympy.expand(value.xreplace({quotients[quotient]: least / by}))
    return _is_never_negative(value)
