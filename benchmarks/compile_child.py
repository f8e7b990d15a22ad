"""One first call in a fresh process: ``python -m benchmarks.compile_child`` writes where its seconds went as JSON.

The parent (run_compile) decides by environment variables whether the caches are empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from pathlib import Path

import click
import torch
from torch._dynamo.utils import compilation_time_metrics

from .models.registry import get_model
from .peers import Peer, added
from .run_models import MODES, TRAINING, infer, trainer

# What a backend's compiler of one graph is called in torch's own table of compile times. Inductor's entry is there
# already; torch_mlc enters its own with `torch._dynamo.utils.dynamo_timed("mlc_compile_graph")`.
BACKEND_ENTRY = {"inductor": "compile_fx_inner", "mlc": "mlc_compile_graph"}


def seconds_of(entry: str) -> float:
    """Seconds so far under an entry of torch's table of compile times."""
    return sum(compilation_time_metrics.get(entry, ()))


def own_phases(peer: str) -> dict[str, float]:
    """The backend's own phases: ``torch_mlc.runtime.timing.process_seconds() -> dict[str, float]`` where it exists."""
    if peer != "mlc" or importlib.util.find_spec("torch_mlc") is None:
        return {}
    totals = getattr(importlib.import_module("torch_mlc.runtime.timing"), "process_seconds", None)
    return dict(totals()) if totals is not None else {}


@click.command()
@click.option("--model", "name", required=True)
@click.option("--size", default="small")
@click.option("--layers", type=int, required=True)
@click.option("--peer", "peer_name", required=True)
@click.option("--mode", type=click.Choice(MODES), required=True)
@click.option("--device", default="cpu")
@click.option("--dynamic", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(name: str, size: str, layers: int, peer_name: str, mode: str, device: str, dynamic: bool, out: Path) -> None:
    """Time one first call; a training step includes the backward."""
    spec, peer = get_model(name), Peer(peer_name)
    model = spec.build(size, layers=layers).to(device).train(mode == TRAINING)  # type: ignore[arg-type]
    inputs = spec.inputs(size, device)  # type: ignore[arg-type]
    function = peer.compile(trainer(spec) if mode == TRAINING else infer, dynamic)
    entry = BACKEND_ENTRY.get(peer_name, "")
    before, start = peer.counts(), time.perf_counter()
    with torch.set_grad_enabled(mode == TRAINING):
        result = function(model, inputs)
    forward_backend = seconds_of(entry)
    if mode == TRAINING:
        result.backward()
    if device != "cpu":
        torch.cuda.synchronize()
    total = time.perf_counter() - start
    frame, user = seconds_of("_compile.compile_inner"), seconds_of("OutputGraph.call_user_compiler")
    split = {"dynamo": frame - user, "aot": user - forward_backend, "backend": seconds_of(entry)}
    split["rest"] = total - sum(split.values())
    record = {"total_s": total, "phases": split, "own_phases": own_phases(peer_name)}
    out.write_text(json.dumps(record | {"counts": added(before, peer.counts())}))


if __name__ == "__main__":
    main()
