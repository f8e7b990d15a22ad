"""The suites over workloads that are compiled for a GPU, which need not be here: static, defaults, predicted,
attention, slots."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from .models.spec import Size
from .steps import Keep, run_steps, stamp

TARGET_SUITES = ("static", "defaults", "predicted", "attention", "slots")


def run_target(
    suite: str,
    size: Size,
    target: str,
    tries: int,
    select: Callable[[list[str]], list[str]],
    out: Path,
    resume: Path | None,
    console: Console,
    before: Callable[[str, list[str]], None],
) -> None:
    """Run a suite over the workloads that ``select`` chooses, print and write it; exit with 1 where something failed,
    or where a gate of the suite stops it.

    Every other suite also runs where torch_mlc is not installed.
    """
    if importlib.util.find_spec("torch_mlc") is None or importlib.util.find_spec("triton") is None:
        raise click.UsageError(f"{suite} compiles with torch_mlc for a GPU: pip install torch-mlc triton")
    module = importlib.import_module(f"{__package__}.static.suites")
    of = module.SUITES[suite]
    names = select(list(of.workloads))
    settings: dict[str, Any] = {"target": target, "size": size} | ({"tries": tries} if suite == "defaults" else {})
    try:
        of.check(target)
    except module.TargetError as error:
        raise click.BadParameter(str(error), param_hint="--target") from error
    if resume is None:
        results = of.begin(**settings)
        parts = "_".join(t.partition(":")[2].replace("_", "") for t in target.split(","))
        stem = f"{suite}_{parts}_{stamp(results.about['created'])}"
        path = out / f"{stem}.json"
    else:
        path = resume
        try:
            results, changed = of.resume(path, **settings)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--resume") from error
        tell_changed(changed, console)

    def step(name: str, keep: Keep) -> None:
        of.compare(results, name, keep)

    steps = {name: partial(step, name) for name in names}
    run_steps(results, steps, path, lambda name: before(name, names))
    of.show(results, console)
    console.print(f"wrote {path}", soft_wrap=True)
    if results.progress.failed or of.missed(results):
        sys.exit(1)


def tell_changed(changed: list[str], console: Console) -> None:
    """Versions that are others than when a run began."""
    if changed:
        console.print(f"versions are others than at the beginning: {'; '.join(changed)}", style="yellow")
