"""`torch-mlc tune export|import|verify`: measurements that machines share."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ...runtime.plain_text import counted
from ...runtime.tuning.locations import SUFFIX, LocationError, read_files, write_lines
from ...scheduler.tuning.database import Database
from ...scheduler.tuning.database.verify import Verified
from ..compiling.tuning import DATABASE
from .near import tell
from .options import cache_folder_here
from .tuned import database_here, tuned_here

# Schedules between two signs of life, where somebody watches.
_PROGRESS = 50


@click.command()
@click.argument("place")
@click.option("--target", help="The machine, as `list` shows it; needed for a .json where there are several.")
@click.option("--since", default="", help="Only what was measured at that date (2026-12-31) or later.")
def export(place: str, target: str | None, since: str) -> None:
    """Write what was measured to PLACE, for others.

    A file that ends in .jsonl is appended to; of a folder, which ends in /, a new file is made; both may be anywhere
    that fsspec reaches (s3://bucket/folder/). `tune import` reads them. A file that ends in .json gets the fastest
    schedules alone, for torch.compile(options={"schedules": FILE})."""
    if place.endswith(".json"):
        if since:
            raise click.UsageError("--since is for measurements, not for a file of schedules (.json)")
        _export_schedules(Path(place), target)
        return
    if not place.endswith((SUFFIX, "/")) and not Path(place).is_dir():
        told = f"a file of schedules ends in .json, one of measurements in {SUFFIX}, and a folder in /"
        raise click.BadParameter(f"{place}: the name of {told}", param_hint="PLACE")
    with database_here() as database:
        if database is None or not database.holds(target, since):
            raise click.ClickException(_nothing(target, since))
        try:
            file, count = write_lines(place, database.exported(target, since))
        except LocationError as error:
            raise click.ClickException(str(error)) from error
    tell(f"wrote {counted(count, 'line')} to {file}")


def _nothing(target: str | None = None, since: str = "") -> str:
    of = (f" on {target}" if target else "") + (f" since {since}" if since else "")
    return f"nothing was tuned{of}: {cache_folder_here() / DATABASE} has no measurement"


def _export_schedules(file: Path, target: str | None) -> None:
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
        raise click.ClickException(_nothing())
    try:
        file.write_text(json.dumps(chosen, indent=1) + "\n")
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from error
    tell(f"wrote {counted(len(chosen), 'schedule')} to {file}")


@click.command("import")
@click.argument("places", nargs=-1, required=True)
def import_measurements(places: tuple[str, ...]) -> None:
    """Take the measurements of PLACES, which `export` wrote on other machines: files, folders, patterns ("*.jsonl"),
    anything that fsspec reaches, or other databases (.sqlite).

    What was measured here ranks above them. What is here already is not taken twice."""
    with database_here(make=True) as database:
        assert database is not None
        try:
            found = database.take(read_files(places))
        except LocationError as error:
            raise click.ClickException(str(error)) from error
    for fault in found.faults:
        click.echo(f"left out: {fault}", err=True)
    if found.left_out > len(found.faults):
        click.echo(f"left out: {found.left_out - len(found.faults)} lines more", err=True)
    known = f", {found.known} known already" if found.known else ""
    tell(f"took {counted(found.added, 'measurement')}{known}, into {cache_folder_here() / DATABASE}")
    if found.left_out and not found.added + found.known:
        raise click.ClickException("none of the lines is a measurement")


@click.command()
@click.argument("places", nargs=-1)
@click.option("--forget", is_flag=True, help="Remove from the database what does not replay.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def verify(places: tuple[str, ...], forget: bool, as_json: bool) -> None:
    """Replay every schedule on the text of its kernel, and name those that are not legal there.

    Of the database, or of PLACES (as for `import`) before they are imported. Compilation checks schedules all the same
    when it uses them, so that none makes a wrong kernel. It is an error if there is one."""
    if places and forget:
        raise click.UsageError("--forget is for the database, not for files")
    if places:
        with tempfile.TemporaryDirectory() as folder, Database(Path(folder) / DATABASE) as other:
            try:
                taken = other.take(read_files(places))
            except LocationError as error:
                raise click.ClickException(str(error)) from error
            for fault in taken.faults:
                click.echo(f"left out: {fault}", err=True)
            found = other.verify(_progress)
    else:
        with database_here() as database:
            found = Verified() if database is None else database.verify(_progress, forget=forget)
    _tell(found, as_json, forget)
    if found.faults:
        click.get_current_context().exit(1)


def _progress(seen: int) -> None:
    if sys.stderr.isatty() and seen % _PROGRESS == 0:
        click.echo(f"\r{seen} schedules", nl=False, err=True)


def _tell(found: Verified, as_json: bool, forget: bool) -> None:
    if as_json:
        faults: list[dict[str, Any]] = [
            {"workload": f.workload, "targets": f.targets.split(","), "rule": f.rule, "reason": f.reason}
            for f in found.faults
        ]
        tell(json.dumps({"replayed": found.replayed, "unknown": found.unknown, "faults": faults}, indent=2))
        return
    for f in found.faults:
        what = f"a schedule of {f.rule or 'no rule'}" if f.trace_hash else "the text"
        tell(f"{f.workload[:12]} on {f.targets}: {what} is refused: {f.reason}")
    refused = "removed" if forget else "refused"
    unknown = f", {found.unknown} cannot be judged (no text of their kernels is known)" if found.unknown else ""
    tell(f"{counted(found.replayed, 'schedule')} replayed, {len(found.faults)} {refused}{unknown}")
