"""Images between convolutions in the layout in which the library is fast: which change, and that nobody sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Compute, Graph, IRModule, Library, View
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import alias_copies, convert_layouts, eliminate_common
from torch_mlc.scheduler.passes.convolution.convert_layouts import channels_last

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    """Convolutions with what lies between them: a norm, a residual, a pooling, an interpolation, a concatenation."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.point = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(self.norm(self.first(x)))
        z = self.second(y) + x
        w = F.interpolate(F.max_pool2d(z, 2), size=z.shape[-2:], mode="nearest")
        return self.point(torch.cat((z, w), 1)), y.mean((2, 3))


def calls(graph: Graph) -> list[Library]:
    return [n for n in graph.nodes if isinstance(n, Library) and n.target == "aten::convolution.default"]


def is_last(call: Library) -> bool:
    kind = call.types[0]
    assert kind is not None
    return kind.strides == channels_last(kind.shape)


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> Graph:
    with torch.no_grad():
        (traced,) = capture(fn, inputs)
    return eliminate_common(import_graph(traced))


def changed(fn: Callable[..., Any], *inputs: Tensor) -> Graph:
    graph = convert_layouts(graph_of(fn, *inputs))
    verify(IRModule({graph.name: graph}, graph.name))
    return graph


@torch.no_grad()
def same(model: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = None) -> None:
    """Values are those of double precision, shapes and strides those of eager."""
    found = torch.compile(model, backend="mlc", dynamic=dynamic, fullgraph=True)(*inputs)
    for one, wanted in zip(flat(found), flat(model(*inputs)), strict=True):
        assert one.shape == wanted.shape and one.stride() == wanted.stride()
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


def flat(values: Any) -> list[Tensor]:
    return list(values) if isinstance(values, tuple) else [values]


def test_large_images_under_small_filters_change() -> None:
    graph = changed(Block().eval(), torch.randn(2, 16, 40, 40))
    assert [is_last(c) for c in calls(graph)] == [True, True, False], "the last one reads a sum with the argument"
    assert [c.reason.endswith("channels innermost in memory") for c in calls(graph)] == [True, True, False]
    kinds = graph.types()
    for name in graph.outputs:
        assert isinstance(name, str)
        assert not (len(kinds[name].shape) == 4 and kinds[name].strides == channels_last(kinds[name].shape))


@pytest.mark.parametrize("shape", [(2, 16, 40, 40), (1, 16, 37, 53), (3, 16, 12, 70)])
def test_nobody_sees_it(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    same(model, torch.randn(shape))
    same(model, torch.randn(shape[0], shape[1], shape[3], shape[2]).transpose(2, 3))


def test_sizes_that_vary() -> None:
    model = Block().eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="mlc", dynamic=True, fullgraph=True)
        for shape in ((2, 16, 40, 40), (3, 16, 21, 33), (1, 16, 64, 64), (4, 16, 2, 2)):
            x = torch.randn(shape)
            for one, wanted in zip(compiled(x), model(x), strict=True):
                assert one.stride() == wanted.stride()
                torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


class Growing(nn.Module):
    """Each convolution reads all that was made so far, which begins with one of two results of a pooling."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(channels * k, channels, 3, padding=1) for k in range(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.max_pool2d(self.first(x), 2, return_indices=True)[0]]
        for layer in self.layers:
            parts.append(layer(F.relu(torch.cat(parts, 1))))
        return torch.cat(parts, 1).sum((2, 3))


def test_views_of_all_of_an_image_change_with_it() -> None:
    model, x = Growing().eval(), torch.randn(2, 3, 48, 48)
    graph = convert_layouts(alias_copies(graph_of(model, x)))
    verify(IRModule({graph.name: graph}, graph.name))
    views = [n for n in graph.nodes if isinstance(n, View) and len(n.type.shape) == 4]
    assert views and all(n.type.strides == channels_last(n.type.shape) for n in views)
    assert all(is_last(c) for c in calls(graph))
    same(model, x)


def test_small_images_under_large_filters_stay() -> None:
    model = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1)).eval()
    graph = changed(model, torch.randn(2, 256, 6, 6))
    assert not any(is_last(c) for c in calls(graph))


def test_images_that_the_caller_brought_into_a_layout_are_left_alone() -> None:
    model = Block().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 16, 40, 40).to(memory_format=torch.channels_last)
    graph = graph_of(model, x)
    assert convert_layouts(graph) is graph
    same(model, x)


def test_what_the_caller_keeps_is_copied_once() -> None:
    """A result in the middle has eager's layout, and what others read of it through a view too."""
    torch.manual_seed(0)
    convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        for k, convolve in enumerate(convolutions):
            x = convolve(x)
            if k == 1:
                kept = x
        return kept, x.flatten(2)

    x = torch.randn(2, 16, 48, 48)
    graph = changed(fn, x)
    assert all(map(is_last, calls(graph)))
    made = [n.name for n in graph.nodes if isinstance(n, Compute)]
    assert len(made) == 3, "one copy of the argument, one of each result"
    same(fn, x)


