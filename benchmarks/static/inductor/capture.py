"""What Inductor writes for a workload on a GPU, on a machine without one.

torch's tracing runs on this machine's device with Inductor's decompositions and partitioner. The graphs are moved to
the GPU as fakes, and Inductor lowers those. It asks torch what the GPU is, and gets the answers of a sheet; it is
stopped once its program is written, before anything would run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from torch_mlc.dynamo_backend.tracing.fake_device import allow_fake_cuda, retarget
from torch_mlc.ir.target import Target

from ...models.spec import Size
from ..made import Workload

# Inductor's programs run nothing: numbers are drawn as it draws them, nothing is taken from its caches, and it
# compiles no kernel while it writes.
_SETTINGS: dict[str, Any] = {"fx_graph_cache": False, "compile_threads": 1}


class _Written(BaseException):
    """The program is written. No error, so that nothing on the way takes it for one."""


@dataclass(frozen=True, slots=True)
class Program:
    """The text that Inductor would run for one graph ("inference", "forward", "backward"), and that graph's inputs."""

    kind: str
    text: str
    inputs: tuple[Any, ...]


def programs_of(workload: Workload, size: Size, target: Target) -> list[Program]:
    """Inductor's programs for a workload on a CUDA target, in the order in which they run."""
    return [_lowered(kind, gm, target) for kind, gm in _captured(workload, size)]


def _captured(workload: Workload, size: Size) -> list[tuple[str, fx.GraphModule]]:
    made = workload.make(size)
    graphs: list[tuple[str, fx.GraphModule]] = []

    def compiler(kind: str) -> Callable[..., Any]:
        def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            graphs.append((kind, gm))
            return make_boxed_func(gm.forward)

        return keep

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=select_decomp_table(),
        partition_fn=_partitioned,
        keep_inference_input_mutations=True,
    )
    fakes = [t.fake_mode for t in pytree.tree_leaves(made.inputs)]
    torch._dynamo.reset()
    with fakes[0], torch.set_grad_enabled(workload.training), config.patch(_SETTINGS):
        result = torch.compile(made.function, backend=backend)(*made.inputs)
        losses = [t.float().sum() for t in pytree.tree_leaves(result) if t.requires_grad]
        if workload.training:
            torch.autograd.backward(losses)
    torch._dynamo.reset()
    return graphs


def _partitioned(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor's partitioner. What its passes trace (random numbers) has the mode of the graph's own tensors."""
    values = (n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder")
    mode = next(t.fake_mode for t in pytree.tree_leaves(list(values)) if isinstance(t, FakeTensor))
    with V.set_fake_mode(mode):
        return compile_fx.partition_fn(gm, inputs, **options)


def _lowered(kind: str, gm: fx.GraphModule, target: Target) -> Program:
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    mode = next(t.fake_mode for t in inputs if isinstance(t, torch.Tensor))
    if kind == "inference":
        # The partitioner has done so in training. Constants are folded, on a device that is here.
        with tracing(TracingContext(mode)), V.set_fake_mode(mode), config.patch(_SETTINGS):
            compile_fx._recursive_joint_graph_passes(gm)
    allow_fake_cuda()
    retarget([gm], "cuda")
    written: list[str] = []

    def save(text: str) -> None:
        written.append(text)
        raise _Written

    with (
        as_if_on(target),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(save)),
        config.patch(_SETTINGS),
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        contextlib.suppress(_Written),
    ):
        compile_fx.compile_fx_inner(gm, inputs, is_backward=kind == "backward", is_inference=kind == "inference")
    return Program(kind, written[0], tuple(inputs))


@contextlib.contextmanager
def as_if_on(target: Target) -> Iterator[None]:
    """torch and Inductor take this machine for one with that GPU, as far as writing kernels goes."""
    machine, (major, minor) = target.machine, target.capability
    properties = SimpleNamespace(
        name=machine.part,
        major=major,
        minor=minor,
        multi_processor_count=machine.cores,
        regs_per_multiprocessor=machine.registers,
        max_threads_per_multi_processor=machine.threads,
        max_threads_per_block=1024,
        warp_size=machine.warp,
        shared_memory_per_block_optin=target.shared_bytes,
        L2_cache_size=machine.l2_bytes,
        total_memory=80 << 30,
        gcnArchName="",
        is_integrated=0,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "current_device": 0,
        "device_count": 1,
        "set_device": None,
        "set_rng_state": None,
        "synchronize": None,
    }
    interface: dict[str, Any] = {
        "get_device_properties": properties,
        "is_available": True,
        "get_compute_capability": major * 10 + minor,
        "current_device": 0,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    places = {
        "torch._inductor.scheduler.has_triton": True,
        "torch._inductor.compile_fx.has_triton": True,
        "torch.utils._triton.has_triton": True,
        "torch.utils._triton.triton_hash_with_backend": "none",
    }

    def always(answer: Any) -> Callable[..., Any]:
        return lambda *_, **__: answer

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        for name, answer in answers.items():
            enter(mock.patch.object(torch.cuda, name, always(answer)))
        for name, answer in interface.items():
            enter(mock.patch.object(CudaInterface, name, staticmethod(always(answer))))
        for name in ("get_device_properties", "current_device"):
            enter(mock.patch.object(CudaInterface.Worker, name, staticmethod(always(interface[name]))))
        for where in (torch.cuda, CudaInterface):
            enter(mock.patch.object(where, "device", always(contextlib.nullcontext())))
        for place, answer in places.items():
            enter(mock.patch(place, always(answer)))
        enter(mock.patch.object(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1, device="cpu")))
        enter(mock.patch.object(torch.version, "cuda", "12.8"))
        yield
