"""Views that move nothing are seen through, and softmaxes of what is left below the largest are softmaxes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_mlc.dynamo_backend.aten_passes.attention.shifted_softmax import unshift_softmax
from torch_mlc.dynamo_backend.aten_passes.views.plain_views import straighten_views

aten = torch.ops.aten
Fn = Callable[[Tensor], Tensor]
X = torch.arange(24.0).reshape(2, 3, 4)


def traced(function: Fn, x: Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(x)


def rest(gm: fx.GraphModule) -> list[str]:
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function" and "sym_size" not in str(n.target)]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    ("views", "left"),
    [
        (lambda x: x.unsqueeze(3).permute(0, 1, 3, 2).permute(0, 1, 3, 2).squeeze(3), []),
        (lambda x: x.unsqueeze(1).permute(0, 2, 1, 3), ["aten.view.default"]),
        (lambda x: aten.view(x.unsqueeze(3).permute(0, 1, 3, 2), [6, 4]), ["aten.view.default"]),
        (lambda x: aten.expand(x[:1].transpose(0, 1), [3, 1, 4]), ["aten.slice.Tensor", "aten.view.default"]),
        (lambda x: x.mT.unsqueeze(0).transpose(-1, -2).squeeze(0), []),
        (lambda x: aten.view(x.permute(2, 0, 1).unsqueeze(1).permute(2, 3, 1, 0), [2, 12]), ["aten.view.default"]),
    ],
)
def test_straight(views: Fn, left: list[str], mode: str) -> None:
    gm = traced(lambda x: views(x).sin(), X, mode)
    assert straighten_views(gm.graph)
    assert rest(gm) == [*left, "aten.sin.default"]
    assert torch.equal(gm(X), views(X).sin())
    assert gm(X).shape == views(X).shape


@pytest.mark.parametrize(
    "views",
    [
        lambda x: x.unsqueeze(1).permute(0, 3, 1, 2).squeeze(2),
        lambda x: x.mT.unsqueeze(0),
        lambda x: x.mT.reshape(2, 12),
        lambda x: x[:, :2].mT.expand(3, 2, 4, 2),
        lambda x: x.flatten().view(4, 6),
    ],
)
def test_the_rest_says_what_it_did(views: Fn) -> None:
    gm = traced(lambda x: views(x).sin(), X)
    assert straighten_views(gm.graph) == 0
    rest(gm)
    assert torch.equal(gm(X), views(X).sin())


def test_what_leaves_the_graph_stays_a_view() -> None:
    gm = traced(lambda x: x.unsqueeze(3).permute(0, 1, 3, 2), X)
    assert straighten_views(gm.graph) == 0


SHIFTED: list[tuple[Fn, int]] = [
    (lambda x: torch.softmax(x - x.amax(-1, keepdim=True), -1), 1),
    (lambda x: torch.softmax(x - x.max(1, keepdim=True)[0].detach(), 1), 1),
    (lambda x: torch.log_softmax(x - x.amax(-1, keepdim=True), 2), 1),
    (lambda x: torch.softmax(x - x.amax(0, keepdim=True), -1), 0),
    (lambda x: torch.softmax(x - x.amax((1, 2), keepdim=True), -1), 0),
    (lambda x: torch.softmax(x - x.amin(-1, keepdim=True), -1), 0),
    (lambda x: torch.softmax(torch.sub(x, x.amax(-1, keepdim=True), alpha=2), -1), 0),
    (lambda x: torch.softmax(x.amax(-1, keepdim=True) - x, -1), 0),
]


@pytest.mark.parametrize(("fn", "found"), SHIFTED)
def test_softmax_below_the_largest(fn: Fn, found: int) -> None:
    x = torch.randn(6, 5, 7) * 10
    inf, nan = float("inf"), float("nan")
    x[0, 0, 0], x[1, 1, 1], x[2, 2, 2], x[3, 3], x[4, 4] = inf, -inf, nan, -inf, 3e38
    gm = traced(fn, x)
    assert unshift_softmax(gm.graph) == found
    rest(gm)
    assert torch.equal(gm(x).view(torch.int32) & 0x7FC00000, fn(x).view(torch.int32) & 0x7FC00000)
    torch.testing.assert_close(gm(x), fn(x), rtol=0, atol=0, equal_nan=True)
