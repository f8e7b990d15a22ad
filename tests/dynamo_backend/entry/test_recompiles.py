"""The benchmarks' models at five lengths and three batch sizes: compiled as often as torch alone would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.models.registry import MODELS

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# Sizes that a model's inputs may have, by the name of what varies; batches alone where nothing else does.
LENGTHS: Mapping[str, tuple[int, ...]] = {
    "seq": (8, 5, 16, 13, 32), "length": (8, 5, 16, 13, 32), "image": (32, 16, 48, 64, 80),
}  # fmt: skip
BATCHES = (3, 2, 5)
# The model that does for the others by default: nothing but its batch varies.
ALWAYS = ("dlrm", False)


def sizes_of(name: str) -> Iterator[dict[str, int]]:
    """Every batch with every length."""
    varying = {d.name for d in MODELS[name].dynamic}
    (length,) = varying & LENGTHS.keys() or (None,)
    for batch, extent in itertools.product(BATCHES, LENGTHS[length] if length else (None,)):
        yield {"batch": batch} | ({length: extent} if length and extent else {})


def compilations(name: str, training: bool, backend: str) -> int:
    """How often one compiled function of a model is compiled over all sizes: static at first, then with symbols."""
    spec = MODELS[name]
    model = spec.build("tiny").train(training)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(model, backend=counter)
    for sizes in sizes_of(name):
        batch = spec.inputs("tiny", **sizes)
        with torch.set_grad_enabled(training):
            result = spec.loss_of(run(*batch.args), batch)
            if training:
                result.backward()
                model.zero_grad()
    return int(counter.frame_count)


@pytest.mark.parametrize(
    ("name", "training"),
    [pytest.param(name, training, marks=[] if (name, training) == ALWAYS else [pytest.mark.slow])
     for name, spec in MODELS.items() for training in (False, True)[: 1 + spec.trains]],
)  # fmt: skip
def test_sizes_that_vary_are_compiled_as_often_as_without_us(name: str, training: bool) -> None:
    assert compilations(name, training, "mlc") == compilations(name, training, "aot_eager")
