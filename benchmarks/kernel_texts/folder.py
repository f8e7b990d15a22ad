"""The texts of a commit as files: one for each text, in a folder for each workload, target and mode."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..machine import describe_machine, describe_versions
from ..models.spec import Size

SCHEMA, VERSION = "torch-mlc-kernel-texts", 1
INDEX = "corpus.json"


class FolderError(ValueError):
    """A folder that texts cannot be written to, or that has none."""


@dataclass(slots=True)
class Index:
    """What a folder holds: the cases whose names contain one of ``patterns``, all without.

    ``cases``: names by folder. ``made_by``: what texts depend on beside the code.
    """

    size: Size
    made_by: Mapping[str, str | None]
    patterns: tuple[str, ...] = ()
    cases: dict[str, str] = field(default_factory=dict)

    def write(self, root: Path) -> None:
        """The last file that is written: a folder without it is not whole."""
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        (root / INDEX).write_text(json.dumps(body, indent=1) + "\n")


def made_here() -> dict[str, str | None]:
    """What texts depend on beside the code: versions, and the processor that CPU kernels are for."""
    versions = {k: v for k, v in describe_versions().items() if k != "torch-mlc"}
    return {**versions, "processor": str(describe_machine("cpu")["processor"])}


def new_folder(root: Path) -> None:
    """Raises: FolderError where there is something already."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise FolderError(f"{root} is not an empty folder: name another, or remove it")
    root.mkdir(parents=True, exist_ok=True)


def write_texts(root: Path, texts: Mapping[str, str]) -> None:
    """Write texts by place."""
    for place, text in texts.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def read_index(root: Path) -> Index:
    """Raises: FolderError where nothing was written, or not all, or by another version of this."""
    try:
        body = json.loads((root / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"{root} holds no texts, or they were not all written: {error}") from error
    if (body.get("schema"), body.get("version")) != (SCHEMA, VERSION):
        raise FolderError(f"{root / INDEX} is {body.get('schema')} {body.get('version')}, not {SCHEMA} {VERSION}")
    return Index(body["size"], body["made_by"], tuple(body["patterns"]), body["cases"])


def read_texts(root: Path, folder: str) -> dict[str, str]:
    """The texts of one case by place."""
    names = sorted(os.listdir(root / folder)) if (root / folder).is_dir() else []
    return {f"{folder}/{n}": (root / folder / n).read_bytes().decode() for n in names}
