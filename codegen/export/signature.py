"""What a library says of its functions: JSON, which the library itself holds."""

from __future__ import annotations

import json

import sympy

from .library import ExportedFunction, ExportedModel, TensorSpec


def signature_text(model: ExportedModel) -> str:
    """JSON of one line: functions with inputs, results, sizes and guards, and the processors of the variants."""
    return json.dumps(
        {
            "name": model.name,
            "functions": [_function(f) for f in model.functions],
            "processors": [*(v.target.arch for v in model.variants), model.target.arch],
            "device": "cuda" if model.gpus else "cpu",
            "gpus": [v.target.arch for v in model.gpus],
            "products": list(model.products),
            "draws": model.draws,
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _function(f: ExportedFunction) -> dict[str, object]:
    sizes = {}
    for symbol, (number, dim) in f.symbols.items():
        low, high = f.ranges.get(symbol, (0, None))
        sizes[str(symbol)] = {"input": number, "dimension": dim, "least": low, "most": high}
    return {
        "name": f.name,
        "inputs": [_tensor(s) for s in f.inputs],
        "results": [_tensor(s) for s in f.results],
        "sizes": sizes,
        "rules": [g.sentence for g in f.guards],
        "arena": _size(f.arena),
    }


def _tensor(s: TensorSpec) -> dict[str, object]:
    return {
        "name": s.name,
        "dtype": s.dtype.value,
        "shape": [_size(e) for e in s.shape],
        "strides": [_size(e) for e in s.strides],
    }


def _size(e: sympy.Expr) -> int | str:
    e = sympy.sympify(e)
    return int(e) if e.is_Integer else str(e)
