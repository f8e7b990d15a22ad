"""A training step of GPT-2 and a step of Llama's decoding against eager, with peak memory; without a GPU, what they
compile to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import torch_mlc

from ...kernel_texts.corpus import fake_model
from ...machine import Roofline
from ...models.registry import MODELS
from ...peers import EAGER, Peer
from ...run_memory import run_memory
from ...run_models import run_model
from ...timing import TimingSettings
from ..figures import totals
from ..plan import TRAINING, Settings
from ..record import OK, WRONG, Row

_PEERS = (Peer(EAGER), Peer("mlc"))
_ROUNDS = 10
# The share of a model's floor is of no interest here: only times and their ratio are.
_NO_RATES = Roofline(float("inf"), float("inf"), "")


def check(settings: Settings, name: str) -> Iterator[Row]:
    """One model in one mode: "gpt2_d768, training"."""
    model, mode = name.split(", ")
    yield measured(model, mode, settings) if settings.gpu else counted(model, mode, settings)


def measured(model: str, mode: str, settings: Settings) -> Row:
    """Times, errors and peaks of eager and of ours."""
    spec, device = MODELS[model], settings.device
    dtype = torch.bfloat16 if settings.gpu else torch.float32
    rounds = _ROUNDS if settings.gpu else 1
    timing = TimingSettings(device, rounds, least_s=5e-3 if settings.gpu else 0.0, warmup_s=0.05)
    times = run_model(spec, settings.size, mode, _PEERS, dtype, False, timing, _NO_RATES)
    peaks = run_memory(spec, settings.size, mode, _PEERS, dtype, False, device, 1)
    row: Row = {"status": OK, "dtype": times.dtype, "speedup": times.ratio("mlc", EAGER)}
    for peer in _PEERS:
        timed, held = times.peers[peer.name], peaks.peers[peer.name]
        row |= {
            f"{peer.name}_s": timed.time.median if timed.time is not None else None,
            f"{peer.name}_peak_bytes": held.peak_bytes, f"{peer.name}_first_call_s": timed.first_call_s,
        }  # fmt: skip
        errors = [e for e in (timed.error, held.error) if e]
        accuracy: dict[str, Any] = timed.accuracy or {}
        if errors or (peer.name != EAGER and not accuracy.get("ok", True)):
            found = f"{accuracy.get('worst')}: error {accuracy.get('error')}, limit {accuracy.get('limit')}"
            row |= {"status": WRONG, "why": errors[0] if errors else found}
        row[f"{peer.name}_counts"] = timed.counts
    return row


def counted(model: str, mode: str, settings: Settings) -> Row:
    """Launches and bytes of a model that is compiled from fake tensors."""
    begin = time.perf_counter()
    made = fake_model(MODELS[model], settings.size, settings.target, mode)
    report = torch_mlc.explain(
        made.function, *made.inputs, training=mode == TRAINING, target=settings.target, options={"cache": False}
    )
    found = totals(report.kernels)
    return {
        "status": WRONG if found["errors"] else OK, "why": "; ".join(found["errors"]), **found,
        "launches": sum(g.launches for g in report.graphs),
        "library_calls": sum(c.calls for g in report.graphs for c in g.libraries),
        "peak_bytes": max((g.typical_peak for g in report.graphs), default=0),
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip
