"""The suite ``tuning``: record what schedules take, replay strategies on it, and measure winners again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .machine import describe_machine
from .steps import begun, stamp, write_json

SCHEMA, VERSION = "torch-mlc-tuning-replay", 1
Option = Callable[[Callable[..., Any]], Callable[..., Any]]
_FOLDER = click.Path(file_okay=False, path_type=Path)
OPTIONS: Sequence[Option] = (
    click.option("--record", type=_FOLDER, help="Of tuning: measure schedules of many nests into this folder."),
    click.option("--replay", type=_FOLDER, help="Of tuning: strategies on what a folder holds, without noise."),
    click.option("--live", type=_FOLDER, help="Of tuning: a folder's winners again, in --repeat fresh processes."),
    click.option(
        "--ship",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Of tuning --live: write the winners that every process confirmed here, as lines of a tuning database.",
    ),
    click.option("--candidates", type=click.IntRange(min=8), default=96, help="Of tuning: schedules of a nest."),
    click.option("--strategy", default="random,evolution,tpe,beam,ours,ranked", help="Of tuning: to be replayed."),
    click.option("--seeds", type=click.IntRange(min=1), default=20, help="Of tuning: searches by each strategy."),
    click.option("--holdout", type=click.Choice(("kernel", "family")), default="kernel", help="Of tuning."),
)


def tuning_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of this suite to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def run_tuning(
    given: dict[str, Any],
    target: str,
    repeat: int,
    out: Path,
    plot: bool,
    choose: Callable[[list[str]], list[str]],
    console: Console,
    told: Callable[[str, int, int], object],
) -> None:
    """Do what one of --record, --replay and --live asks for; exit with 1 where something failed."""
    ways = [w for w in ("record", "replay", "live") if given[w] is not None]
    if len(ways) != 1:
        raise click.UsageError("tuning takes one of --record, --replay and --live, with a folder")
    if importlib.util.find_spec("torch_mlc") is None:
        raise click.UsageError("tuning is about torch_mlc: pip install torch-mlc")
    folder: Path = given[ways[0]]
    if ways == ["record"]:
        _record(folder, target, given["candidates"], choose, console, told)
        return
    reading = importlib.import_module("torch_mlc.runtime.tuning.records")
    kind = "cpu" if target == "cpu" else "gpu"
    try:
        records = [r for r in reading.read_folder(folder) if r.head.kind == kind]
    except reading.RecordsError as error:
        raise click.UsageError(str(error)) from error
    names = choose([r.head.kernel for r in records])
    records = [r for r in records if r.head.kernel in names]
    if ways == ["live"]:
        _live(records, repeat, out, given["ship"], console, told)
    else:
        _replay(records, given, out, plot, console, told)


def _record(
    folder: Path,
    target: str,
    candidates: int,
    choose: Callable[[list[str]], list[str]],
    console: Console,
    told: Callable[[str, int, int], object],
) -> None:
    recording = importlib.import_module(f"{__package__}.tuning.record")
    failed = recording.record(folder, target, candidates, choose, told)
    for name, error in failed.items():
        console.print(f"not recorded: {name}: {error}", style="bold red", markup=False)
    console.print(f"wrote {folder}", soft_wrap=True)
    if failed:
        sys.exit(1)


def _replay(
    records: Sequence[Any],
    given: dict[str, Any],
    out: Path,
    plot: bool,
    console: Console,
    told: Callable[[str, int, int], object],
) -> None:
    for module in ("lightgbm", "optuna") if "tpe" in given["strategy"] else ("lightgbm",):
        if importlib.util.find_spec(module) is None:
            raise click.UsageError(f"--replay needs {module}: pip install 'torch-mlc[bench]'")
    replaying = importlib.import_module(f"{__package__}.tuning.replay")
    training = importlib.import_module("torch_mlc.runtime.tuning.train")
    strategies = given["strategy"].split(",")
    if unknown := [s for s in strategies if s not in replaying.STRATEGIES]:
        known = ", ".join(replaying.STRATEGIES)
        raise click.BadParameter(f"{unknown[0]!r}; the strategies are {known}", param_hint="--strategy")
    try:
        result = replaying.replay(records, strategies, given["seeds"], given["holdout"], told)
    except training.TrainingError as error:
        raise click.UsageError(str(error)) from error
    console.print(training.described(result.report), markup=False, highlight=False)
    console.print(_table(result, replaying.TOLD))
    about = begun()
    path = out / f"tuning_{result.report.kind}_{stamp(about['created'])}.json"
    figures = {of: {f: asdict(v) for f, v in forms.items()} for of, forms in result.report.figures.items()}
    body = {
        "schema": SCHEMA, "version": VERSION, **about, "machine": describe_machine("cpu"), "seeds": given["seeds"],
        "holdout": given["holdout"], "nests": list(result.kernels), "gap": result.report.gap,
        "noise": result.report.noise, "rows": result.report.rows, "models": figures,
        "chosen": dict(result.report.chosen), "strategies": result.to_json(),
    }  # fmt: skip
    write_json(path, body)
    console.print(f"wrote {path}", soft_wrap=True)
    if plot:
        importlib.import_module(f"{__package__}.tuning.plot").write_curves(result, path.with_suffix(".png"))
        console.print(f"wrote {path.with_suffix('.png')}", soft_wrap=True)


def _table(result: Any, told: Sequence[int]) -> Table:
    table = Table(title=f"{len(result.kernels)} nests: the best so far over the best recorded, after n trials")
    table.add_column("strategy")
    table.add_column("trials to within 2 %", justify="right")
    for n in told:
        table.add_column(f"n={n}", justify="right")
    for name in result.curves:
        median, low, high = result.near(name)
        cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*result.regret(name, n)) for n in told]
        table.add_row(name, f"{median:g} [{low:g}, {high:g}]", *cells)
    return table


def _live(
    records: Sequence[Any],
    repeat: int,
    out: Path,
    ship: Path | None,
    console: Console,
    told: Callable[[str, int, int], object],
) -> None:
    measuring = importlib.import_module(f"{__package__}.tuning.live")
    winners = measuring.live(records, repeat, told)
    table = Table(title=f"recorded winners over their defaults, again in {repeat} fresh processes")
    for column in ("kernel", "recorded", "again", "flips", "schedule"):
        table.add_column(column)
    for w in winners:
        again = ", ".join(f"{s:.2f}" for s in w.again) or w.error
        table.add_row(w.kernel, f"{w.recorded:.2f}", again, str(w.flips), w.draft)
    console.print(table)
    told_all = measuring.summary(winners)
    console.print(", ".join(f"{k} {v:.3g}" for k, v in told_all.items()))
    about = begun()
    path = out / f"tuning_live_{stamp(about['created'])}.json"
    kernels = [asdict(replace(w, record=None)) for w in winners]
    body = {"schema": "torch-mlc-tuning-live", "version": 1, **about, **told_all, "machine": describe_machine("cpu")}
    write_json(path, {**body, "kernels": kernels})
    console.print(f"wrote {path}", soft_wrap=True)
    if ship is not None:
        ship.write_text("".join(f"{line}\n" for line in measuring.shipped_lines(winners)))
        console.print(f"wrote {ship}", soft_wrap=True)
    if any(w.error for w in winners):
        sys.exit(1)
