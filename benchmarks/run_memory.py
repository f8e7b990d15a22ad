"""Suite ``memory``: the most memory that inference or a training step holds beyond weights and inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import torch_mlc

from .memory import peak_of
from .models.spec import ModelSpec, Size
from .peers import Peer
from .run_models import MODES, Runner
from .schema import CaseResult, PeerResult

__all__ = ["MODES", "run_memory"]


def run_memory(
    spec: ModelSpec,
    size: Size,
    mode: str,
    peers: Sequence[Peer],
    dtype: torch.dtype,
    dynamic: bool,
    device: str,
    repeat: int,
) -> CaseResult:
    """One model in one mode under every peer: the third step and ``repeat - 1`` more, of which the highest peak counts.

    ``nbytes`` of the result are weights, buffers and inputs, which all peers hold alike. Gradients of a training step
    are results of it: they are dropped before it begins. A peer that fails has its error in its result.
    """
    model = spec.build(size).to(device, dtype)
    inputs = spec.inputs(size, device, dtype)
    given = [*model.parameters(), *model.buffers(), *inputs.args, inputs.targets]
    result = CaseResult(
        spec.name, size, mode, str(dtype).removeprefix("torch."), sum({t.data_ptr(): t.nbytes for t in given}.values())
    )
    for peer in peers:
        outcome = result.peers[peer.name] = PeerResult()
        runner = Runner(peer, spec, model, inputs, mode, dynamic)
        torch_mlc.empty_cache()  # what other models have left
        try:
            runner.first(outcome)
            runner.step()
            outcome.peak_bytes = max(_peak(runner, device) for _ in range(repeat))
        except Exception as error:
            # Any failure of a backend is a result of the benchmark, and the other peers still have theirs.
            outcome.error = f"{type(error).__name__}: {error}"
    torch._dynamo.reset()
    return result


def _peak(runner: Runner, device: str) -> int:
    for p in runner.model.parameters():
        p.grad = None
    return peak_of(runner.step, device)
