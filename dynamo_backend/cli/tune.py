"""`torch-mlc tune list|export|clear`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ...runtime.cache.fingerprint import environment_fingerprint
from ...scheduler.error import DatabaseWarning
from ...scheduler.schedule.overrides import SHORT
from ...scheduler.tuning.database import Database, Tuned
from ..compiling.tuning import DATABASE
from .near import Commands, program_name, tell
from .options import cache_folder_here


@contextmanager
def database_here(*, predicted: bool = False) -> Iterator[Database | None]:
    """The tuning database beside the cache, or what it knows of predictions; None where there is none, which this does
    not make."""
    path = cache_folder_here() / DATABASE
    if not path.exists():
        yield None
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", DatabaseWarning)
        with Database(path, environment_fingerprint(), predicted=predicted) as database:
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


def counted(number: int, what: str, many: str = "") -> str:
    """A number of things: "1 kernel", "2 kernels"."""
    return f"{number} {what if number == 1 else many or what + 's'}"


def summary(tuned: list[Tuned]) -> str:
    """How much there is: "3 tuned kernels, 40 measurements"."""
    measured, predicted = (sum(t.measured for t in tuned if t.predicted == which) for which in (False, True))
    parts = [counted(len(tuned), "tuned kernel")]
    parts += [counted(measured, "measurement")] if measured or not predicted else []
    parts += [counted(predicted, "prediction")] if predicted else []
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Three digits in a unit that fits: 0.0000123 is "12.3 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


@click.group(cls=Commands)
def tune() -> None:
    """List, export or clear what tuning has measured (MLC_TUNE=1, or mode="max-autotune").

    The fastest schedule of a kernel that was measured is used by every later compilation, tuned or not, until it is
    cleared. What was predicted for a GPU that is not here is used by later tuning for it alone."""


@tune.command("list")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Rows at most.")
@click.option("--json", "as_json", is_flag=True, help="All of it, as JSON.")
def list_tuned(limit: int, as_json: bool) -> None:
    """The kernels that were tuned, with the fastest schedule of each."""
    tuned = tuned_here()
    path = cache_folder_here() / DATABASE
    if as_json:
        rows = [
            {
                "workload": t.workload, "target": t.target, "measured": t.measured, "date": t.date,
                "predicted": t.predicted,
                "seconds": t.best.seconds if t.best else None, "rule": t.best.trace.rule if t.best else None,
                "schedule": list(map(str, t.best.trace.steps)) if t.best else None,
            }
            for t in tuned
        ]  # fmt: skip
        tell(json.dumps({"database": str(path), "tuned": rows}, indent=2))
        return
    if tuned:
        table = Table(caption_justify="left")
        for heading in ("workload", "target", "fastest", "rule", "tried", "by", "last"):
            table.add_column(heading, justify="right" if heading in ("fastest", "tried") else "left", no_wrap=True)
        for t in tuned[:limit]:
            fastest, rule = (duration(t.best.seconds), t.best.trace.rule) if t.best else ("all failed", "")
            table.add_row(
                t.workload[:SHORT],
                t.target,
                fastest,
                rule,
                str(t.measured),
                "prediction" if t.predicted else "measuring",
                t.date[:10],
            )
        Console(width=None if sys.stdout.isatty() else 200).print(table)
        if len(tuned) > limit:
            tell(f"… and {len(tuned) - limit} more; --limit shows them")
    tell(f"{summary(tuned)}, in {path}" if tuned else f"nothing was tuned: {path} has no measurement")


@tune.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--target", help="The machine, as `list` shows it; needed where there are several.")
def export(file: Path, target: str | None) -> None:
    """Write the fastest schedules to FILE (.json), for torch.compile(options={"schedules": FILE})."""
    if file.suffix != ".json":
        raise click.BadParameter(f"{file}: the name of a file of schedules ends in .json", param_hint="FILE")
    tuned = [t for t in tuned_here() if t.best is not None]
    targets = sorted({t.target for t in tuned})
    if target is None and len(targets) > 1:
        raise click.UsageError(f"kernels were tuned on several machines; choose one by --target: {', '.join(targets)}")
    if target is not None and target not in targets:
        raise click.BadParameter(f"nothing was tuned on {target!r}; there are {', '.join(targets) or 'none'}")
    # What was measured is written over what was predicted of the same kernel.
    tuned.sort(key=lambda t: not t.predicted)
    chosen = {t.workload: json.loads(t.best.trace.to_json()) for t in tuned if t.best and target in (None, t.target)}
    if not chosen:
        raise click.ClickException(f"nothing was tuned: {cache_folder_here() / DATABASE} has no measurement")
    try:
        file.write_text(json.dumps(chosen, indent=1) + "\n")
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from error
    tell(f"wrote {counted(len(chosen), 'schedule')} to {file}")


@tune.command("clear")
def clear_tuned() -> None:
    """Forget every measurement: kernels have their default schedules again, once they are compiled anew."""
    tell(forget_tuned())
    tell(f"kernels in the cache keep their schedules until `{program_name()} cache clear`")


def forget_tuned() -> str:
    """Clear the database, and say what it held."""
    tuned = tuned_here()
    if not tuned:
        return "there were no tuning results to remove"
    for predicted in (False, True):
        with database_here(predicted=predicted) as database:
            if database is not None:
                database.clear()
    return f"removed {summary(tuned)}, from {cache_folder_here() / DATABASE}"
