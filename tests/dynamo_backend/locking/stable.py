"""A hundred models compiled under lock files in a folder: what two processes write is to be the same.

``python -m tests.dynamo_backend.locking.stable FOLDER [--only WORD]`` writes them, and says which could not be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.registry import MODELS as BENCHMARKS
from tests.dynamo_backend.architectures import ARCHITECTURES, Architecture
from tests.dynamo_backend.locking.lock_models import MODELS
from tests.fuzz.generate import make_program
from tests.fuzz.run import function_of, inputs_of

# Models of all kinds, and random programs that make it up to so many.
COUNT = 100
Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """``make`` gives a model and its inputs, the same each time; with ``training`` its backward runs as well."""

    make: Callable[[], Made]
    training: bool = False
    dynamic: bool | None = None


def cases() -> dict[str, Case]:
    """By name, a hundred of them."""
    found = {f"small {name}": Case(m.make, m.training, m.dynamic) for name, m in MODELS.items()}
    for name, spec in BENCHMARKS.items():
        found[f"benchmark {name}"] = Case(partial(_benchmark, spec), training=spec.trains)
    for name, architecture in ARCHITECTURES.items():
        for training in (False, True):
            found[f"architecture {name}{' training' * training}"] = Case(partial(_architecture, architecture), training)
    for seed in range(COUNT - len(found)):
        program = make_program(seed)
        found[f"program {seed}"] = Case(partial(_program, seed), dynamic=program.dynamic)
    return found


def _benchmark(spec: Any) -> Made:
    return spec.build("tiny"), spec.inputs("tiny").args


def _architecture(architecture: Architecture) -> Made:
    return architecture.build(), architecture.inputs(architecture.sizes[0])


def _program(seed: int) -> Made:
    program = make_program(seed)
    return function_of(program, compiled=True), tuple(inputs_of(program, program.sizes[0]))


def write(name: str, case: Case, path: Path) -> str:
    """Write the lock file of a model; what went wrong, "" for nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    call, inputs = case.make()
    options = {"lock": str(path), "lock_mode": "write"}
    try:
        with torch.set_grad_enabled(case.training or name.startswith("program")):
            results = torch.compile(call, backend="mlc", dynamic=case.dynamic, options=options)(*inputs)
        if case.training:
            leaves = torch.utils._pytree.tree_leaves(results)
            sum(x.sum() for x in leaves if isinstance(x, Tensor) and x.requires_grad).backward()  # type: ignore[union-attr]
    except Exception as error:  # a program that fails is one that writes nothing
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "" if path.exists() else "no graph"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="models whose name has this word")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        if given.only in name:
            path = given.folder / f"{name.replace(' ', '_')}.lock"
            wrong = write(name, case, path)
            print(f"{name}: {wrong or 'written'}", flush=True)


if __name__ == "__main__":
    main()
