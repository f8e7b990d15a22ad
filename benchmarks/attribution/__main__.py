"""How much of the difference between compiled models and eager the named places explain.

``python -m benchmarks.attribution --size tiny --dtype bfloat16`` measures every benchmark model and prints a table;
``--out FILE`` keeps everything as JSON, ``--training`` takes gradients of the loss too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import torch_mlc
from benchmarks.models.registry import MODELS, get_model

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
    found = []
    print("| model | difference | explained | not attributed | left with `numerics()` | largest | programs |")
    print("|---|---|---|---|---|---|---|")
    for name in given.models:
        if given.training and not get_model(name).trains:
            continue
        found.append(measured(name, given.size, given.dtype, given.budget, given.training, given.against))
        print(row(found[-1]), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps({"load": os.getloadavg(), "models": found}, indent=1))


if __name__ == "__main__":
    main()
