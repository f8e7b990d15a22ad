"""What is folded into weights that do not change: each fold against double precision, and how much work is left."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

import torch_mlc
from tests import warm_processes
from torch_mlc.dynamo_backend.reports.report import GraphReport

FREEZE = {"freeze": True}

pytestmark = pytest.mark.usefixtures("without_gradients")


def check(model: nn.Module, *inputs: Tensor, tolerance: float = 2e-5) -> GraphReport:
    """Compare with double precision at sizes that vary, twice each; what became of the first."""
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="mlc", options=FREEZE, dynamic=len(inputs) > 1)
    for x in (*inputs, inputs[0]):
        got = compiled(x)
        torch.testing.assert_close(got.double(), exact(x.double()), rtol=tolerance, atol=tolerance)
        assert got.stride() == model(x).stride() and got.dtype is x.dtype
    return torch_mlc.explain(model, inputs[0], options=FREEZE).graphs[0]


def spread(model: nn.Module) -> nn.Module:
    """Batch norms with statistics and scales that are not those of a new model."""
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            if norm.affine:
                norm.weight.normal_()
                norm.bias.normal_()
    return model.eval()


def test_batch_norms_are_part_of_the_weights_in_front_of_them() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 6, 3), nn.BatchNorm2d(6),
        nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4, affine=False), nn.Flatten(2), nn.AdaptiveAvgPool1d(1),
        nn.Flatten(), nn.Linear(4, 9), nn.BatchNorm1d(9),
    )  # fmt: skip
    graph = check(spread(model), torch.randn(2, 3, 9, 11))
    assert "batch_norm" not in str(graph.kernels) and len(graph.frozen) == 8


def test_batch_norms_that_others_read_through_stay() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    graph = check(spread(Both()), torch.randn(2, 3, 9))
    assert not any("weight with" in r.told for r in graph.frozen)


class Attention(nn.Module):
    """Queries, keys, values, gate and up as five weights."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        q, k, v = (f(x).view(batch, rows, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, rows, width)
        x = x + self.out(y)
        return silu(self.gate(x)) * self.up(x)


def test_products_of_one_operand_are_one() -> None:
    model = Attention()
    graph = check(model, torch.randn(2, 37, 32), torch.randn(3, 5, 32))
    assert sum(c.calls for c in graph.libraries) == 3
    assert {r.told.split(" weights")[0] for r in graph.frozen if "weights" in r.told} == {"2", "3"}


def test_results_of_the_caller_are_no_columns_of_others() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x).view(-1)

    model, x = Pair(), torch.randn(30, 40)
    for got, wanted in zip(torch.compile(model, backend="mlc", options=FREEZE)(x), model(x), strict=True):
        assert got.stride() == wanted.stride() and got.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


class Packed(nn.Module):
    """A weight of eight bits with a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-100, 100, (640, 640), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(640, 1) / 640)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).t()


def test_weights_of_few_bits_stay_narrow_for_few_rows() -> None:
    few = check(Packed(), torch.randn(1, 640), tolerance=1e-4)
    many = check(Packed(), torch.randn(512, 640), tolerance=1e-4)
    assert not few.frozen and [r.size for r in many.frozen] == [(640, 640)]


def test_a_table_of_embeddings_is_not_copied() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.embedding(x, self.words.weight * 8**0.5)

    graph = torch_mlc.explain(Scaled(), torch.randint(0, 100, (5,)), options=FREEZE).graphs[0]
    assert not graph.frozen


STORED = """
import sys
import torch
from torch import nn
from torch_mlc.runtime.counters import counters

torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
model[1].running_mean.normal_()
x = torch.randn(2, 3, 8, 8)
with torch.no_grad():
    compiled = torch.compile(model, backend="mlc", options={"freeze": True})
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    found = counters.snapshot()
    model[1].running_mean.add_(1)
    try:
        compiled(x)
    except RuntimeError as error:
        print(found.get("graphs_compiled", 0), str(error).split(" changed")[0].split(": ")[-1])
"""


@pytest.mark.slow
def test_no_cache_holds_what_is_in_parameters(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"), "MLC_CACHE_DIR": str(tmp_path / "mlc")}
    told = [warm_processes.start(STORED, str(seed), env=env).output().strip() for seed in range(2)]
    assert told == ["1 1.running_mean", "0 1.running_mean"]
