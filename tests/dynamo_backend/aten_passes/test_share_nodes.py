"""Equal nodes are merged where that cannot be seen, and most of Inductor stays unloaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests import warm_processes
from torch_mlc.dynamo_backend.aten_passes.share_nodes import share_nodes

aten = torch.ops.aten


def traced(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def check(function: Callable[..., object], merged: int, *inputs: Tensor) -> None:
    gm = traced(function, *inputs)
    before = len(targets(gm))
    assert share_nodes(gm.graph) == merged
    gm.graph.lint()
    gm.recompile()
    assert len(targets(gm)) == before - merged
    for mine, eager in zip(gm(*(t.clone() for t in inputs)), function(*(t.clone() for t in inputs)), strict=True):
        assert torch.equal(mine, eager)


X = torch.arange(6.0).reshape(2, 3)


def test_chains_of_equal_nodes_become_one() -> None:
    check(lambda x: (x.sin().exp() + x.sin().exp() * 2,), 2, X)


def test_literals_count_with_their_type_and_sign() -> None:
    check(lambda x: (aten.mul(x, 1).sin() + aten.mul(x, 1.0).sin(),), 0, X)
    check(lambda x: (aten.mul(x, 0.0).reciprocal() - aten.mul(x, -0.0).reciprocal(),), 0, X)
    check(lambda x: (aten.sum(x, [0]).sin() * aten.sum(x, [1]).sum(),), 0, X)


def test_a_copy_in_memory_like_its_own_is_what_it_copies() -> None:
    check(lambda x: (aten.copy(aten.empty_like(x), x.sin()) + 1,), 2, X)
    check(lambda x: (aten.copy(x, x.sin()) + 1,), 1, X)


def test_a_copy_in_other_memory_stays() -> None:
    for source in (X.T.contiguous().T, X[:1], X.double()):
        check(lambda x, s: (aten.copy(aten.empty_like(x), s.sin()) + 1,), 0, X, source)
    check(lambda x, s: (aten.copy(aten.empty_like(x), s) + 1,), 0, X, X + 1)


def test_what_leaves_the_graph_keeps_memory_of_its_own() -> None:
    check(lambda x: (x.exp(), x.exp()), 0, X)
    check(lambda x: (x.exp().view(-1), x.exp() + 1), 0, X)
    # One of several results of an op, alone and through a view.
    check(lambda x: (x.sort()[0], x.sort()[0]), 0, X)
    check(lambda x: (x.max(1)[0].view(-1), x.max(1)[0] + 1), 0, X)
    check(lambda x: (x.topk(2)[1] + x.topk(2)[1],), 3, X)


@pytest.mark.parametrize("of", [lambda x: x.sort()[0], lambda x: x.max(1)[0], lambda x: torch.linalg.qr(x)[1]])
def test_a_result_may_be_written_over_beside_its_equal(of: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    one, other = torch.compile(lambda x: (of(x), of(x)), backend="mlc")(x)
    with torch.no_grad():
        one.zero_()
    torch.testing.assert_close(other.detach(), of(X))


def test_random_and_empty_results_are_not_equal() -> None:
    gm = traced(lambda x: (torch.rand_like(x) + torch.rand_like(x) + torch.bernoulli(x) * torch.bernoulli(x),), X)
    assert share_nodes(gm.graph) == 0
    gm = traced(lambda x: (torch.empty_like(x).fill_(1) + torch.empty_like(x).fill_(2),), X)
    assert share_nodes(gm.graph) == 0


def test_a_write_stands_between() -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        before = x.sin()
        x.copy_(before * 2)
        return (before + x.sin(),)

    check(function, 0, X)


def test_arguments_of_higher_ops_keep_memory_of_their_own() -> None:
    gm = traced(lambda x: (x.exp() * 2 + x.exp() * 3,), X)
    first = next(n for n in gm.graph.nodes if n.target is aten.exp.default)
    with gm.graph.inserting_after(first):
        gm.graph.call_function(torch.ops.higher_order.auto_functionalized_v2, (first,))
    assert share_nodes(gm.graph) == 0


def test_training_without_inductor() -> None:
    """The partitioner would load its pattern matcher to do the same, and AOTAutograd's wrapper its log."""
    program = (
        "import sys, torch\n"
        "f = lambda x, w: (torch.nn.functional.layer_norm(x @ w, (4,)).tanh() * x.tanh()).sum()\n"
        "x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)\n"
        "torch.compile(f, backend='mlc')(x, w).backward()\n"
        "got = x.grad; x.grad = None; f(x, w).backward()\n"
        "torch.testing.assert_close(got, x.grad)\n"
        "heavy = [f'torch._inductor.{m}' for m in ('pattern_matcher', 'lowering', 'scheduler')]\n"
        "assert not [m for m in heavy if m in sys.modules]\n"
    )
    warm_processes.start(program).output()


@pytest.mark.parametrize(("begin", "merged"), [(0, 1), (4, 0)])
def test_a_copy_that_begins_elsewhere_in_its_memory_stays(begin: int, merged: int) -> None:
    """Views are told by where they begin in what they look at: torch may take that of a copy to be the place's."""
    gm = traced(lambda x: aten.copy(x, x.flip(0)).t() * 2, X)
    (copy,) = gm.graph.find_nodes(op="call_function", target=aten.copy.default)
    value = copy.meta["val"]
    with value.fake_mode:
        copy.meta["val"] = torch.empty(10).as_strided(value.shape, value.stride(), begin)
    assert share_nodes(gm.graph) == merged
