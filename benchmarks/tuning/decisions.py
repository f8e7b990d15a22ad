"""Decisions that were searched beside those by cost: ``python -m benchmarks.tuning.decisions [NAMES] [--budget 60]``.

Each graph is tuned in a process of its own, its decisions alone. Then a fresh process races both programs again, by the
decisions that the database has of it and by none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROUNDS = 60


def _norm_head(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w) @ p


def _gated(x: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    return (F.silu(x @ g) * (x @ u)) @ d


def _statistics(x: Tensor) -> tuple[Tensor, ...]:
    return x.mean(0), x.var(0), x.amax(1), x.softmax(-1).sum(0)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.125, -1) @ v


def _block(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # In evaluation torch has one op for all of it.
    return nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True).train()


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1),
        nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).eval()  # fmt: skip


def _mixer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)).eval()


def _recommender() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(1000, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).eval()


def _loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, y)


def _n(*shape: int) -> Tensor:
    return torch.randn(*shape)


# By name: a function or module, and its inputs.
GRAPHS: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[Tensor, ...]]]] = {
    "softmax of long rows": (lambda: lambda x: torch.softmax(x, -1), lambda: (_n(16, 20000),)),
    "layer norm of long rows": (lambda: lambda x: F.layer_norm(x, (x.shape[-1],)), lambda: (_n(8, 16384),)),
    "rms norm and product": (lambda: _norm_head, lambda: (_n(4, 512), _n(512), _n(512, 512))),
    "gated product": (lambda: _gated, lambda: (_n(8, 256), _n(256, 512), _n(256, 512), _n(512, 256))),
    "statistics": (lambda: _statistics, lambda: (_n(256, 1024),)),
    "attention": (lambda: _attend, lambda: (_n(4, 128, 64), _n(4, 128, 64), _n(4, 128, 64))),
    "wide attention": (lambda: _attend, lambda: (_n(2, 768, 128), _n(2, 768, 128), _n(2, 768, 128))),
    "transformer layer": (_block, lambda: (_n(4, 32, 64),)),
    "convolutions": (_convolutions, lambda: (_n(4, 3, 32, 32),)),
    "mixer": (_mixer, lambda: (_n(64, 128),)),
    "recommender": (_recommender, lambda: (torch.randint(0, 1000, (64, 20)),)),
    "loss": (lambda: _loss, lambda: (_n(64, 128), _n(128, 1000), torch.randint(0, 1000, (64,)))),
    "small products": (lambda: lambda a, b, c: torch.relu(a @ b) @ c, lambda: (_n(8, 32), _n(32, 32), _n(32, 8))),
}  # fmt: skip


def _compiled(name: str, folder: str, **options: object) -> tuple[Any, tuple[Tensor, ...]]:
    torch.set_num_threads(1)
    make, inputs = GRAPHS[name]
    torch.manual_seed(1)
    given = inputs()
    torch._dynamo.reset()
    fn = torch.compile(make(), backend="mlc", options={"cache_dir": folder, **options})
    with torch.no_grad():
        fn(*given)
    return fn, given


def searched(name: str, folder: str, budget: float) -> dict[str, Any]:
    """Tune a graph's decisions, its kernels not at all."""
    from torch_mlc.dynamo_backend.searching import search

    found: list[Any] = []
    close = search.GraphSearch.close

    def told(of: search.GraphSearch) -> None:
        close(of)
        found.append(of)

    search.GraphSearch.close = told  # type: ignore[method-assign]
    search.DECISIONS_SHARE, search.WHOLE_SHARE = 0.98, 0.02
    _compiled(name, folder, tune=1, tune_budget=budget)
    (of,) = found
    if of.found is None:
        return {"why": of.why}
    return {
        "looked_at": of.found.looked_at, "raced": len(of.found.trials), "left": of.found.unraced,
        "speedup": of.found.speedup, "sigma": of.found.sigma, "chosen": of.found.chosen.plain(),
        "trials": [(t.told, t.found.speedup if t.found else None, t.verdict.value if t.verdict else "", t.reason)
                   for t in of.found.trials],
    }  # fmt: skip


def raced(name: str, folder: str, chosen: dict[str, str]) -> dict[str, Any]:
    """Both programs again, in this process, call by call in turns."""
    from torch_mlc.runtime.tuning.measure import ProcessorClock
    from torch_mlc.scheduler.tuning.race import Race

    with tempfile.TemporaryDirectory() as empty:
        ways = [_compiled(name, f"{empty}/{k}", decisions=d) for k, d in enumerate(({}, {}, chosen))]

        def run_of(fn: Any, given: tuple[Tensor, ...]) -> Callable[[], None]:
            def run() -> None:
                with torch.no_grad():
                    fn(*given)

            return run

        runs = {k: run_of(*way) for k, way in enumerate(ways)}
        for run in runs.values():
            for _ in range(100):  # host programs become machine code
                run()
        race, clock = Race(0, 1), ProcessorClock()
        for k in range(ROUNDS // 6):
            race.add(clock.samples(runs, 6, 6 * k))
    found = race.estimate(2)
    return {"speedup": found.speedup, "low": 1 / found.high, "high": 1 / found.low, "sigma": race.sigma}


def _child(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", __spec__.name, *words], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"why": done.stderr[-300:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    """Search, and race again what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--search", nargs=2)
    parser.add_argument("--race", nargs=3)
    asked = parser.parse_args()
    if asked.search:
        print(json.dumps(searched(*asked.search, asked.budget)))
        return
    if asked.race:
        name, folder, chosen = asked.race
        print(json.dumps(raced(name, folder, json.loads(chosen))))
        return
    ratios = []
    for name in asked.names or GRAPHS:
        with tempfile.TemporaryDirectory() as folder:
            found = _child("--budget", str(asked.budget), "--search", name, folder)
            again = _child("--race", name, folder, json.dumps(found["chosen"])) if found.get("chosen") else {}
        row = {"graph": name, "load": os.getloadavg()[0], **found, "again": again}
        print(json.dumps(row), flush=True)
        if found.get("raced"):
            ratios.append(again.get("speedup", 1.0))
    if ratios:
        mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
        print(f"{len(ratios)} graphs with something to decide: {mean:.3f}x, least {min(ratios):.3f}x", flush=True)


if __name__ == "__main__":
    main()
