"""The tuning database as commands see it: what is in it, and how that is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ...runtime.plain_text import counted
from ...runtime.tuning.machine import tuning_database
from ...scheduler.error import DatabaseWarning
from ...scheduler.tuning.database import Database, GraphDecisions, Tuned
from ..compiling.tuning import DATABASE
from .options import cache_folder_here


@contextmanager
def database_here(*, predicted: bool = False, make: bool = False) -> Iterator[Database | None]:
    """The tuning database beside the cache, or what it knows of predictions; None where there is none, unless it is to
    be made."""
    path = cache_folder_here() / DATABASE
    if not make and not path.exists():
        yield None
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", DatabaseWarning)
        with tuning_database(path, predicted=predicted) as database:
            yield database
    for warning in found:
        raise click.ClickException(str(warning.message))


def tuned_here() -> list[Tuned]:
    """Every kernel that was tuned, by workload and target: what was measured, then what was predicted."""
    found = []
    for predicted in (False, True):
        with database_here(predicted=predicted) as database:
            found += database.tuned() if database is not None else []
    return found


def searched_here(graph: str | None = None) -> dict[tuple[str, str], list[GraphDecisions]]:
    """The graphs whose decisions were searched (those whose names begin so), with what was measured of each on each
    target, what the last search ended with first."""
    with database_here() as database:
        rows = database.searched(graph) if database is not None else []
    found: dict[tuple[str, str], list[GraphDecisions]] = {}
    for key, target, decisions in rows:
        found.setdefault((key, target), []).append(decisions)
    return found


def summary(tuned: list[Tuned], searched: int = 0) -> str:
    """How much there is: "3 tuned kernels, 40 measurements, 2 searched graphs"."""
    measured, predicted = (sum(t.measured for t in tuned if t.predicted == which) for which in (False, True))
    parts = [counted(len(tuned), "tuned kernel")]
    parts += [counted(measured, "measurement")] if measured or not predicted else []
    parts += [counted(predicted, "prediction")] if predicted else []
    parts += [counted(searched, "searched graph")] if searched else []
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Three digits in a unit that fits: 0.0000123 is "12.3 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def speed(ratio: float | None) -> str:
    """How many times the default's speed a ratio of times is; "" where no race was run."""
    return f"{1 / ratio:.2f}x" if ratio else ""


def forget_tuned() -> str:
    """Clear the database, and say what it held."""
    tuned, searched = tuned_here(), searched_here()
    if not tuned and not searched:
        return "there were no tuning results to remove"
    for predicted in (False, True):
        with database_here(predicted=predicted) as database:
            if database is not None:
                database.clear()
    return f"removed {summary(tuned, len(searched))}, from {cache_folder_here() / DATABASE}"
