"""Suite ``kernels``: each fused pattern at each size, checked against float64, then timed against its byte floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .accuracy import judge
from .kernels.case import VARIANTS, KernelCase
from .machine import Roofline
from .peers import EAGER, Peer, added
from .schema import CaseResult, PeerResult
from .timing import TimingSettings, measure


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def named(result: Any) -> dict[str, Tensor]:
    return {f"output {i}": t.detach() for i, t in enumerate(outputs_of(result))}


def run_kernel(
    case: KernelCase,
    variant: str,
    peers: Sequence[Peer],
    dtype: torch.dtype,
    dynamic: bool,
    timing: TimingSettings,
    roofline: Roofline,
) -> CaseResult:
    """One case at one size under every peer. A peer that fails has its error in its result and is not timed."""
    inputs = case.inputs(variant, timing.device, dtype)
    exact = named(case.function(*(t.double() if t.is_floating_point() else t for t in inputs)))
    eager_outputs = outputs_of(case.function(*inputs))
    eager = named(eager_outputs)
    nbytes = case.compulsory_bytes(inputs, eager_outputs)
    result = CaseResult(
        case.name, variant, "inference", str(dtype).removeprefix("torch."), nbytes, None, roofline.floor_s(nbytes)
    )
    calls: dict[str, Callable[[], object]] = {}
    for peer in peers:
        outcome = result.peers[peer.name] = PeerResult()
        function = peer.compile(case.function, dynamic)
        before, start = peer.counts(), time.perf_counter()
        try:
            values = named(function(*inputs))
        except Exception as error:
            # Any failure of a backend is a result of the benchmark, and the other peers still have theirs.
            outcome.error = f"{type(error).__name__}: {error}"
            continue
        outcome.first_call_s = time.perf_counter() - start
        outcome.counts["forward"] = added(before, peer.counts())
        accuracy = judge(values, eager, exact, dtype)
        outcome.accuracy = asdict(accuracy) | {"ok": accuracy.ok}
        calls[peer.name] = lambda f=function: f(*inputs)  # type: ignore[misc]
    del exact, eager, eager_outputs
    with torch.no_grad():
        for name, samples in measure(calls, timing).items():
            result.peers[name].samples = samples.seconds
            result.peers[name].calls_per_sample = samples.calls
    torch._dynamo.reset()
    return result


def kernel_cases(cases: Sequence[KernelCase], variants: Sequence[str] = VARIANTS) -> Iterator[tuple[KernelCase, str]]:
    return ((case, variant) for case in cases for variant in variants)


def failed(result: CaseResult) -> list[str]:
    """Names of the peers that raised or whose numbers are wrong."""
    wrong = []
    for name, peer in result.peers.items():
        if peer.error is not None or (name != EAGER and peer.accuracy is not None and not peer.accuracy["ok"]):
            wrong.append(name)
    return wrong
