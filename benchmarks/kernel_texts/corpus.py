"""What is compiled: the kernel suite, the models and the static workloads, from fake tensors, for a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device

from ..kernels.case import VARIANTS, KernelCase
from ..kernels.registry import KERNELS
from ..models.registry import MODELS
from ..models.spec import Inputs, ModelSpec, Size
from ..run_models import INFERENCE, MODES, TRAINING, meant
from ..static.workloads import WORKLOADS, Workload

GPU = "cuda:sm_90"
TARGETS = ("cpu", GPU)
# What is usual on each; the texts of both types of floats and of both kinds of products are in the corpus so.
_DTYPES = {"cpu": torch.float32, GPU: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Made:
    """A function, or a model, and what it is called with: fake tensors of the CPU."""

    function: Callable[..., Any]
    inputs: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A workload for one target. ``make(mode)`` is called for each of its ``modes``."""

    name: str
    target: str
    modes: tuple[str, ...]
    make: Callable[[str], Made]


def corpus(size: Size) -> list[Case]:
    """Every workload for every target; models in a ``size``, everything else as large as it is measured."""
    return [case for target in TARGETS for case in (*_kernels(target), *_models(target, size), *_static(target))]


def _kernels(target: str) -> Iterator[Case]:
    for case in KERNELS.values():
        count = gradients_of(case.name)
        modes = MODES if count else (INFERENCE,)
        for variant in VARIANTS:
            yield Case(f"kernels/{case.name}, {variant}", target, modes, partial(_kernel, case, variant, target, count))


def _kernel(case: KernelCase, variant: str, target: str, gradients: int, mode: str) -> Made:
    shape = case.shapes[target.partition(":")[0]][variant]
    with FakeTensorMode():
        inputs = case.inputs(variant, "cpu", _DTYPES[target], shape)
    return Made(case.function, _with_gradients(inputs, gradients if mode == TRAINING else 0))


def _with_gradients(inputs: Sequence[Tensor], count: int) -> list[Tensor]:
    return [t.requires_grad_(k < count and t.is_floating_point()) for k, t in enumerate(inputs)]


@cache
def gradients_of(kernel: str) -> int:
    """How many of the first inputs may take gradients: all, x alone (where statistics are written), or none."""
    case = KERNELS[kernel]
    with FakeTensorMode():
        inputs = [t.detach() for t in case.inputs("aligned", "cpu", torch.float32)]
        for count in (len(inputs), 1):
            try:
                results = pytree.tree_leaves(case.function(*_with_gradients(inputs, count)))
                torch.autograd.backward([t.sum() for t in results if t.requires_grad])
            except RuntimeError:  # of an op without a derivative, as backwards are, or of what writes to a leaf
                continue
            return count if any(t.requires_grad for t in results) else 0
    return 0


def _models(target: str, size: Size) -> Iterator[Case]:
    for spec in MODELS.values():
        yield Case(f"models/{spec.name}", target, tuple(meant(spec, MODES)), partial(fake_model, spec, size, target))


def fake_model(spec: ModelSpec, size: Size, target: str, mode: str) -> Made:
    batch = spec.inputs(size, dtype=_DTYPES[target])
    model, (args, targets) = on_fake_device(spec.build(size).to(_DTYPES[target]), batch, "cpu")
    if mode == INFERENCE:
        return Made(model.eval(), args)
    model.train()

    def step(args: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        return spec.loss(model(*args), Inputs(args, targets))

    return Made(step, (args, targets))


def _static(target: str) -> Iterator[Case]:
    for workload in WORKLOADS.values():
        modes = MODES if workload.training else (INFERENCE,)
        yield Case(f"static/{workload.name}", target, modes, partial(_workload, workload))


def _workload(workload: Workload, mode: str) -> Made:
    made = workload.make("full")
    return Made(made.function, made.inputs)
