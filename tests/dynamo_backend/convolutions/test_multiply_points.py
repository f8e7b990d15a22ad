"""Convolutions by single elements as products: which become some, and that values, shapes and strides stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_mlc
from torch_mlc.dynamo_backend.converters.linear import products
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, IRModule, Library
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import eliminate_common, multiply_points

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def targets(fn: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The library calls that the pass leaves or makes."""
    with torch.no_grad():
        (traced,) = capture(fn, inputs)
    graph: Graph = multiply_points(eliminate_common(import_graph(traced)))
    verify(IRModule({graph.name: graph}, graph.name))
    return [n.target.split("::")[1].split(".")[0] for n in graph.nodes if isinstance(n, Library)]


def same(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = None) -> None:
    """Values are those of double precision, types, shapes and strides those of eager."""
    with torch.no_grad():
        found = torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True)(*inputs)
        eager, wanted = fn(*inputs), fn(*(x.double() for x in inputs))
    assert (found.dtype, found.shape, found.stride()) == (eager.dtype, eager.shape, eager.stride())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def points(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight).relu()


def points_with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias).relu()


def bare(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, weight, bias)


def filters(to: int, channels: int, rank: int = 2) -> Tensor:
    return torch.randn(to, channels, *(1,) * rank) / channels**0.5


@pytest.mark.parametrize(
    ("shape", "to", "target"),
    [
        ((8, 64, 14, 14), 256, "bmm"),
        ((1, 64, 14, 14), 256, "mm"),
        ((8, 512, 7, 7), 64, "bmm"),
        ((8, 512, 7, 7), 512, "convolution"),
        ((1, 512, 7, 7), 512, "mm"),
        ((8, 512, 16, 16), 512, "bmm"),
    ],
    ids=str,
)
def test_small_images_of_many_channels_stay(shape: tuple[int, ...], to: int, target: str) -> None:
    assert targets(points, torch.randn(shape), filters(to, shape[1])) == [target]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.conv2d(x, w, stride=2),
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: F.conv2d(x, w[:, :8], groups=2),
        lambda x, w: F.conv2d(x, w.expand(-1, -1, 3, 3).contiguous()),
        lambda x, w: F.conv2d(x.bfloat16(), w.bfloat16()),
        lambda x, w: F.conv_transpose2d(x, w[:16]),
    ],
    ids=["stride", "padding", "groups", "window", "half type", "transposed"],
)
def test_others_stay(fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies", lambda dtype: True)  # as some CPUs do; on others they are converted
    made = targets(fn, torch.randn(2, 16, 20, 20), filters(32, 16))
    assert "bmm" not in made and "convolution" in made


def test_a_bias_is_added_where_a_kernel_reads_the_result() -> None:
    x, weight, bias = torch.randn(2, 16, 20, 20), filters(32, 16), torch.randn(32)
    assert targets(points_with_bias, x, weight, bias) == ["bmm"]
    assert targets(bare, x, weight, bias) == ["convolution"], "the library adds it on its way"
    assert targets(bare, x, weight) == ["bmm"]
    assert targets(lambda *a: bare(*a).flatten(1) @ x.new_ones(32 * 400, 4), x, weight, bias)[0] == "convolution"


@pytest.mark.parametrize("shape", [(2, 16, 20, 20), (1, 16, 5, 7), (8, 512, 7, 7)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_images_with_channels_innermost_are_one_matrix(shape: tuple[int, ...], with_bias: bool) -> None:
    x = torch.randn(shape).to(memory_format=torch.channels_last)
    rest = (filters(24, shape[1]), *([torch.randn(24)] if with_bias else []))
    assert targets(bare, x, *rest) == ["addmm" if with_bias else "mm"]
    same(bare, x, *rest)
    same(lambda *a: bare(*a).relu().sum(1), x, *rest)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_stencil_tells_rows_of_pixels_apart(stride: int) -> None:
    torch.manual_seed(0)

    def fn(x: Tensor, wide: Tensor, deep: Tensor) -> Tensor:
        y = F.relu6(F.conv2d(x, wide) * 3 + 1)
        return F.conv2d(y, deep, None, stride, 1, 1, 24).relu()

    x = torch.randn(3, 16, 9, 7).to(memory_format=torch.channels_last)
    given = x, filters(24, 16), torch.randn(24, 1, 3, 3)
    with torch.no_grad():
        (graph,) = torch_mlc.explain(fn, *given).graphs
    assert [k.rule for k in graph.kernels] == ["cpu_stencil"], "with all that is made of an element"
    same(fn, *given)


@pytest.mark.parametrize("shape", [(2, 5, 9, 7), (1, 5, 9, 7), (3, 1, 1, 8), (2, 4, 1, 1), (0, 4, 6, 5)])
def test_values_and_strides_are_eagers(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), filters(7, shape[1]), torch.randn(7)
    same(points, x, weight)
    same(points_with_bias, x, weight, bias)
    same(bare, x, weight)


@pytest.mark.parametrize("convolve", [F.conv1d, F.conv3d])
def test_images_of_other_ranks(convolve: Callable[..., Tensor]) -> None:
    rank = 1 if convolve is F.conv1d else 3
    x, weight, bias = torch.randn(3, 6, *range(5, 5 + rank)), filters(4, 6, rank), torch.randn(4)
    assert targets(lambda *a: convolve(*a).relu(), x, weight, bias) == ["bmm"]
    same(lambda *a: convolve(*a).relu(), x, weight, bias)


def test_sizes_that_vary() -> None:
    weight, bias = filters(8, 6), torch.randn(8)
    for shape in ((2, 6, 20, 30), (3, 6, 17, 5), (1, 6, 9, 9), (4, 6, 1, 1)):
        same(points_with_bias, torch.randn(shape), weight, bias, dynamic=True)


@pytest.mark.parametrize("shape", [(3, 6, 11, 7), (1, 6, 11, 7), (2, 6, 1, 1)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients(shape: tuple[int, ...], dynamic: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 9, 1), nn.GroupNorm(3, 9), nn.ReLU(), nn.Conv2d(9, 4, 1, bias=False))
    x = torch.randn(shape, requires_grad=True)
    leaves = [x, *model.parameters()]
    found = torch.autograd.grad(torch.compile(model, backend="mlc", dynamic=dynamic)(x).square().sum(), leaves)
    wide, y = model.double(), x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(wide(y).square().sum(), [y, *wide.parameters()])
    for one, other in zip(found, wanted, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_images_are_products_of_their_own(frozen: bool) -> None:
    x, weight = torch.randn(2, 16, 20, 20, requires_grad=True), filters(32, 16).requires_grad_(not frozen)
    _, backward = torch_mlc.explain(lambda a, b: F.conv2d(a, b).sin(), x, weight, training=True).graphs
    made = [call.op for call in backward.libraries]
    assert ["bmm" in op for op in made].count(True) == 1
    assert ["convolution_backward" in op for op in made].count(True) == (not frozen)


def test_the_report_says_why() -> None:
    told = str(torch_mlc.explain(points, torch.randn(2, 16, 20, 20), filters(32, 16)))
    assert "a convolution by single elements: a product for each image" in told
