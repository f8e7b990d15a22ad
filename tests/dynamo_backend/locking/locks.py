"""What the tests of lock files share: models compiled under one, as torch.compile and as explain do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from torch_mlc.dynamo_backend.entry.backend import settings_of
from torch_mlc.dynamo_backend.explaining.compiled_run import CompiledRun, run_and_compile
from torch_mlc.dynamo_backend.locking.lock_text import LockError, LockText


def compiled(call: Callable[..., Any], path: Path, mode: str, **options: object) -> Callable[..., Any]:
    """``torch.compile`` under a lock file, as in a new process."""
    torch._dynamo.reset()
    given = {"lock": str(path), "lock_mode": mode, "strict": True, **options}
    return torch.compile(call, backend="mlc", options=given)


def run_locked(call: Callable[..., Any], inputs: tuple[Any, ...], path: Path, mode: str, **options: object) -> Any:
    """What the compiled model gives; an error of the lock file is raised as it is."""
    try:
        return compiled(call, path, mode, **options)(*inputs)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, LockError):
            assert str(error.inner_exception) in str(error), "torch shows another text than ours"
            raise error.inner_exception from None
        raise


def explained(
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    path: Path,
    mode: str = "write",
    *,
    training: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, object] | None = None,
) -> CompiledRun:
    """The graphs of a model, compiled for no machine in particular and with no cache."""
    torch._dynamo.reset()
    settings = settings_of(None, {"lock": str(path), "lock_mode": mode, "strict": True, **(options or {})})
    return run_and_compile(call, inputs, {}, settings, dynamic, training)


def sections(path: Path) -> dict[str, list[str]]:
    """The content of each section by its name."""
    return {name: s.content for name, s in LockText.parse(path.read_text(), path).sections.items()}


def edited(path: Path, before: str, after: str) -> None:
    """Write a lock file with something else in it."""
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
