"""Suite ``models``: inference and one training step of each model, with all gradients checked against float64."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .accuracy import judge
from .machine import Roofline
from .models.spec import Inputs, ModelSpec, Size
from .peers import Peer, added
from .schema import CaseResult, PeerResult
from .timing import TimingSettings, measure

INFERENCE, TRAINING = "inference", "training"
MODES = (INFERENCE, TRAINING)


def meant(spec: ModelSpec, modes: Sequence[str]) -> list[str]:
    """Those of ``modes`` that a model is meant for."""
    return [m for m in modes if spec.trains or m == INFERENCE]


def infer(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(*inputs.args)


def trainer(spec: ModelSpec) -> Callable[[nn.Module, Inputs], Tensor]:
    """Model and loss as one function, so that a compiler sees both."""

    def forward(model: nn.Module, inputs: Inputs) -> Tensor:
        return spec.loss(model(*inputs.args), inputs)

    return forward


class Runner:
    """A model of its own under one peer; ``step`` runs it once and returns the output or the loss."""

    def __init__(self, peer: Peer, spec: ModelSpec, model: nn.Module, inputs: Inputs, mode: str, dynamic: bool) -> None:
        self.peer, self.mode, self.writes = peer, mode, not spec.trains
        self.inputs = inputs.copied() if self.writes else inputs
        self.model = copy.deepcopy(model).train(mode == TRAINING)
        self.function = peer.compile(infer if mode == INFERENCE else trainer(spec), dynamic)

    def step(self) -> Tensor:
        if self.mode == INFERENCE:
            with torch.no_grad():
                return self.function(self.model, self.inputs)
        for p in self.model.parameters():
            p.grad = None
        loss = self.function(self.model, self.inputs)
        loss.backward()
        return loss.detach()

    def first(self, outcome: PeerResult) -> dict[str, Tensor]:
        """The first step, in two halves so that kernels of forward and backward are counted apart.

        Returns the output (or the loss), every gradient and every buffer afterwards, and what a model that writes to
        its arguments made of them, by name. With ``dynamic=True``
        some backends compile the backward together with the forward, and its kernels are counted there.
        """
        before, start = self.peer.counts(), time.perf_counter()
        with torch.set_grad_enabled(self.mode == TRAINING):
            output = self.function(self.model, self.inputs)
        middle = self.peer.counts()
        outcome.counts["forward"] = added(before, middle)
        values = {"output": output.detach()}
        if self.mode == TRAINING:
            output.backward()
            outcome.counts["backward"] = added(middle, self.peer.counts())
            values |= {f"grad {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
            values |= {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}
        if self.writes:
            values |= {f"argument {k}": a for k, a in enumerate(self.inputs.args) if a.is_floating_point()}
        outcome.first_call_s = time.perf_counter() - start
        return {name: t.detach().clone() for name, t in values.items()}


def reference_of(spec: ModelSpec, model: nn.Module, inputs: Inputs, mode: str) -> dict[str, Tensor]:
    """What ``Runner.first`` returns, in float64 from the same (already rounded) weights and inputs."""
    exact = Runner(Peer("eager"), spec, copy.deepcopy(model).double(), inputs.cast(torch.float64), mode, False)
    return exact.first(PeerResult())


def run_model(
    spec: ModelSpec,
    size: Size,
    mode: str,
    peers: Sequence[Peer],
    dtype: torch.dtype,
    dynamic: bool,
    timing: TimingSettings,
    roofline: Roofline,
) -> CaseResult:
    """One model in one mode under every peer. A peer that fails has its error in its result and is not timed."""
    model = spec.build(size).to(timing.device, dtype)
    inputs = spec.inputs(size, timing.device, dtype)
    exact = reference_of(spec, model, inputs, mode)
    with FlopCounterMode(display=False) as counter:
        eager = Runner(Peer("eager"), spec, model, inputs, mode, False).first(PeerResult())
    flops = counter.get_total_flops()
    dtype_name = str(dtype).removeprefix("torch.")
    result = CaseResult(spec.name, size, mode, dtype_name, None, flops, roofline.floor_s(0, flops))
    calls: dict[str, Callable[[], Any]] = {}
    for peer in peers:
        if peer.options and mode == TRAINING:
            continue  # parameters change
        outcome = result.peers[peer.name] = PeerResult()
        runner = Runner(peer, spec, model, inputs, mode, dynamic)
        try:
            values = runner.first(outcome)
        except Exception as error:
            # Any failure of a backend is a result of the benchmark, and the other peers still have theirs.
            outcome.error = f"{type(error).__name__}: {error}"
            continue
        accuracy = judge(values, eager, exact, dtype)
        outcome.accuracy = asdict(accuracy) | {"ok": accuracy.ok}
        calls[peer.name] = runner.step
    del exact, eager
    for name, samples in measure(calls, timing).items():
        result.peers[name].samples = samples.seconds
        result.peers[name].calls_per_sample = samples.calls
    torch._dynamo.reset()
    return result
