"""sample_perfect_tile and sample_categorical: decisions that a search may draw again."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sympy import factorint

from ....ir.nest.loops import LoopNest
from ...error import ScheduleError
from ..analysis.tree import find_loop

Choice = int | float | str


def sample_perfect_tile(
    nest: LoopNest, loop: str, n: int, max_innermost: int, generator: Random, decision: Sequence[int | None] | None
) -> list[int | None]:
    """Draw ``n`` factors of a loop's extent, outermost first, for a split without a tail; the innermost is at most
    ``max_innermost``.

    Rewrites::

        a, b = s.sample_perfect_tile("i", 2)     ->     for i_0 in range(a):
        s.split("i", [a, b])                                for i_1 in range(b):      # a * b is the extent

    Of an extent that is no number only the part that is known to divide it is shared out, and the first factor is
    None, which split infers. The trace keeps the decision and who uses it: it replays exactly, and
    ``trace.with_decision`` is another schedule of the same design.

    Requires: a given ``decision`` is such a list of factors.
    Raises: ScheduleError.    Source: TVM ``Schedule.sample_perfect_tile``.
    """
    asked = f"sample_perfect_tile({loop}, {n}, {max_innermost})"
    node, _ = find_loop(nest, loop, asked)
    if n < 1 or max_innermost < 1:
        raise ScheduleError(asked, "there must be a factor, and room for one", nest, loop)
    is_known = bool(node.extent.is_Integer)
    whole = int(node.extent) if is_known else nest.symbols.divisor(node.extent)
    if is_known and whole < 1:
        raise ScheduleError(asked, f"extent {whole} has no factors", nest, loop)
    if is_known and n == 1 and whole > max_innermost:
        raise ScheduleError(asked, f"the one factor {whole} is more than {max_innermost}", nest, loop)
    if decision is None:
        return _drawn(whole, n, max_innermost, is_known, generator)
    numbers = [int(f) for f in decision if f is not None]
    fits = len(decision) == n and all(f >= 1 for f in numbers) and (not numbers or numbers[-1] <= max_innermost)
    product = 1
    for f in numbers:
        product *= f
    if is_known:
        fits = fits and None not in decision and product == whole
    else:
        fits = fits and decision[0] is None and None not in decision[1:] and whole % product == 0
    if not fits:
        raise ScheduleError(asked, f"{list(decision)} are not {n} factors of extent {node.extent}", nest, loop)
    return [None if f is None else int(f) for f in decision]


def _drawn(whole: int, n: int, most: int, is_known: bool, generator: Random) -> list[int | None]:
    """Prime factors dealt out one by one; of a divisor only, the first place takes what is left over."""
    factors = [1] * n
    primes = [p for p, count in factorint(whole).items() for _ in range(count)] if whole > 1 else []
    generator.shuffle(primes)
    for p in primes:
        places = [k for k in range(n) if k < n - 1 or factors[k] * p <= most]
        # One place is left where n is 1 and the factor too large; then the first place is no number anyway.
        factors[generator.choice(places or [0])] *= p
    return [*factors] if is_known else [None, *factors[1:]]


def sample_categorical(
    nest: LoopNest, choices: Sequence[Choice], weights: Sequence[float] | None, generator: Random, decision: int | None
) -> int:
    """Draw one of several values, as likely as their weights say (alike where none are given).

    Rewrites::

        u = s.sample_categorical([2, 4, 8])     ->     for i in unrolled(u):
        s.unroll(s.split("i", [None, u])[1])

    Values are numbers or texts. The trace keeps the decision, which is the place among the choices, and who uses it.

    Requires: a weight for each choice, none negative and not all zero; a given ``decision`` is a place among them.
    Raises: ScheduleError.    Source: TVM ``Schedule.sample_categorical``.
    """
    asked = f"sample_categorical({list(choices)})"
    if not choices or any(isinstance(c, bool) or not isinstance(c, Choice) for c in choices):
        raise ScheduleError(asked, "the choices must be numbers or texts, and at least one", nest)
    given = [1.0] * len(choices) if weights is None else [float(w) for w in weights]
    if len(given) != len(choices) or not all(w >= 0 for w in given) or not 0 < sum(given) < float("inf"):
        raise ScheduleError(asked, f"{given} are no weights of {len(choices)} choices", nest)
    if decision is None:
        return generator.choices(range(len(choices)), given)[0]
    if not 0 <= decision < len(choices):
        raise ScheduleError(asked, f"{decision} is no place among {len(choices)} choices", nest)
    return int(decision)
