"""What a lock file costs: CPU time of compiling with one that is written, and without, in turns.

``python -m benchmarks.tuning.lock_cost [--rounds 9] [--models gpt,resnet]`` prints, for each model, the median of both,
of their ratio, and of the share of the phase ``lock``, with the interval that holds it with 95 % confidence. Nothing is
cached; the first round of each model is not counted.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from torch_mlc.runtime.timing import process_times

from ..models.registry import MODELS
from ..stats import median_interval


def compile_seconds(name: str, lock: Path | None, training: bool) -> tuple[float, float]:
    """CPU seconds of compiling a tiny model, and those of the phase ``lock``."""
    spec = MODELS[name]
    torch._dynamo.reset()
    model, inputs = spec.build("tiny"), spec.inputs("tiny").args
    options: dict[str, object] = {"cache": False, "threads": 1}
    if lock is not None:
        options |= {"lock": str(lock), "lock_mode": "write"}
    gc.collect()
    gc.disable()  # torch copies graphs, which makes Python look through all objects: seconds, in one turn or the other
    before, begin = _in_lock(), time.process_time()
    with torch.set_grad_enabled(training):
        results = torch.compile(model, backend="mlc", options=options)(*inputs)
        if training:
            leaves = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
            torch.autograd.backward([x.float().sum() for x in leaves if x.requires_grad])
    seconds = time.process_time() - begin
    gc.enable()
    return seconds, _in_lock() - before


def _in_lock() -> float:
    return sum(s for phase, s in process_times.snapshot().items() if phase.endswith(": lock"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models.split(","):
            training = MODELS[name].trains
            pairs = []
            for turn in range(given.rounds + 1):
                file = Path(folder, f"{name}{turn}.mlc.lock")
                plain = compile_seconds(name, None, training)[0]
                locked, inside = compile_seconds(name, file, training)
                if turn:
                    pairs.append((plain, locked, inside))
            ratio = median(b / a for a, b, _ in pairs)
            ratios.append(ratio)
            plain, locked = median(p[0] for p in pairs), median(p[1] for p in pairs)
            shares = [100 * p[2] / p[1] for p in pairs]
            low, high = median_interval(shares)
            told = f"lock {median(shares):.1f} % ({low:.1f} to {high:.1f})"
            print(f"{name:24} {plain:6.2f} s  {locked:6.2f} s  {ratio:.3f}  {told}", flush=True)
    print(f"median of all {median(ratios):.3f}")


if __name__ == "__main__":
    main()
