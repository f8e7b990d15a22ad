"""What `python -m benchmarks --suite campaign` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.text import Text

from torch_mlc.ir.target import TargetError
from torch_mlc.runtime.targets import named_target, target_for

from ..machine import describe_machine, describe_versions
from ..models.spec import Size
from ..steps import stamp, told_command
from .plan import STAGES, Minutes, PlannedStage, Settings, fill_plan, plan
from .record import LOST, NOT_DONE, OK, WRONG, Record, Row
from .run import now, print_campaign, run_campaign, write_results

INTERRUPTED = 130
_STYLES = {OK: "green", WRONG: "bold red", LOST: "bold red", NOT_DONE: "yellow"}


def campaign(
    minutes: Minutes,
    size: Size | None,
    target: str,
    only: Sequence[str],
    resume: Path | None,
    cache: Path | None,
    fill: bool,
    out: Path,
    console: Console,
) -> int:
    """Run a campaign, or go on with that of ``resume``; with ``fill`` compile what one launches into ``cache``.
    The status for the shell: 1 where something was wrong or lost."""
    began = time.monotonic()
    if fill and cache is None:
        raise click.UsageError("--fill needs the folder that is to be filled: --cache FOLDER")
    settings = settings_here(minutes, size or ("full" if fill else None), target, cache)
    if resume is not None:
        settings, record = _resumed(resume, console)
    else:
        record = _begun(settings, out)
    planned = fill_plan(settings) if fill else plan(settings)
    stages = [s for s in planned if fill or not only or s.name in only]
    console.print(f"rows: {record.path}", soft_wrap=True)
    try:
        run_campaign(settings, stages, record, _teller(console), _announcer(console))
        status = 1 if record.failures else 0
    except KeyboardInterrupt:
        console.print(Text("interrupted; --resume goes on from here", "bold yellow"))
        status = INTERRUPTED
    print_campaign(record, stages, console)
    console.print(f"wrote {write_results(record, began)}", soft_wrap=True)
    return status


def settings_here(minutes: Minutes, size: Size | None, target: str, cache: Path | None) -> Settings:
    """The settings of a campaign on this machine: where it has a GPU, that is the target. Raises click.BadParameter for
    a target that there is no code for."""
    gpu = torch.cuda.is_available()
    try:
        target = str(target_for("cuda")) if gpu else target
        named_target(target)
    except TargetError as error:
        raise click.BadParameter(str(error), param_hint="--target") from error
    folder = "" if cache is None else str(cache.absolute())
    return Settings(gpu, "cuda" if gpu else "cpu", target, size or ("full" if gpu else "tiny"), minutes, folder)


def _begun(settings: Settings, out: Path) -> Record:
    created = now()
    name = torch.cuda.get_device_name(0) if settings.gpu else f"no GPU, {settings.target}"
    about = {
        "suite": "campaign", "device_name": name, "created": created,
        "command": told_command("benchmarks"), "settings": settings.to_json(),
        "machine": describe_machine(settings.device), "versions": describe_versions(),
    }  # fmt: skip
    stem = f"campaign_{settings.device}_{stamp(created)}"
    for k in range(100):
        try:
            return Record.begin(out / f"{stem}{f'_{k}' if k else ''}.jsonl", about)
        except FileExistsError:
            continue
    raise click.ClickException(f"{out} has a hundred records of this second")


def _resumed(path: Path, console: Console) -> tuple[Settings, Record]:
    try:
        record = Record.resume(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    settings = Settings(**record.about["settings"])
    here = torch.cuda.is_available()
    if settings.gpu != here:
        raise click.ClickException(f"{path} was begun {'with' if settings.gpu else 'without'} a GPU, and here is "
                                   f"{'one' if here else 'none'}")  # fmt: skip
    if (versions := describe_versions()) != record.about["versions"]:
        console.print(Text(f"versions are others than at the beginning: {versions}", "yellow"))
    return settings, record


def _announcer(console: Console) -> Callable[[PlannedStage, int], None]:
    def begin(stage: PlannedStage, left: int) -> None:
        console.print(Text.assemble((stage.name, "bold"), f": {left} of {len(stage.checks)} checks"))

    return begin


def _teller(console: Console) -> Callable[[PlannedStage, str, Row], None]:
    def tell(stage: PlannedStage, check: str, row: Row) -> None:
        status = row["status"]
        if status != OK:
            why = " ".join(str(row.get("why") or row.get("faults") or "").split())[:200]
            console.print(Text.assemble("  ", (status, _STYLES[status]), f" {check}: {why}"), soft_wrap=True)

    return tell


__all__ = ["STAGES", "campaign"]
