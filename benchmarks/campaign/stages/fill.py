"""Kernels of the other stages compiled for a GPU that need not be here, into the folder that a campaign there reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.dynamo_backend.explaining.precompile import precompile

from ...kernel_texts.corpus import fake_model
from ...models.registry import MODELS
from ..cases import NamedKernel
from ..plan import TRAINING, Settings
from ..record import OK, WRONG, Row


def check(settings: Settings, name: str) -> Iterator[Row]:
    """What one check of another stage launches: "timing: softmax, odd, bfloat16, inference"."""
    begin = time.perf_counter()
    stage, _, what = name.partition(": ")
    function, inputs, training = launched(stage, what, settings)
    done = precompile(function, *inputs, target=settings.target, folder=Path(settings.cache), training=training)
    yield {
        "status": WRONG if done.errors else OK, "why": "; ".join(done.errors), "kernels": done.kept,
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def launched(stage: str, what: str, settings: Settings) -> tuple[Callable[..., Any], Sequence[Any], bool]:
    """The function of a check, fake inputs, and whether its gradients are taken."""
    if stage == "models":
        model, mode = what.split(", ")
        made = fake_model(MODELS[model], settings.size, settings.target, mode)
        return made.function, made.inputs, mode == TRAINING
    kernel = NamedKernel.of(what)
    with FakeTensorMode():
        inputs = kernel.inputs("cuda" if stage == "timing" else "cpu", "cpu")
    return kernel.case.function, inputs, kernel.mode == TRAINING
