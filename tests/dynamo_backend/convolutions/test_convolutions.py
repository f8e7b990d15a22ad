"""Convolutions: which become loops, what those compute (oracle, machine code), and what fuses with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torch_mlc
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, Input, IRModule, Library
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.facts.convolution import (
    Names,
    convolution,
    decompose_bias_gradient,
    decompose_forward,
    decompose_input_gradient,
    decompose_weight_gradient,
)
from torch_mlc.scheduler.passes import decompose_convolutions, eliminate_dead

Import = Callable[..., Graph]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 3e-3}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Any:
    return torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True)(*inputs)


def close(result: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    t = TOLERANCE[dtype]
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(result.double(), wanted.double(), rtol=t, atol=t * max(scale, 1.0))


# --- the meaning of opened convolutions, by the oracle ----------------------------------------------------------------

# Size, kernel, stride, padding, dilation, channel multiplier.
Geometry = tuple[tuple[int, ...], tuple[int, ...], int, int, int, int]
GEOMETRIES: dict[str, Geometry] = {
    "3x3": ((5, 6), (3, 3), 1, 1, 1, 1),
    "stride": ((7, 5), (3, 3), 2, 1, 1, 1),
    "stride beyond the kernel": ((9, 8), (2, 2), 3, 1, 1, 1),
    "dilation": ((7, 8), (3, 2), 1, 2, 2, 1),
    "no padding": ((5, 7), (3, 5), 1, 0, 1, 1),
    "wide padding": ((2, 3), (3, 3), 1, 2, 1, 1),
    "multiplier": ((4, 5), (3, 3), 2, 1, 1, 2),
    "one column": ((6, 4), (3, 1), 1, 1, 1, 1),
    "points": ((3, 4), (1, 1), 1, 0, 1, 1),
    "1d": ((9,), (4,), 2, 1, 1, 1),
    "3d": ((3, 4, 3), (2, 3, 2), 1, 1, 1, 1),
}


def case(
    name: str, dtype: torch.dtype = torch.float64, transposed: bool = False
) -> tuple[Callable[..., Any], Tensor, Tensor, Tensor]:
    size, kernel, stride, padding, dilation, many = GEOMETRIES[name]
    channels, rank = 3, len(size)
    x = torch.randn(2, channels, *size).to(dtype)
    w = torch.randn(*((channels, many) if transposed else (channels * many, 1)), *kernel).to(dtype)
    b = torch.randn(channels * many).to(dtype)

    def fn(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.convolution(
            x, w, b, [stride] * rank, [padding] * rank, [dilation] * rank, transposed, [0] * rank, channels
        )

    return fn, x, w, b


@pytest.fixture
def imported(trace: Callable[..., fx.GraphModule]) -> Callable[..., Graph]:
    """``imported(fn, *inputs)``: the graph of a function, its inputs in order."""
    return lambda fn, *inputs: import_graph(trace(fn, inputs))


def opened(graph: Graph) -> Graph:
    """The one convolution of a graph opened, all its gradients, whatever they cost."""
    (node,) = graph.nodes
    c = convolution(node, graph.types())
    assert c is not None and c.is_depthwise and isinstance(node, Library)
    if not c.is_backward:
        nodes = decompose_forward(c, Names(node.names[0], "total"), "")
    else:
        builds = (decompose_input_gradient, decompose_weight_gradient, decompose_bias_gradient)
        nodes = []
        for k, build in enumerate(builds):
            kind = node.types[k]
            assert kind is not None
            nodes += build(c, Names(node.names[k], f"total{k}"), kind, "")
    graph = replace(graph, nodes=tuple(nodes))
    verify(IRModule({"main": graph}))
    return graph


def answers(graph: Graph, *inputs: Tensor) -> list[Tensor]:
    """The oracle's results."""
    arrays = {i.name: t.numpy() for i, t in zip(graph.inputs, inputs, strict=True) if isinstance(i, Input)}
    found = run_graph(graph, arrays, {})
    return [torch.from_numpy(np.asarray(found[o])) for o in graph.outputs]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_an_opened_convolution_is_that_convolution(name: str, imported: Import) -> None:
    fn, x, w, b = case(name)
    (result,) = answers(opened(imported(fn, x, w, b)), x, w, b)
    torch.testing.assert_close(result, fn(x, w, b))


