"""What all suites share of keeping results: a file is replaced after each step, and a later run goes on with it."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from .machine import describe_versions


@dataclass(slots=True)
class Progress:
    """How far a run has come. ``done`` are the names of its steps that have results, ``failed`` those that raised, and
    why; ``complete`` is false until all steps were tried."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    complete: bool = False


Keep: TypeAlias = Callable[[], None]


class Kept(Protocol):
    """The results of a run."""

    @property
    def progress(self) -> Progress: ...

    def to_json(self) -> dict[str, Any]: ...


def run_steps(
    results: Kept, steps: Mapping[str, Callable[[Keep], object]], path: Path, before: Callable[[str], object]
) -> None:
    """Run the steps that have no results yet, each told to ``before``, and write the results after each of them; a
    long step may do so in between.

    A step that raises has its error in the results, and does not stop the others; a later run tries it again.
    """
    progress = results.progress
    progress.complete = False

    def keep() -> None:
        write_json(path, results.to_json())

    for name, step in steps.items():
        before(name)
        if name in progress.done:
            continue
        progress.failed.pop(name, None)
        try:
            step(keep)
            progress.done.append(name)
        except Exception as error:  # one step must not hide the others
            progress.failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        keep()
    progress.complete = True
    keep()


def begun() -> dict[str, Any]:
    """What a file of results says of the run that began it: the command, when, and the versions."""
    return {
        "command": told_command("benchmarks"),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": dict(describe_versions()),
    }


def told_command(module: str) -> list[str]:
    """The command of this process, ``python -m module``, as results tell it: without folders of this machine."""
    return ["python", "-m", module, *(without_folders(a) for a in sys.argv[1:])]


def without_folders(argument: str) -> str:
    """An argument that is, or gives behind ``=``, an absolute path, with ``…`` in place of its folders."""
    return re.sub(r"(^|=)/(?:.*/)?", r"\1…/", argument)


def stamp(created: str) -> str:
    """A time in UTC as names of files have it."""
    return created.replace(":", "").replace("+0000", "Z")


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Replace a file by a JSON. Numbers that JSON has not become the strings "nan", "inf" and "-inf"."""
    replace_text(path, json.dumps(_finite(body), indent=1, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file, or make it: whoever reads it, also after a stop, finds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def read_json(path: Path, schema: str, version: int) -> dict[str, Any]:
    """The results in a file. Raises ValueError where it holds none of this schema and version."""
    try:
        return checked(json.loads(path.read_text()), schema, version)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def checked(body: Any, schema: str, version: int) -> dict[str, Any]:
    """Results of this schema and version. Raises ValueError where they are others."""
    if not isinstance(body, dict) or body.get("schema") != schema:
        raise ValueError(f"not such a report: the field 'schema' is not {schema!r}")
    if body.get("version") != version:
        raise ValueError(f"report version {body.get('version')}; this program reads version {version}")
    return body


def same_run(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Settings of a run that goes on must be those that it began with. Raises ValueError where one is not; the
    versions that are others are returned."""
    for name, value in here.items():
        if name != "versions" and there.get(name) != value:
            raise ValueError(f"{path} was made with {name} {there.get(name)}, this run has {value}")
    before, now = there.get("versions", {}), here.get("versions", {})
    return [f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]


def newest(folder: Path, pattern: str) -> Path | None:
    """The file that was begun last of those whose names have the time at their end."""
    found = sorted(folder.glob(pattern))
    return found[-1] if found else None


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _finite(v) for key, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
        case _:
            return value
