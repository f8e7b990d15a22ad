"""What a lock file costs: CPU time of compiling with one that is written, and without, in turns.

``python -m benchmarks.tuning.lock_cost [--rounds 9] [--models gpt,resnet]`` prints, for each model, the median of both,
of their ratio, and of the share of the phase ``lock``, the latter two with the interval that holds them with 95 %
confidence; then the median and the worst of all models. ``--models golden`` are those whose lock files the tests hold,
``--models benchmarks`` (the default) the benchmarks'. Nothing is cached; the first round of each model is not counted.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.dynamo_backend.locking.lock_models import MODELS as GOLDEN
from torch_mlc.runtime.timing import process_times

from ..models.registry import MODELS
from ..models.spec import ModelSpec
from ..stats import median_interval

# Models by what ``--models`` calls all of them.
SETS = {"golden": tuple(GOLDEN), "benchmarks": tuple(MODELS)}


@dataclass(frozen=True, slots=True)
class LockCase:
    """``make`` gives a model and its inputs; with ``training`` its backward is compiled as well."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    training: bool = False
    dynamic: bool | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """Seconds of compiling a model: CPU time; then by the wall clock, in all and of those in the phase ``lock``."""

    cpu: float
    wall: float
    locking: float


def case_of(name: str) -> LockCase:
    """A model of either set. Raises KeyError."""
    if name in GOLDEN:
        return LockCase(GOLDEN[name].make, GOLDEN[name].training, GOLDEN[name].dynamic)
    return LockCase(partial(_tiny, MODELS[name]), MODELS[name].trains)


def _tiny(spec: ModelSpec) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return spec.build("tiny"), spec.inputs("tiny").args


def compiled(case: LockCase, lock: Path | None) -> Compiled:
    """What compiling a model takes, its first run with it."""
    torch._dynamo.reset()
    model, inputs = case.make()
    options: dict[str, object] = {"cache": False, "threads": 1}
    if lock is not None:
        options |= {"lock": str(lock), "lock_mode": "write"}
    gc.collect()
    gc.disable()  # torch copies graphs, which makes Python look through all objects: seconds, in one turn or the other
    before, begin, start = _in_lock(), time.process_time(), time.perf_counter()
    with torch.set_grad_enabled(case.training):
        results = torch.compile(model, backend="mlc", dynamic=case.dynamic, options=options)(*inputs)
        if case.training:
            leaves = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
            torch.autograd.backward([x.float().sum() for x in leaves if x.requires_grad])
    cpu, wall = time.process_time() - begin, time.perf_counter() - start
    gc.enable()
    return Compiled(cpu, wall, _in_lock() - before)


def _in_lock() -> float:
    return sum(s for phase, s in process_times.snapshot().items() if phase.endswith(": lock"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default="benchmarks", help="names with commas; golden and benchmarks are sets")
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    ratios, shares = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (n for part in given.models.split(",") for n in SETS.get(part, (part,))):
            case, rounds = case_of(name), []
            for turn in range(given.rounds + 1):
                files: list[Path | None] = [None, Path(folder, f"{name}{turn}.mlc.lock")]
                order = files if turn % 2 else files[::-1]
                taken = {file: compiled(case, file) for file in order}
                if turn:
                    rounds.append((taken[files[0]], taken[files[1]]))
            plain, locked = (median(r[k].cpu for r in rounds) for k in (0, 1))
            own = [b.cpu / a.cpu for a, b in rounds]
            lock = [100 * b.locking / b.wall for _, b in rounds]
            ratios[name], shares[name] = median(own), median(lock)
            told = "{:.3f} ({:.3f} to {:.3f})".format(ratios[name], *median_interval(own))
            part = "lock {:.1f} % ({:.1f} to {:.1f})".format(shares[name], *median_interval(lock))
            print(f"{name:24} {plain:6.3f} s  {locked:6.3f} s  {told}  {part}", flush=True)
    for what, found in (("ratio", ratios), ("lock %", shares)):
        worst = max(found, key=lambda name: found[name])
        print(f"{what}: median {median(found.values()):.3f}, worst {found[worst]:.3f} ({worst})")


if __name__ == "__main__":
    main()
