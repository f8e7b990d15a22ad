"""The results of the suites that compare schedules or compilers for a GPU that need not be here: rows by workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..steps import Progress, begun, read_json, same_run

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Form(Generic[R]):
    """How rows stand in the JSON: under ``rows``, each as ``write`` makes it, which ``read`` takes back."""

    schema: str
    version: int
    rows: str
    write: Callable[[R], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], R]


@dataclass(slots=True)
class TargetResults(Generic[R]):
    """A run over workloads. ``about`` is what it began with: target, size, other settings, versions."""

    form: Form[R]
    about: dict[str, Any]
    rows: list[R] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @property
    def target(self) -> str:
        return str(self.about["target"])

    @property
    def versions(self) -> Mapping[str, Any]:
        return dict(self.about["versions"])

    def to_json(self) -> dict[str, Any]:
        form = self.form
        return {
            "schema": form.schema, "version": form.version, **self.about,
            "complete": self.progress.complete, "done": self.progress.done, "failed": self.progress.failed,
            form.rows: [form.write(r) for r in self.rows],
        }  # fmt: skip


def begin(form: Form[R], **settings: Any) -> TargetResults[R]:
    """A run with nothing done; ``settings`` are those that one that goes on must have too."""
    return TargetResults(form, {**settings, **begun()})


def go_on(form: Form[R], path: Path, **settings: Any) -> tuple[TargetResults[R], list[str]]:
    """The run in a file, and the versions that have changed since. Raises ValueError where it is no such run."""
    body = read_json(path, form.schema, form.version)
    now = begun()
    changed = same_run(path, body, {**settings, "versions": now["versions"]})
    about = {**settings, **{name: body[name] for name in now}}
    progress = Progress(list(body.get("done", ())), dict(body["failed"]))
    return TargetResults(form, about, [form.read(r) for r in body[form.rows]], progress), changed
