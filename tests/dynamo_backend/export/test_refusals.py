"""What cannot be exported is refused with all of it: op, line of the model, reason, how to mend it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from torch_mlc.dynamo_backend.export.assemble import assemble
from torch_mlc.dynamo_backend.export.errors import ExportError

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def refused(model: nn.Module, *inputs: Any, dynamic: Any = None, **how: Any) -> str:
    program = export(model, inputs, dynamic_shapes=dynamic)
    with pytest.raises(ExportError) as caught:
        assemble(program, **how)
    return str(caught.value)


def test_every_operation_is_told_and_not_only_the_first() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            spectrum = torch.fft.rfft(x).abs()
            values = torch.linalg.eigvalsh(x @ x.t())
            return spectrum, values

    told = refused(Model(), torch.randn(4, 4))
    assert "test_refusals.py" in told and "torch.fft.rfft(x)" in told and "torch.linalg.eigvalsh" in told
    assert "aten::_fft_r2c" in told and "aten::_linalg_eigh" in told and "To mend" in told


def test_sizes_of_data() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.nonzero()

    assert "aten::nonzero" in refused(Counts(), torch.randn(4))


def test_sizes_that_are_fractions_of_others() -> None:
    class Resize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear") + 1

    told = refused(Resize(), torch.randn(1, 3, 8, 8), dynamic=({2: Dim("rows", min=2, max=40)},))
    assert "cannot be exported" in told and "fractions" in told


def test_signatures_without_tensors() -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor, n: int) -> Any:
            return x * n, x.shape[0]

    told = refused(Sizes(), torch.randn(4, 3), 2, dynamic=({0: Dim("b")}, None))
    assert "and no tensor" in told


def test_state_that_shares_memory() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("all", torch.zeros(4, 4))
            self.register_buffer("row", self.all[0])

        def forward(self, x: Tensor) -> Tensor:
            self.row.add_(x)
            return self.all.sum(0) + self.row

    assert "all and row lie in the same memory" in refused(Model(), torch.randn(4))


def test_names_and_targets() -> None:
    model, x = nn.Linear(3, 2), torch.randn(1, 3)
    assert "identifier of C" in refused(model, x, name="my model")
    assert "'sm_90' is none" in refused(model, x, targets=("sm_90",))
    assert "libraries=" in refused(model, x, libraries=("blis",))
    program = export(model, (x,))
    with pytest.raises(ExportError, match="identifier of C"):
        assemble({"first step": program})
