"""The way of an ATen graph through ``compile_graph`` is short, and goes down: who reads the path meets each file about
once."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx, nn

from torch_mlc.dynamo_backend.entry import backend

ROOT = Path(__file__).resolve().parents[2]
# What runs passes hands the graph to each of them: these are no places where somebody decides.
RUNNER = ("ir/passes.py", "dynamo_backend/aten_passes/context.py")
LAYERS = ("dynamo_backend/entry", "dynamo_backend/compiling", "dynamo_backend")


def layer(file: str) -> int:
    """How far down a file is."""
    return next((k for k, folder in enumerate(LAYERS) if file.startswith(f"{folder}/")), len(LAYERS))


def stays_of(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose functions are given the graph that is compiled, each once for a stay of it."""
    found: list[str] = []
    compile_graph = backend.compile_graph

    def followed(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        def entered(frame: FrameType, event: str, _: object) -> None:
            code, path = frame.f_code, Path(frame.f_code.co_filename)
            if event != "call" or not path.is_relative_to(ROOT):
                return
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            file = path.relative_to(ROOT).as_posix()
            if any(frame.f_locals.get(n) is gm for n in given) and file not in RUNNER and found[-1:] != [file]:
                found.append(file)

        sys.setprofile(entered)
        try:
            return compile_graph(gm, *args, **kwargs)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(backend, "compile_graph", followed)
    with torch.no_grad():
        torch.compile(model, backend="mlc", options={"cache": False})(x)
    return found


def test_the_way_of_a_graph_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Softmax(-1), nn.LayerNorm(32))
    stays = stays_of(model, torch.randn(4, 32), monkeypatch)
    assert stays[0] == "dynamo_backend/entry/compile.py" and "dynamo_backend/importing/importer.py" in stays
    climbs = sum(layer(after) < layer(before) for before, after in pairwise(stays))
    assert len(stays) <= 25, stays
    assert climbs <= 3, stays
