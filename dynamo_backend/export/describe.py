"""What the folder of a model says of it in JSON, for people and for callers in Python."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import llvmlite
import torch

from ...codegen.export.library import ExportedFunction, TensorSpec
from .assemble import Assembled

DESCRIPTION = "model.json"


def description(assembled: Assembled) -> str:
    """Signatures, ranges and rules of sizes, the memory that a call takes, weights, target and versions."""
    model = assembled.model
    functions = {f.name: {**_function(f), **assembled.signatures[f.name]} for f in model.functions}
    for name, host in assembled.hosts.items():
        functions[name]["launches"] = list(host.launches)
    targets = [v.target for v in model.gpus] or [model.target, *(v.target for v in model.variants)]
    told = {
        "name": model.name,
        "functions": functions,
        "weights": {
            w.name: {"dtype": w.dtype.value, "shape": w.shape, "strides": w.strides, "state": w.mutable}
            for w in model.weights
        },
        "machine": model.machine,
        "device": "cuda" if model.gpus else "cpu",
        "products": list(model.products),
        "targets": [{"processor": t.arch, "features": t.features} for t in targets],
        "versions": {"torch-mlc": version("torch-mlc"), "torch": torch.__version__, "llvmlite": llvmlite.__version__},
    }
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def _function(f: ExportedFunction) -> dict[str, Any]:
    sizes = {}
    for symbol, (number, dim) in f.symbols.items():
        low, high = f.ranges.get(symbol, (0, None))
        sizes[str(symbol)] = {"input": f.inputs[number].name, "dimension": dim, "least": low, "most": high}
    return {
        "inputs": [_tensor(s) for s in f.inputs],
        "results": [_tensor(s) for s in f.results],
        "sizes": sizes,
        "rules": [g.sentence for g in f.guards],
        "scratch_bytes": str(f.arena),
    }


def _tensor(s: TensorSpec) -> dict[str, Any]:
    shape, strides = ([str(e) for e in row] for row in (s.shape, s.strides))
    return {"name": s.name, "dtype": s.dtype.value, "shape": shape, "strides": strides}
