"""`torch-mlc tune show|list|export|import|verify|train|clear`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ...runtime.plain_text import counted
from ...scheduler.schedule.overrides import SHORT
from ...scheduler.tuning.database import Record, Told
from ..compiling.tuning import DATABASE
from .near import Commands, program_name, tell
from .options import cache_folder_here
from .tune_files import export, import_measurements, verify
from .tuned import database_here, duration, forget_tuned, speed, summary, tuned_here

# Measurements of one kernel on one target that `show` prints.
_SHOWN = 12
_TRAINING = "torch_mlc.runtime.tuning.train"


@click.group(cls=Commands)
def tune() -> None:
    """What tuning has measured (MLC_TUNE=1, or mode="max-autotune"): look at it, share it, clear it.

    The best schedule of a kernel that was measured is used by every later compilation, tuned or not, until it is
    cleared. What was predicted for a GPU that is not here is used by later tuning for it alone."""


for command in (export, import_measurements, verify):
    tune.add_command(command)


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
                "workload": t.workload, "target": t.target, "measured": t.measured, "failed": t.failed, "date": t.date,
                "predicted": t.predicted, **_told(t.best),
            }
            for t in tuned
        ]  # fmt: skip
        tell(json.dumps({"database": str(path), "tuned": rows}, indent=2))
        return
    if tuned:
        table = _table("workload", "target", "fastest", "speed", "rule", "tried", "by", "last")
        for t in tuned[:limit]:
            best = t.best
            none = "all failed" if t.failed == t.measured else "the default"
            table.add_row(
                t.workload[:SHORT],
                t.target,
                duration(best.seconds) if best else none,
                speed(best.ratio) if best else "",
                best.trace.rule if best else "",
                str(t.measured),
                "prediction" if t.predicted else _by(best),
                t.date[:10],
            )
        _print(table)
        if len(tuned) > limit:
            tell(f"… and {len(tuned) - limit} more; --limit shows them")
    tell(f"{summary(tuned)}, in {path}" if tuned else f"nothing was tuned: {path} has no measurement")


@tune.command()
@click.argument("workload")
@click.option("--all", "everything", is_flag=True, help="Every measurement, not the first ones only.")
@click.option("--json", "as_json", is_flag=True, help="All of it, as JSON.")
def show(workload: str, everything: bool, as_json: bool) -> None:
    """One kernel: its nest, and how each schedule did on each machine. WORKLOAD is the beginning of its name in
    `list`."""
    with database_here() as database:
        found = database.of_workload(workload) if database is not None else []
    keys = sorted({m.workload.key for m in found})
    if not keys:
        raise click.ClickException(
            f"no kernel {workload!r} was tuned; `{program_name()} tune list` shows those that were"
        )
    if len(keys) > 1:
        several = ", ".join(key[:SHORT] for key in keys[:8])
        raise click.UsageError(f"{workload!r} is the beginning of {len(keys)} kernels: {several}")
    if as_json:
        rows = [{"target": m.target, "predicted": m.predicted, **_told(m.record), **_raced(m.record)} for m in found]
        tell(json.dumps({"workload": keys[0], "nest": found[0].workload.text, "measurements": rows}, indent=2))
        return
    tell(keys[0])
    tell(found[0].workload.text.rstrip() or "(the text of its nest is not known)")
    for (target, predicted), group in groupby(found, key=lambda m: (m.target, m.predicted)):
        measured = list(group)
        tell(f"\non {target}: {counted(len(measured), 'prediction' if predicted else 'measurement')}")
        _show(measured if everything else measured[:_SHOWN])
        if len(measured) > _SHOWN and not everything:
            tell(f"… and {len(measured) - _SHOWN} more; --all shows them")


def _show(measured: list[Told]) -> None:
    table = _table("time", "speed", "noise", "samples", "verdict", "rule", "session", "date", "schedule")
    for m in measured:
        r = m.record
        table.add_row(
            duration(r.seconds) if r.verdict.has_time else "",
            speed(r.ratio),
            f"{r.sigma:.1%}" if r.sigma is not None else "",
            str(r.count),
            r.verdict.value,
            r.trace.rule,
            r.session[:8],
            r.date[:10],
            r.error.partition("\n")[0][:60] or "; ".join(map(str, r.trace.steps))[:60],
        )
    _print(table)


def _told(best: Record | None) -> dict[str, Any]:
    return {
        "seconds": best.seconds if best and best.verdict.has_time else None,
        "ratio": best.ratio if best else None,
        "verdict": best.verdict.value if best else None,
        "rule": best.trace.rule if best else None,
        "schedule": list(map(str, best.trace.steps)) if best else None,
    }


def _raced(record: Record) -> dict[str, Any]:
    rest = asdict(record)
    kept = ("count", "sigma", "code_hash", "against", "error", "versions", "session", "date")
    return {name: rest[name] for name in kept} | {"provenance": record.provenance.value}


def _by(best: Record | None) -> str:
    return "measuring" if best is None or best.provenance.value == "own" else best.provenance.value


def _table(*headings: str) -> Table:
    table = Table(caption_justify="left")
    right = ("fastest", "time", "speed", "noise", "samples", "tried")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    return table


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@tune.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def train(arguments: tuple[str, ...]) -> None:
    """Train the cost model anew, from what was measured here (--help tells how)."""
    if find_spec(_TRAINING) is None:
        raise click.ClickException("this version of torch-mlc cannot train")
    if find_spec("lightgbm") is None:
        raise click.ClickException("training needs LightGBM, which is not installed: pip install 'torch-mlc[tune]'")
    code = import_module(_TRAINING).main([*arguments], database=cache_folder_here() / DATABASE)
    click.get_current_context().exit(code or 0)


@tune.command("clear")
def clear_tuned() -> None:
    """Forget every measurement: kernels have their default schedules again, once they are compiled anew."""
    tell(forget_tuned())
    tell(f"kernels in the cache keep their schedules until `{program_name()} cache clear`")
