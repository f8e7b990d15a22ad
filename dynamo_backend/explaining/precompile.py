"""Kernels compiled for a GPU that is not here, into a cache folder that the machine with the GPU reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...runtime.compile.kernels import kernel_store_of
from ...runtime.settings.options import Options
from ..compiling.compiled import CompiledGraph
from .compiled_model import asked_of
from .compiled_run import run_and_compile


@dataclass(frozen=True, slots=True)
class Precompiled:
    """What a call's kernels became: how many are in the folder, and why some are not."""

    kept: int
    errors: tuple[str, ...]


def precompile(
    model: Callable[..., Any],
    *inputs: Any,
    target: str,
    folder: Path,
    training: bool = False,
    dynamic: bool | None = None,
) -> Precompiled:
    """Compile what ``model(*inputs)`` runs for a ``target`` ("cuda:sm_90"), and keep its kernels in a cache ``folder``.

    A process with that folder as its cache and the same MLC_TARGET finds them, where Python (3.x), torch (its public
    version), sympy, Triton and torch-mlc are the same. Graphs are traced anew there: what they launch depends on more
    than kernels do. No other setting of the environment counts, and nothing is launched.
    Raises: OptionError for a target that there is none of.
    """
    options = replace(Options.resolve(None, {"target": target, "cache_dir": str(folder)}, {}), strict=False)
    made = run_and_compile(asked_of(model).call, inputs, {}, options, dynamic, training)
    store, errors, kept = kernel_store_of(options), [], 0
    for compiled in (g for c in made.graphs for g in _with_bodies(c)):
        assert compiled.stages is not None, "graphs are compiled with all stages kept"
        for name, build in compiled.stages.kernels.items():
            if build.code is None:
                errors.append(f"{name}: {build.error}")
                continue
            store.keep(build.code, f"{name} for {build.target}")
            kept += 1
    return Precompiled(kept, tuple(errors))


def _with_bodies(compiled: CompiledGraph) -> Iterator[CompiledGraph]:
    """A graph, and the bodies of its control flow."""
    yield compiled
    for region in compiled.regions:
        yield from _with_bodies(region)
