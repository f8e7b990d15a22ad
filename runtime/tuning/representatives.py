"""Sizes that stand for the range of a symbolic nest, and what a candidate is worth over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.expr.symbols import Size
from ...ir.nest.loops import LoopNest

# How far from the typical value sizes are tried, below and above, and what parameters may take at most, in bytes.
BELOW, ABOVE, MOST_BYTES = 8, 4, 256 << 20


def representatives(nest: LoopNest) -> list[LoopNest]:
    """The nest with other typical sizes, itself first; it alone where no size is a symbol.

    Beside the typical sizes: small ones, large ones, and odd ones between, as far as bounds and divisors admit them and
    parameters do not become huge. Sizes are of all symbols at once, so that there are four at most.
    """
    found = [nest]
    for pick in (_small, _odd, _large):
        sizes = tuple(replace(s, hint=pick(s)) for s in nest.symbols.sizes)
        other = replace(nest, symbols=replace(nest.symbols, sizes=sizes))
        known = [[s.hint for s in n.symbols.sizes] for n in found]
        if [s.hint for s in sizes] not in known and _bytes(other) <= max(MOST_BYTES, _bytes(nest)):
            found.append(other)
    return found


def _typical(size: Size) -> int:
    return size.hint if size.hint is not None else max(64, size.lower)


def _small(size: Size) -> int:
    return _within(size, _typical(size) // BELOW)


def _large(size: Size) -> int:
    return _within(size, _typical(size) * ABOVE)


def _odd(size: Size) -> int:
    """A size that no tile divides, where the divisor admits one."""
    return _within(size, _typical(size) * 5 // 8 | 1)


def _within(size: Size, wanted: int) -> int:
    """The size nearest to what is wanted, by bounds and divisor."""
    step = max(size.divisor, 1)
    least = -(-max(size.lower, 1) // step) * step
    most = wanted if size.upper is None else min(wanted, size.upper)
    return max(most // step * step, least)


def _bytes(nest: LoopNest) -> int:
    return sum(nest.symbols.hint(b.numel) * b.dtype.itemsize for b in nest.params)


def worst(samples: Mapping[int, Sequence[Sequence[float]]], default: int) -> dict[int, list[float]]:
    """One time a round of samples by size, for each candidate: the default's at the first size, times the worst of the
    candidate's ratios to the default over all sizes. What is faster by it is faster at every size."""
    if all(len(sizes) == 1 for sizes in samples.values()):
        return {number: [*sizes[0]] for number, sizes in samples.items()}
    count = min(len(of_size) for sizes in samples.values() for of_size in sizes)
    found: dict[int, list[float]] = {}
    for number, sizes in samples.items():
        ratios = [
            max(mine[k] / max(its[k], 1e-12) for mine, its in zip(sizes, samples[default], strict=True))
            for k in range(count)
        ]
        found[number] = [r * samples[default][0][k] for k, r in enumerate(ratios)]
    return found
