"""Suite ``kernels``: each fused pattern at each size, checked against float64, then timed against its byte floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .accuracy import ProductsByOnednn, judge
from .kernels.case import VARIANTS, KernelCase
from .machine import Roofline
from .peers import EAGER, Peer, added
from .run_models import INFERENCE, TRAINING
from .schema import CaseResult, PeerResult
from .timing import TimingSettings, measure


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def named(result: Any) -> dict[str, Tensor]:
    return {f"output {i}": t.detach() for i, t in enumerate(outputs_of(result))}


class Step:
    """A case as a peer runs it: its outputs, and in training the gradients of those beside them."""

    def __init__(self, case: KernelCase, function: Callable[..., Any], inputs: Sequence[Tensor], mode: str) -> None:
        self.function, self.trains = function, mode == TRAINING
        count = case.gradients if self.trains else 0
        self.inputs = [t.detach().requires_grad_(k < count) for k, t in enumerate(inputs)]
        self.seeds: list[Tensor] = []

    def __call__(self) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(self.trains):
            outputs = outputs_of(self.function(*self.inputs))
        if not self.trains:
            return outputs
        if not self.seeds:
            # Quarters, which every type of floats has exactly.
            generator = torch.Generator().manual_seed(1)
            self.seeds = [torch.randint(-8, 9, t.shape, generator=generator).to(t) / 4 for t in outputs]
        leaves = [t for t in self.inputs if t.requires_grad]
        return (*outputs, *torch.autograd.grad(outputs, leaves, self.seeds))


def meant(case: KernelCase, modes: Sequence[str]) -> list[str]:
    """Those of ``modes`` in which a case is run."""
    return [m for m in modes if case.gradients or m == INFERENCE]


def run_kernel(
    case: KernelCase,
    variant: str,
    mode: str,
    peers: Sequence[Peer],
    dtype: torch.dtype,
    dynamic: bool,
    timing: TimingSettings,
    roofline: Roofline,
) -> CaseResult:
    """One case at one size under every peer. A peer that fails has its error in its result and is not timed."""
    inputs = case.inputs(variant, timing.device, dtype)
    exact = named(Step(case, case.function, [t.double() if t.is_floating_point() else t for t in inputs], mode)())
    eager_outputs = Step(case, case.function, inputs, mode)()
    eager, others = named(eager_outputs), []
    if torch.backends.mkldnn.is_available() and torch.device(timing.device).type == "cpu" and dtype is torch.float32:
        with ProductsByOnednn():
            others.append(named(Step(case, case.function, inputs, mode)()))
    nbytes = case.compulsory_bytes(inputs, eager_outputs)
    result = CaseResult(
        case.name, variant, mode, str(dtype).removeprefix("torch."), nbytes, None, roofline.floor_s(nbytes)
    )
    calls: dict[str, Callable[[], object]] = {}
    for peer in peers:
        outcome = result.peers[peer.name] = PeerResult()
        step = Step(case, peer.compile(case.function, dynamic), inputs, mode)
        before, start = peer.counts(), time.perf_counter()
        try:
            values = named(step())
        except Exception as error:
            # Any failure of a backend is a result of the benchmark, and the other peers still have theirs.
            outcome.error = f"{type(error).__name__}: {error}"
            continue
        outcome.first_call_s = time.perf_counter() - start
        outcome.counts["forward"] = added(before, peer.counts())
        accuracy = judge(values, eager, exact, dtype, others)
        outcome.accuracy = asdict(accuracy) | {"ok": accuracy.ok}
        calls[peer.name] = step
    del exact, eager, others, eager_outputs
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
