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
from ...scheduler.tuning.database import GraphDecisions, Record, Told, Verdict
from ..compiling.tuning import DATABASE
from .near import Commands, program_name, tell
from .options import cache_folder_here
from .tune_files import export, import_measurements, verify
from .tuned import database_here, duration, forget_tuned, searched_here, speed, summary, tuned_here

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
    """The kernels that were tuned, with the fastest schedule of each, and the graphs whose decisions were searched."""
    tuned, searched = tuned_here(), searched_here()
    path = cache_folder_here() / DATABASE
    if as_json:
        rows = [
            {
                "workload": t.workload, "target": t.target, "measured": t.measured, "failed": t.failed, "date": t.date,
                "predicted": t.predicted, **_told(t.best),
            }
            for t in tuned
        ]  # fmt: skip
        graphs = [
            {"graph": graph, "target": target, "measured": len(sets), **_decided(_taken(sets))}
            for (graph, target), sets in searched.items()
        ]
        tell(json.dumps({"database": str(path), "tuned": rows, "searched": graphs}, indent=2))
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
    if searched:
        table = _table("graph", "target", "time", "speed", "taken", "tried", "by", "last")
        for (graph, target), sets in list(searched.items())[:limit]:
            taken = _taken(sets)
            table.add_row(
                graph[:SHORT],
                target,
                duration(taken.seconds) if taken and taken.seconds is not None else "",
                speed(taken.ratio) if taken else "",
                (str(taken.chosen) or "the default") if taken else "no search ended",
                str(len(sets)),
                _by(taken) if taken else "",
                max(s.date for s in sets)[:10],
            )
        _print(table)
        if len(searched) > limit:
            tell(f"… and {len(searched) - limit} more; --limit shows them")
    known = tuned or searched
    tell(f"{summary(tuned, len(searched))}, in {path}" if known else f"nothing was tuned: {path} has no measurement")


@tune.command()
@click.argument("name")
@click.option("--all", "everything", is_flag=True, help="Every measurement, not the first ones only.")
@click.option("--json", "as_json", is_flag=True, help="All of it, as JSON.")
def show(name: str, everything: bool, as_json: bool) -> None:
    """One kernel: its nest, and how each schedule did on each machine; or one graph: how each set of decisions did.
    NAME is the beginning of its name in `list`."""
    with database_here() as database:
        found = database.of_workload(name) if database is not None else []
    searched = searched_here(name)
    kernels, graphs = sorted({m.workload.key for m in found}), sorted({graph for graph, _ in searched})
    if not kernels and not graphs:
        raise click.ClickException(
            f"no kernel or graph {name!r} was tuned; `{program_name()} tune list` shows those that were"
        )
    if len(kernels) + len(graphs) > 1:
        several = ", ".join(key[:SHORT] for key in [*kernels, *graphs][:8])
        what = "kernels" if not graphs else "kernels and graphs"
        raise click.UsageError(f"{name!r} is the beginning of {len(kernels) + len(graphs)} {what}: {several}")
    if graphs:
        _show_graph(graphs[0], searched, everything, as_json)
        return
    if as_json:
        rows = [{"target": m.target, "predicted": m.predicted, **_told(m.record), **_raced(m.record)} for m in found]
        tell(json.dumps({"workload": kernels[0], "nest": found[0].workload.text, "measurements": rows}, indent=2))
        return
    tell(kernels[0])
    tell(found[0].workload.text.rstrip() or "(the text of its nest is not known)")
    for (target, predicted), group in groupby(found, key=lambda m: (m.target, m.predicted)):
        measured = list(group)
        tell(f"\non {target}: {counted(len(measured), 'prediction' if predicted else 'measurement')}")
        _show(measured if everything else measured[:_SHOWN])
        if len(measured) > _SHOWN and not everything:
            tell(f"… and {len(measured) - _SHOWN} more; --all shows them")


def _show_graph(
    graph: str, searched: dict[tuple[str, str], list[GraphDecisions]], everything: bool, as_json: bool
) -> None:
    if as_json:
        rows = [{"target": target, **_decided(found)} for (_, target), sets in searched.items() for found in sets]
        tell(json.dumps({"graph": graph, "measurements": rows}, indent=2))
        return
    tell(graph)
    for (_, target), sets in searched.items():
        tell(f"\non {target}: {counted(len(sets), 'measurement')}")
        table = _table("time", "speed", "noise", "samples", "verdict", "date", "decisions")
        for found in sets if everything else sets[:_SHOWN]:
            table.add_row(
                duration(found.seconds) if found.seconds is not None else "",
                speed(found.ratio),
                f"{found.sigma:.1%}" if found.sigma is not None else "",
                str(found.count),
                found.verdict.value,
                found.date[:10],
                found.error.partition("\n")[0][:60] or str(found.chosen) or "the default",
            )
        _print(table)
        if len(sets) > _SHOWN and not everything:
            tell(f"… and {len(sets) - _SHOWN} more; --all shows them")


def _taken(sets: list[GraphDecisions]) -> GraphDecisions | None:
    """What the last search of a graph ended with, if one has ended."""
    return sets[0] if sets[0].verdict is Verdict.ACCEPTED else None


def _decided(found: GraphDecisions | None) -> dict[str, Any]:
    if found is None:
        return {"decisions": None}
    rest = asdict(found)
    kept = ("seconds", "ratio", "count", "sigma", "error", "versions", "date")
    told = {"decisions": found.chosen.plain(), "verdict": found.verdict.value, "provenance": found.provenance.value}
    return told | {name: rest[name] for name in kept}


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


def _by(best: Record | GraphDecisions | None) -> str:
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
