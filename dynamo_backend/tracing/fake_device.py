"""Models whose tensors are fakes on a device that this machine lacks, for compiling ahead for that device."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

# Positions of c10::DeviceType.
_CUDA, _META = 1, 14
# How the attributes of a tensor begin by which Dynamo is told of its sizes.
MARKS = ("_dynamo_", "_specialize_on")
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


def on_fake_device(model: torch.nn.Module, inputs: Sequence[Any], device: str) -> tuple[torch.nn.Module, list[Any]]:
    """Copies of a model and its inputs whose tensors are fakes on ``device`` ("cuda", "cuda:1"), with what Dynamo was
    told of their sizes."""
    allow_fake_cuda()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device, requires_grad=t.requires_grad)
        for name, marks in vars(t).items():
            if name.startswith(MARKS):
                setattr(made, name, copy.copy(marks))
        return made

    # Tied parameters stay tied: one fake for each tensor.
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = torch.nn.Parameter(fake(p.detach()), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = fake(b.detach())
    return copy.deepcopy(model, memo), pytree.tree_map_only(torch.Tensor, fake, list(inputs))


def retarget(graphs: Sequence[fx.GraphModule], device: str, *, host: bool = True) -> None:
    """Make captured graphs, in place, graphs of another device: fake tensors, devices in calls, bodies of control flow.
    What is on devices of other types, such as the host, stays there unless ``host``.

    For backward graphs where ``on_fake_device`` cannot help: autograd's engine asks for a real accelerator. Ops that
    torch chooses by device (attention) stay those of the device of the capture.
    """
    target = torch.device(device)
    if target.index is None and target.type != "cpu":
        target = torch.device(target.type, 0)

    def goes(a: torch.device) -> bool:
        return host or a.type == target.type

    def moved(a: Any) -> Any:
        return target if isinstance(a, torch.device) and goes(a) else a

    for gm in graphs:
        for node in gm.graph.nodes:
            for t in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(t, FakeTensor) and goes(t.fake_device):
                    t.fake_device = target
            if node.op == "call_function":
                node.args = pytree.tree_map_only(torch.device, moved, node.args)
                node.kwargs = pytree.tree_map_only(torch.device, moved, node.kwargs)
        retarget([body for body in gm.children() if isinstance(body, fx.GraphModule)], device, host=host)


def allow_fake_cuda() -> bool:
    """Let autograd record fake CUDA tensors in a torch built without CUDA; whether it can.

    Autograd asks for the device's guard, which such a build lacks, and ends the process where there is none. torch
    puts a guard that does nothing in the place of one without devices (``_ensureCUDADeviceGuardSet``), but not in an
    empty place; so the guard of the meta device, which has none, is put there first.
    """
    if torch.backends.cuda.is_built():
        return True
    try:
        library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
        registry = (ctypes.c_void_p * (_META + 1)).in_dll(library, _REGISTRY)
    except (OSError, StopIteration, ValueError):
        return False
    if not registry[_CUDA]:
        registry[_CUDA] = registry[_META]
        torch._C._ensureCUDADeviceGuardSet()
        return bool(registry[_CUDA] != registry[_META])
    return True