@pytest.mark.parametrize("name", [n for n in GEOMETRIES if n not in ("wide padding",)])
def test_opened_gradients_are_those_gradients(name: str, imported: Import) -> None:
    fn, x, w, b = case(name)
    _, kernel, stride, padding, dilation, _ = GEOMETRIES[name]
    rank = len(kernel)
    grad = torch.randn_like(fn(x, w, b))

    def backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.convolution_backward(
            grad, x, w, [w.shape[0]], [stride] * rank, [padding] * rank, [dilation] * rank, False, [0] * rank,
            x.shape[1], [True, True, True],
        )  # fmt: skip

    results = answers(opened(imported(backward, grad, x, w)), grad, x, w)
    for result, wanted in zip(results, backward(grad, x, w), strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("name", ["3x3", "stride", "stride beyond the kernel", "dilation", "multiplier", "1d"])
def test_an_opened_transposed_convolution_is_that(name: str, imported: Import) -> None:
    fn, x, w, b = case(name, transposed=True)
    (result,) = answers(opened(imported(fn, x, w, b)), x, w, b)
    torch.testing.assert_close(result, fn(x, w, b))


@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("padding", [0, 1], ids=str)
def test_what_an_output_padding_adds_is_met_by_the_taps_that_reach_it(kernel: tuple[int, ...], padding: int) -> None:
    """A dilation allows an output padding where filters have a single tap and steps are ones."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.conv_transpose2d(x.relu(), w, None, 1, padding, 1, 4, 2).exp()

    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 1, *kernel)
    close(compiled(fn, x, w), fn(x, w), torch.float32)
    close(compiled(fn, x, w, dynamic=True), fn(x, w), torch.float32)


# --- decisions --------------------------------------------------------------------------------------------------------


def test_what_is_opened_and_why(imported: Import) -> None:
    x, w = torch.randn(1, 8, 6, 6), torch.randn(8, 1, 3, 3)
    assert not any(
        isinstance(n, Library)
        for n in decompose_convolutions(imported(lambda x, w: F.conv2d(x, w, groups=8), x, w)).nodes
    )
    for groups, weight in ((1, torch.randn(4, 8, 3, 3)), (2, torch.randn(4, 4, 3, 3))):
        (node,) = decompose_convolutions(imported(partial(F.conv2d, groups=groups), x, weight)).nodes
        assert isinstance(node, Library) and node.reason == "convolution: oneDNN"
    big = torch.randn(8, 1, 13, 13)
    (node,) = decompose_convolutions(imported(lambda x, w: F.conv2d(x, w, padding=6, groups=8), x, big)).nodes
    assert isinstance(node, Library) and "169 elements" in node.reason


def test_of_a_backward_the_library_makes_what_is_left(imported: Import) -> None:
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 3, 3)
    grad = torch.randn(2, 4, 6, 6)

    def fn(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.convolution_backward(
            grad, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 4, [True, True, True]
        )

    graph = eliminate_dead(decompose_convolutions(imported(fn, grad, x, w)))
    verify(IRModule({"main": graph}))
    (call,) = (n for n in graph.nodes if isinstance(n, Library))
    assert call.args[-1] == (False, True, True) and call.types[0] is None
    for result, wanted in zip(compiled(fn, grad, x, w), fn(grad, x, w), strict=True):
        close(result, wanted, torch.float32)


# --- machine code -----------------------------------------------------------------------------------------------------

# Batch, channels, height, width, kernel, stride, dilation.
IMAGES = {
    "registers": (2, 16, 16, 16, 3, 1, 1),
    "odd": (1, 5, 13, 11, 3, 1, 1),
    "stride": (2, 9, 15, 33, 3, 2, 1),
    "seven": (1, 24, 9, 17, 7, 1, 1),
    "dilated": (1, 3, 12, 19, 3, 1, 3),
    "small": (3, 33, 7, 7, 3, 1, 1),
    "no images": (0, 4, 8, 8, 3, 1, 1),
    "one pixel": (2, 4, 1, 1, 3, 1, 1),
    "four apart": (1, 4, 17, 35, 5, 4, 1),
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_depthwise_with_what_follows(name: str, layout: torch.memory_format, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and name not in ("odd", "stride", "no images"):
        pytest.skip("as in float32")
    if layout is torch.channels_last and name in ("four apart", "dilated", "one pixel"):
        pytest.skip("lanes are channels whatever the windows")
    n, c, h, w, k, stride, dilation = IMAGES[name]
    x = torch.randn(n, c, h, w).to(dtype).to(memory_format=layout)
    weight, bias, scale = torch.randn(c, 1, k, k).to(dtype), torch.randn(c).to(dtype), torch.rand(c, 1, 1).to(dtype)

    def fn(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        y = F.conv2d(x, weight, bias, stride, dilation * (k // 2), dilation, c)
        return F.relu(y * scale)

    result = compiled(fn, x, weight, bias, scale)
    plain = fn(x, weight, bias, scale)
    assert result.dtype == plain.dtype and (h == 1 or result.stride() == plain.stride())
    close(result, fn(*(t.double() for t in (x, weight, bias, scale))), dtype)


def test_sizes_that_vary() -> None:
    w, b = torch.randn(8, 1, 3, 3), torch.randn(8)
    fn = torch.compile(lambda x: F.hardswish(F.conv2d(x, w, b, 1, 1, 1, 8)), backend="mlc", dynamic=True)
    for shape in ((2, 8, 9, 11), (3, 8, 16, 24), (1, 8, 5, 70)):
        x = torch.randn(shape)
        close(fn(x), F.hardswish(F.conv2d(x.double(), w.double(), b.double(), 1, 1, 1, 8)), torch.float32)


def test_a_separable_layer_trains() -> None:
    model = nn.Sequential(
        nn.Conv2d(6, 6, 3, 1, 1, groups=6), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1, groups=6), nn.Conv2d(6, 4, 1)
    )
    x = torch.randn(2, 6, 12, 10, requires_grad=True)
    compiled(model, x).square().sum().backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    exact = model.double()
    wide = x.detach().double().requires_grad_()
    exact(wide).square().sum().backward()
    for result, wanted in zip(got, [wide.grad, *(p.grad for p in exact.parameters())], strict=True):
        assert result is not None and wanted is not None
        close(result, wanted, torch.float32)


def test_one_kernel_with_norm_activation_and_residual() -> None:
    norm = nn.BatchNorm2d(16).eval()
    w = torch.randn(16, 1, 3, 3)

    def fn(x: Tensor) -> Tensor:
        return x + F.relu6(norm(F.conv2d(x, w, None, 1, 1, 1, 16)))

    with torch.no_grad():
        (graph,) = torch_mlc.explain(fn, torch.randn(2, 16, 12, 12)).graphs
    assert len(graph.kernels) == 1 and not graph.libraries
    assert graph.kernels[0].rule == "cpu_stencil"


def test_infinities_stay_in_the_windows_that_hold_them() -> None:
    x, w = torch.zeros(1, 2, 9, 9), torch.ones(2, 1, 3, 3)
    x[0, 0, 4, 4], x[0, 1, 0, 8] = float("inf"), float("nan")
    fn = lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 2)  # noqa: E731
    torch.testing.assert_close(compiled(fn, x, w), fn(x, w), equal_nan=True)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_norm_in_front_of_a_stencil_is_made_in_its_scratch(stride: int) -> None:
    torch.manual_seed(0)
    norm, w = nn.BatchNorm2d(16).eval(), torch.randn(16, 1, 3, 3)
    with torch.no_grad():
        for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            t.copy_(torch.rand(16) + 0.5)

    def fn(x: Tensor) -> Tensor:
        return F.conv2d(F.relu6(norm(x)), w, None, stride, 1, 1, 16)

    x = torch.randn(2, 16, 13, 11)
    with torch.no_grad():
        (graph,) = torch_mlc.explain(fn, x).graphs
        result, plain = compiled(fn, x), fn(x)
    assert [k.rule for k in graph.kernels] == ["cpu_stencil"]
    torch.testing.assert_close(result, plain)


def test_a_norm_that_others_read_too_is_made_once() -> None:
    norm, w = nn.BatchNorm2d(16).eval(), torch.randn(16, 1, 3, 3)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu6(norm(x).tanh())
        return F.conv2d(y, w, None, 1, 1, 1, 16), y

    with torch.no_grad():
        (graph,) = torch_mlc.explain(fn, torch.randn(2, 16, 13, 11)).graphs
    assert sum("tanh" in k.loops for k in graph.kernels) == 1


def test_channels_last_norms_are_factors_made_once_that_stencils_apply() -> None:
    norms = [nn.BatchNorm2d(16).eval() for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
                t.copy_(torch.rand(16) + 0.5)
    w = torch.randn(16, 1, 3, 3)

    def fn(x: Tensor) -> Tensor:
        y = F.relu6(norms[0](torch.sin(x)))
        return norms[1](F.conv2d(y, w, None, 1, 1, 1, 16))

    x = torch.randn(2, 16, 17, 19).to(memory_format=torch.channels_last)
    with torch.no_grad():
        (graph,) = torch_mlc.explain(fn, x).graphs
        result, plain = compiled(fn, x), fn(x)
    assert len([k for k in graph.kernels if k.rule == "cpu_stencil"]) == 1
    assert not any("rsqrt" in k.loops for k in graph.kernels if k.rule == "cpu_stencil")
    assert sum("rsqrt" in k.loops for k in graph.kernels) == 1
    torch.testing.assert_close(result, plain)
