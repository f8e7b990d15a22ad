"""Code of the user's inside of a compiled graph: custom ops, Triton kernels, checkpoints, breaks. Eager's answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@torch.library.custom_op("mlc_tests::wave", mutates_args=())
def wave(x: Tensor, k: float) -> Tensor:
    return torch.sin(x) * k


@wave.register_fake
def _(x: Tensor, k: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.k = inputs[1]


wave.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[0].cos() * ctx.k, None), setup_context=_keep)


@torch.library.custom_op("mlc_tests::scale_", mutates_args=("x",))
def scale_(x: Tensor, y: Tensor) -> None:
    x.mul_(y.sum())


@torch.library.custom_op("mlc_tests::fill_", mutates_args=("a", "b"))
def fill_(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a.copy_(c * 2)
    b.copy_(c + 1)
    return c.sum()


@fill_.register_fake
def _(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return c.new_empty(())


@torch.library.custom_op("mlc_tests::pieces", mutates_args=())
def pieces(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.sum(), [x * 2, x.t().contiguous()]


@pieces.register_fake
def _(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.new_empty(()), [torch.empty_like(x), x.new_empty((x.shape[1], x.shape[0]))]


@torch.library.custom_op("mlc_tests::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def agree(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = None, fullgraph: bool = True) -> None:
    """Results, what becomes of the inputs, and gradients."""
    ours, theirs = ([x.detach().clone().requires_grad_(x.requires_grad) for x in inputs] for _ in range(2))
    expected = fn(*theirs)
    got = torch.compile(fn, backend="mlc", fullgraph=fullgraph, dynamic=dynamic)(*ours)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours, theirs)
    for results in (expected, got):
        found = [(t * t).sum() for t in tree_leaves(results) if t.requires_grad]
        if found:
            sum(found).backward()  # type: ignore[union-attr]
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs])


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape)


# --- ops of the user's ------------------------------------------------------------------------------------------------


def test_a_functional_op() -> None:
    for fn in (lambda x: wave(x * 2, 3.0) + x.cos(), lambda x: wave((x * 2).t(), 3.0).t() + 1):
        agree(fn, wide(4, 9).requires_grad_())
        agree(fn, wide(5, 7), dynamic=True)


def test_results_in_lists() -> None:
    def fn(x: Tensor) -> Tensor:
        total, (double, turned) = pieces(x.exp())
        return (double + total).sin() * turned.t()

    agree(fn, wide(4, 9))
    agree(fn, wide(5, 7), dynamic=True)


def test_a_size_that_an_op_decides() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        agree(lambda x: positive(x * 2).cumsum(0) + 1, wide(4, 9))


def one(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    scale_(z, y)
    return z + 1


def given(x: Tensor, y: Tensor) -> Tensor:
    scale_(x, y.cos())
    return x.sin()


def part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x.exp()
    before = z * 3
    scale_(z[1:3], y)
    return z * 2, before


def two_parts(x: Tensor, y: Tensor) -> Tensor:
    room = torch.zeros(2, 4, 9)
    total = fill_(room[0], room[1], x * y)
    return room.sum(0) + total


def same_twice(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    scale_(z, z)
    w = z.t() + 1
    scale_(w, z)
    return z + w.t()


@pytest.mark.parametrize("fn", [one, given, part, two_parts, same_twice], ids=lambda f: f.__name__)
def test_ops_that_write_to_their_arguments(fn: Callable[..., Any]) -> None:
    agree(fn, wide(4, 9), wide(4, 9))


def test_written_arguments_in_training_and_of_any_size() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        w = z.clone()
        with torch.no_grad():
            scale_(w, y)
        return z * w

    agree(fn, wide(4, 9).requires_grad_(), wide(3))
    agree(part, wide(6, 5), wide(3), dynamic=True)


def test_memory_that_nobody_reads_again_is_not_copied_first() -> None:
    texts = [torch_mlc.explain(fn, wide(4, 9), wide(4, 9)).graphs[0].program for fn in (one, given)]
    assert "_only_clone_these_bases=[]" in texts[0] and "_only_clone_these_bases=[0]" in texts[1]


def test_the_text_of_such_a_graph_is_complete() -> None:
    (gm,) = capture(one, (wide(4, 9), wide(4, 9)))
    graph = import_graph(gm)
    assert "op('mlc_tests::scale_.default')" in show(graph) and parse(show(graph)) == graph


def test_a_triton_kernel_of_the_users() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).parents[1] / "user_kernel.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.stdout == "equal\n", run.stderr


# --- checkpoints and breaks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    layer = torch.nn.Linear(9, 9)

    def fn(x: Tensor) -> Tensor:
        return checkpoint(lambda v: torch.relu(layer(v)).sin() * v.softmax(-1), x, use_reentrant=reentrant) * 2

    agree(fn, wide(4, 9).requires_grad_(), fullgraph=not reentrant)


def noisy(x: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.nn.functional.dropout(v, 0.5) * v.exp(), x, use_reentrant=False).sum()


def test_a_checkpoint_repeats_its_random_numbers() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    run = torch.compile(noisy, backend="mlc", fullgraph=True)
    gradients = []
    for _ in range(2):
        result = run(x)
        (g,) = torch.autograd.grad(result, x)
        kept = g != 0
        mask = torch.where(kept, 2.0, 0.0)
        torch.testing.assert_close(g, mask * x.exp() * (1 + x))
        torch.testing.assert_close(result, (mask * x * x.exp()).sum())
        assert 0.45 < kept.float().mean() < 0.55
        gradients.append(g)
    assert not torch.equal(*gradients)
    report = torch_mlc.explain(noisy, x, training=True)
    assert [lib.op for graph in report.graphs for lib in graph.libraries] == ["mlc::seeds"]


def test_a_checkpoint_with_eagers_numbers() -> None:
    x = torch.randn(16, 16, requires_grad=True)
    run = torch.compile(noisy, backend="mlc", fullgraph=True, options={"fallback_random": True})
    found = []
    for fn in (noisy, run):
        torch.manual_seed(5)
        result = fn(x)
        found.append((result, *torch.autograd.grad(result, x)))
    torch.testing.assert_close(found[1], found[0])


def test_breaks_in_the_middle() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        z = y.cumsum(1) + x
        return z.exp() if z.sum() > 0 else z.cos()

    for sign in (1, -1):
        agree(fn, (sign * torch.rand(4, 9)).requires_grad_(), fullgraph=False)
