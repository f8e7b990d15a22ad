"""Kernels compared with ATen in float64, in memory that is poisoned around their inputs and where their results come;
without a GPU, compiled for one and run in Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

import torch_mlc
from torch_mlc.dynamo_backend.verify.verify_graph import WrongResultError
from torch_mlc.runtime.counters import counters

from ...accuracy import judge
from ..cases import NamedKernel, in_poison, margins_hold, poison_allocator
from ..plan import Settings
from ..record import OK, WRONG, Row


def check(settings: Settings, name: str) -> Iterator[Row]:
    """One kernel by its name."""
    yield (
        compared(NamedKernel.of(name), settings.device)
        if settings.gpu
        else interpreted(NamedKernel.of(name), settings.target)
    )


def compiled(kernel: NamedKernel, **options: Any) -> Callable[..., Any]:
    """Its function through the backend, with a code object of its own."""
    plain = kernel.case.function
    assert isinstance(plain, FunctionType), plain
    own = FunctionType(
        plain.__code__.replace(co_name=f"{plain.__name__}_campaign"), plain.__globals__, plain.__name__,
        plain.__defaults__, plain.__closure__,
    )  # fmt: skip
    return torch.compile(own, backend="mlc", dynamic=False, fullgraph=True, options=options or None)


def compared(kernel: NamedKernel, device: str) -> Row:
    """Run a kernel twice, and compare it with eager in float64."""
    inputs = kernel.inputs("cpu", device)
    exact = kernel.with_gradients([t.double() if t.is_floating_point() else t.clone() for t in inputs])
    want = kernel.results(kernel.case.function, exact)
    eager = kernel.results(kernel.case.function, kernel.with_gradients([t.clone() for t in inputs]))
    before, begin = counters.snapshot(), time.perf_counter()
    function = compiled(kernel)
    turns = []
    for turn in range(2):
        placed = [in_poison(t, kernel.variant == "odd" and k % 2 == turn) for k, t in enumerate(inputs)]
        poison_allocator(list(eager.values()))
        got = kernel.results(function, [t for t, _ in placed])
        turns.append(got)
        if not all(margins_hold(t, flat) for t, flat in placed):
            return {"status": WRONG, "why": "memory beside an input was written"}
        accuracy = judge(got, eager, want, kernel.dtype)
        if not accuracy.ok:
            return {
                "status": WRONG, "why": f"{accuracy.worst}: error {accuracy.error:.1e}, limit {accuracy.limit:.1e}",
                "error": accuracy.error, "limit": accuracy.limit,
            }  # fmt: skip
    since = counters.since(before)
    torch._dynamo.reset()
    same = all(torch.equal(turns[0][n], t) or t.isnan().any() for n, t in turns[1].items())
    return {
        "status": OK, "error": accuracy.error, "limit": accuracy.limit, "eager_error": accuracy.eager_error,
        "same_bits_again": bool(same), "kernels": since.get("kernels_generated", 0),
        "kernels_from_cache": since.get("kernel_cache_hits", 0), "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def interpreted(kernel: NamedKernel, target: str) -> Row:
    """Compile a kernel for a GPU that is not here, and compare it in the interpreter with its definition."""
    before, begin = counters.snapshot(), time.perf_counter()
    try:
        report = torch_mlc.explain(
            kernel.case.function, *kernel.inputs("cpu", "cpu"), training=kernel.mode == "training", target=target,
            options={"cache": False, "verify": 1, "compile_workers": 0},
        )  # fmt: skip
    except WrongResultError as error:
        return {"status": WRONG, "why": " ".join(str(error).split())}
    broken = [f"{k.name}: {k.error}" for k in report.kernels if k.error]
    since = counters.since(before)
    spills = [k.resources.spills for k in report.kernels if k.resources is not None]
    return {
        "status": WRONG if broken else OK, "why": "; ".join(broken), "kernels": len(report.kernels),
        "verified": since.get("kernels_verified", 0), "unverified": since.get("kernels_unverified", 0),
        "spills": max(spills, default=0), "seconds": time.perf_counter() - begin,
    }  # fmt: skip
