"""The nests whose schedules are recorded: of the suite ``kernels``, of models, and of random programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torch_mlc
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target

from ..kernel_texts.corpus import corpus
from ..kernels import attention, convolutions, images, movement, norms, pointwise, products, quantized, reductions
from .programs import random_program

_FILES = (pointwise, reductions, norms, movement, quantized, attention, convolutions, images, products)
_FAMILY = {case.name: file.__name__.rpartition(".")[2] for file in _FILES for case in file.CASES}
PROGRAMS = 160
# Models whose kernels are recorded, and how many kernels of each at most.
MODELS, OF_MODEL = ("gpt2_d768", "bert", "mobilenet", "mixer", "llama", "unet", "vit", "resnet50", "dlrm", "lstm"), 2
# Kernels of one workload of the suite ``kernels`` at most.
OF_KERNEL = 1


@dataclass(frozen=True, slots=True)
class Source:
    """Where nests come from: ``make`` gives a function and its inputs; ``most`` of its kernels are recorded."""

    name: str
    family: str
    make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
    most: int


@dataclass(frozen=True, slots=True)
class Named:
    """A nest as it was lowered, by a name for people and files."""

    name: str
    family: str
    workload: str
    nest: LoopNest
    target: Target


def sources(target: str) -> list[Source]:
    """All of them for a target ("cpu", "cuda:sm_90"), in an order in which neighbours differ."""
    kind = target.partition(":")[0]
    cases = [c for c in corpus("small" if kind == "cpu" else "full") if c.target.partition(":")[0] == kind]
    kernels, models = [], []
    for c in cases:
        suite, _, name = c.name.partition("/")
        of = name.partition(", ")[0]
        make = partial(_made, c.make, c.modes[0])
        if suite == "kernels" and of in _FAMILY:
            kernels.append(Source(name, _FAMILY[of], make, OF_KERNEL))
        elif suite == "models" and any(name.startswith(m) for m in MODELS):
            models.append(Source(name, "models", make, OF_MODEL))
    programs = [Source(f"program {k}", "programs", partial(random_program, k), 1) for k in range(PROGRAMS)]
    # Of each kernel one variant, aligned and odd in turn.
    chosen = [s for k, s in enumerate(kernels) if k % 4 in (0, 3)]
    mixed: list[Source] = []
    queues = [chosen, programs, models]
    while any(queues):
        for q in queues:
            if q:
                mixed.append(q.pop(0))
    return mixed


def _made(make: Callable[[str], Any], mode: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    made = make(mode)
    return made.function, made.inputs


def nests_of(source: Source, target: str) -> Iterator[Named]:
    """The kernels of a source that have a schedule to choose, those that move most first."""
    torch._dynamo.reset()
    function, inputs = source.make()
    with torch.no_grad():
        options = {"cache": False, "compile_workers": 0}
        report = torch_mlc.explain(function, *inputs, target=None if target == "cpu" else target, options=options)
    kernels = [k for k in report.kernels if k.nest is not None and k.target is not None and not k.nest.table]
    kernels.sort(key=lambda k: -(k.traffic.moved if k.traffic is not None else 0))
    for number, k in enumerate(kernels[: source.most]):
        assert k.nest is not None and k.target is not None
        name = source.name if number == 0 else f"{source.name} #{number + 1}"
        yield Named(name, source.family, k.workload, k.nest, k.target)
