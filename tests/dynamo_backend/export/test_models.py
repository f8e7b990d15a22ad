"""The models of the benchmarks, in their least size, without any library: against eager, twice in a row."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.export import export
from torch.utils._pytree import tree_leaves

from benchmarks.models.registry import MODELS
from tests.dynamo_backend.export.jitted import Jitted
from torch_mlc.dynamo_backend.export.assemble import assemble

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_the_benchmarks(name: str) -> None:
    spec = MODELS[name]
    model, inputs = spec.build("tiny").eval(), spec.inputs("tiny").args
    jitted = Jitted(assemble(export(copy.deepcopy(model), inputs)))
    mine: list[Tensor] = [x.clone() for x in inputs]
    theirs: list[Tensor] = [x.clone() for x in inputs]
    with torch.no_grad():
        for _ in range(2):
            found, wanted = jitted.call(*mine), tree_leaves(model(*theirs))
            for a, b in zip((*found, *mine), (*wanted, *theirs), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
