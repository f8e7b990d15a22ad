"""Kernels timed against eager; without a GPU, what machine code tells of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.model_report import Report

from ..cases import NamedKernel
from ..clock import Timed, timed
from ..figures import kernel_figures, totals
from ..plan import TRAINING, Settings
from ..record import OK, WRONG, Row
from .kernels import compiled


def check(settings: Settings, name: str) -> Iterator[Row]:
    """One kernel by its name."""
    kernel = NamedKernel.of(name)
    if settings.gpu:
        yield against_eager(kernel, settings.device, "cuda")
        return
    yield from static_rows(kernel, settings.target)


def against_eager(kernel: NamedKernel, device: str, kind: str) -> Row:
    """Seconds of eager and of ours."""
    inputs = kernel.inputs(kind, device)
    begin = time.perf_counter()
    function = compiled(kernel)
    call = called(kernel, function, inputs)
    outputs = kernel.results(function, inputs)
    first = time.perf_counter() - begin
    found = timed({"eager": called(kernel, kernel.case.function, inputs), "mlc": call}, device)
    torch._dynamo.reset()
    row = timed_row(found)
    if kernel.mode != TRAINING:
        results = [t for n, t in outputs.items() if n.startswith("output")]
        moved = kernel.case.compulsory_bytes(inputs, results)
        row |= {"bytes": moved, "bytes_per_s": moved / found["mlc"].seconds}
    return {"status": OK, **row, "speedup": found["eager"].seconds / found["mlc"].seconds, "first_call_s": first}


def called(kernel: NamedKernel, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """A call of a function, with its gradients in training."""
    if kernel.mode == TRAINING:
        return lambda: kernel.results(function, inputs)

    def infer() -> object:
        with torch.no_grad():
            return function(*inputs)

    return infer


def timed_row(found: dict[str, Timed]) -> Row:
    """Times by who took them."""
    return {f"{name}_s": t.seconds for name, t in found.items()} | {
        "samples": {name: list(t.samples) for name, t in found.items()},
        "how": {name: t.how for name, t in found.items()},
    }


def explained(kernel: NamedKernel, target: str) -> Report:
    """A kernel as it is timed, compiled from fake tensors for a GPU."""
    with FakeTensorMode():
        inputs = kernel.inputs("cuda", "cpu")
    return torch_mlc.explain(
        kernel.case.function, *inputs, training=kernel.mode == TRAINING, target=target,
        options={"cache": False, "compile_workers": 0},
    )  # fmt: skip


def static_rows(kernel: NamedKernel, target: str) -> Iterator[Row]:
    """A row for each kernel, and one for all."""
    begin = time.perf_counter()
    report = explained(kernel, target)
    for k in report.kernels:
        yield {"status": WRONG if k.error else OK, "why": k.error, **kernel_figures(k)}
    found = totals(report.kernels)
    yield {"status": WRONG if found["errors"] else OK, "why": "; ".join(found["errors"]), **found,
           "seconds": time.perf_counter() - begin}  # fmt: skip