def test_training_keeps_what_the_backward_pass_was_traced_with() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 16, 24, 24)
    wanted = [p.clone() for p in torch.autograd.grad(model(x)[0].square().mean(), list(model.parameters()))]
    compiled = torch.compile(model, backend="mlc", fullgraph=True)
    found = torch.autograd.grad(compiled(x)[0].square().mean(), list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_explain_says_so() -> None:
    with torch.no_grad():
        report = torch_mlc.explain(Block().eval(), torch.randn(2, 16, 40, 40))
    assert "channels innermost in memory" in str(report)


TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "doubled": ((2, 16, 21, 20), (16, 16, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "kernel of 4": ((3, 24, 17, 19), (24, 12, 4, 4), {"stride": 2, "padding": 1}),
    "uneven": ((2, 16, 15, 23), (16, 8, 3, 5), {"stride": (3, 2), "padding": (1, 0), "output_padding": (2, 1)}),
    "dilation": ((2, 16, 22, 19), (16, 16, 3, 3), {"padding": 2, "dilation": 2}),
    "points": ((2, 16, 31, 30), (16, 16, 1, 1), {"stride": 2}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions_change(name: str) -> None:
    torch.manual_seed(0)
    shape, filters, sizes = TRANSPOSED[name]
    x, w, b = torch.randn(shape), torch.randn(filters) / 8, torch.randn(filters[1])

    def fn(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        y = F.conv_transpose2d(x, w, b, **sizes)
        return (y * 0.5).mean((2, 3)), y.relu().sum(1)

    for bias in (b, None):
        assert all(map(is_last, calls(changed(fn, x, w, bias))))  # type: ignore[arg-type]
        with torch.no_grad():
            found = torch.compile(fn, backend="mlc", fullgraph=True)(x, w, bias)
        wanted = fn(x.double(), w.double(), None if bias is None else bias.double())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_transposed_convolutions_that_stay() -> None:
    """Grouped ones, those of few results, whose library has slow kernels for both, and those of large filters."""
    x = torch.randn(2, 16, 20, 20)
    for filters, groups in (((16, 4, 3, 3), 4), ((16, 3, 4, 4), 1)):
        fn = partial(F.conv_transpose2d, groups=groups)
        w = torch.randn(filters)
        assert not any(map(is_last, calls(changed(lambda x, w, fn=fn: fn(x, w) * 2, x, w))))
    x, w = torch.randn(1, 256, 4, 4), torch.randn(256, 256, 4, 4)
    assert not any(map(is_last, calls(changed(lambda x, w: F.conv_transpose2d(x, w, stride=2) * 2, x, w))))


def test_transposed_convolutions_in_training() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, 21, 20, requires_grad=True), torch.randn(16, 16, 3, 3, requires_grad=True)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1) * 0.5).mean((2, 3))

    found = torch.autograd.grad(torch.compile(fn, backend="mlc", fullgraph=True)(x, w).square().sum(), (x, w))
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    for one, other in zip(found, torch.autograd.grad(fn(xd, wd).square().sum(), (xd, wd)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
