"""How much of the difference between compiled models and eager the named places explain.

``python -m benchmarks.attribution --size tiny --dtype bfloat16`` measures every benchmark model and prints a table;
``--training`` takes gradients of the loss too. ``--out FILE`` keeps everything as JSON, replaced after each model. Of a
file that is there already, with the same settings, models that it has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_mlc
from benchmarks.machine import describe_machine
from benchmarks.models.registry import MODELS, get_model
from benchmarks.static.results import Form, TargetResults, begin, go_on
from benchmarks.steps import Keep, run_steps, told_command

FORM: Form[dict[str, Any]] = Form("torch-mlc-attribution", 1, "models", dict, dict)
HEAD = (
    "| model | difference | explained | not attributed | left with `numerics()` | largest | programs |\n"
    "|---|---|---|---|---|---|---|"
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def measured(name: str, size: str, dtype: str, budget: int, training: bool, against: str) -> dict[str, Any]:
    """One model: what ``torch_mlc.attribute`` gives, with seconds of the processor."""
    spec = get_model(name)
    model = spec.build(size, seed=0).to(DTYPES[dtype]).train(training)  # type: ignore[arg-type]
    inputs = spec.inputs(size, dtype=DTYPES[dtype])  # type: ignore[arg-type]
    loss = (lambda result: spec.loss(result, inputs)) if training else False
    torch._dynamo.reset()
    began = time.process_time()
    with torch.set_grad_enabled(training):
        made = torch_mlc.attribute(model, *inputs.args, budget=budget, backward=loss, against=against)
    return {
        **json.loads(made.to_json()),
        "model": name,
        "text": made.show(),
        "cpu_seconds": time.process_time() - began,
    }


def row(found: dict[str, Any]) -> str:
    """A row of the table."""
    whole, first = found["whole"], next(iter(found["rows"]), None)
    kept = found["kept"]
    if first is None:
        return f"| `{found['model']}` | none | | | | | {found['programs']} |"
    place = first["places"][0].partition(" in ")[0].replace("aten.", "")
    return (
        f"| `{found['model']}` | {whole['relative']:.2g} ({whole['ulp']:.2g} ulp) | {100 * found['explained']:.1f} % | "
        f"{100 * found['rest']:.1f} % | {100 * kept:.1f} % | {first['kind']}: {place}, {100 * first['share']:.0f} % | "
        f"{found['programs']} |"
    )


def results_in(path: Path | None, **settings: Any) -> TargetResults[dict[str, Any]]:
    """The results that a file has, or none yet. Raises ValueError where the file is of other settings."""
    if path is not None and path.exists():
        results, changed = go_on(FORM, path, target="cpu", **settings)
        if changed:
            print(f"{path} was begun with other versions: {', '.join(changed)}", file=sys.stderr)
        return results
    results = begin(FORM, target="cpu", **settings)
    results.about |= {"command": told_command("benchmarks.attribution")}
    results.about |= {"machine": describe_machine("cpu")}
    return results


def measure_all(results: TargetResults[dict[str, Any]], path: Path | None, steps: dict[str, Callable[[], Any]]) -> bool:
    """Measure the models that the results do not have, and print a row of each; whether all could be."""

    def step(measure: Callable[[], Any], keep: Keep) -> None:
        results.rows.append({**measure(), "load": os.getloadavg()})
        print(row(results.rows[-1]), flush=True)

    print(HEAD)
    for found in results.rows:
        print(row(found), flush=True)
    with_keep = {name: partial(step, measure) for name, measure in steps.items()}
    with tempfile.TemporaryDirectory() as folder:
        run_steps(results, with_keep, path or Path(folder) / "results.json", lambda name: None)
    for name, why in results.progress.failed.items():
        print(f"{name}: {why}", file=sys.stderr)
    return not results.progress.failed


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--size", default="tiny", choices=("tiny", "small", "full"))
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--against", default="eager", choices=("eager", "float64"))
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings = {n: getattr(given, n) for n in ("size", "dtype", "budget", "training", "against")}
    names = [n for n in given.models if not given.training or get_model(n).trains]
    results = results_in(given.out, **settings)
    if not measure_all(results, given.out, {n: partial(measured, n, **settings) for n in names}):
        sys.exit(1)


if __name__ == "__main__":
    main()
