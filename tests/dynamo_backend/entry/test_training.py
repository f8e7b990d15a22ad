"""Features of autograd and of training loops around and inside compiled models: what eager does, or eager's error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(fn: Any, **how: Any) -> Any:
    return torch.compile(fn, backend="mlc", **{"fullgraph": True, **how})


def close(ours: Any, eager: Any, **tolerance: Any) -> None:
    """Small elements of a sum that large ones cancel in are no nearer than those are."""
    sizes = [t.detach().abs().nan_to_num().max().item() for t in tree_leaves(eager) if _is_floating(t) and t.numel()]
    scale = max([1.0, *sizes])
    torch.testing.assert_close(ours, eager, **{"rtol": 2e-5, "atol": 2e-6 * scale, "equal_nan": True, **tolerance})


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Block(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def twins(model: nn.Module, **how: Any) -> tuple[nn.Module, nn.Module, Callable[..., Any]]:
    """Ours, eager's, and what runs ours."""
    ours = copy.deepcopy(model)
    return ours, model, compiled(ours, **how)


def same_step(model: nn.Module, *inputs: Tensor, steps: int = 1, **how: Any) -> None:
    """Losses, parameters' gradients and buffers after some steps that add up gradients."""
    ours, eager, run = twins(model, **how)
    for _ in range(steps):
        results = []
        for fn in (run, eager):
            loss = fn(*inputs).square().mean()
            loss.backward()
            results.append(loss.detach())
        close(*results)
    close(gradients(ours), gradients(eager))
    close(dict(ours.named_buffers()), dict(eager.named_buffers()))


# --- gradients of gradients -------------------------------------------------------------------------------------------


def test_second_derivatives_are_torchs_own_error() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(5, requires_grad=True)
    (first,) = torch.autograd.grad(compiled(f)(x), x, create_graph=True)
    close(first, x.cos() * x + x.sin())
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()


def test_gradients_of_gradients_inside_the_region() -> None:
    """A gradient penalty that ``torch.func`` writes: both derivatives are in one graph."""

    def penalty(w: Tensor, x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda v: torch.tanh(v @ w).square().sum())(x)
        return (inner.square().sum(-1) - 1).square().mean()

    w, x = torch.randn(4, 6, requires_grad=True), torch.randn(3, 4)
    wanted = torch.autograd.grad(penalty(w, x), w)
    close(torch.autograd.grad(compiled(penalty)(w, x), w), wanted)


def test_hessians_and_jacobians() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.exp() * x.roll(1).sin()).sum()

    x = torch.randn(5)
    close(compiled(lambda x: torch.func.hessian(f)(x))(x), torch.func.hessian(f)(x))
    close(compiled(lambda x: torch.func.jacfwd(torch.sin)(x))(x), torch.func.jacfwd(torch.sin)(x))
    close(compiled(lambda x: torch.func.jacrev(torch.cos)(x))(x), torch.func.jacrev(torch.cos)(x))


# --- mixed precision and checkpoints ----------------------------------------------------------------------------------


def test_autocast_around_and_inside() -> None:
    model, x = Block(), torch.randn(3, 12)

    def inside(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
            with torch.autocast("cpu", enabled=False):
                return y.float() @ x.t()

    ours, eager, run = twins(model)
    for mine, theirs in ((run, eager), (compiled(lambda x: inside(ours, x)), lambda x: inside(eager, x))):
        ours.zero_grad()
        eager.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            a, b = mine(x), theirs(x)
        assert a.dtype is b.dtype
        close(a, b, rtol=2e-2, atol=2e-2)
        a.float().square().mean().backward()
        b.float().square().mean().backward()
        close(gradients(ours), gradients(eager), rtol=4e-2, atol=2e-2)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(Block() for _ in range(2)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.sin()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """The reentrant kind is an autograd function of torch's that Dynamo breaks the graph at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_step(Checkpointed(reentrant), torch.randn(3, 12, requires_grad=True), fullgraph=not reentrant)


def test_a_checkpoint_around_a_compiled_model() -> None:
    ours, eager, run = twins(Block())
    x = torch.randn(3, 12, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    eager(x).sum().backward()
    close(gradients(ours), gradients(eager))


# --- the training loop ------------------------------------------------------------------------------------------------


def test_gradients_accumulate() -> None:
    same_step(Block(), torch.randn(3, 12), steps=3)


def test_a_graph_that_is_retained() -> None:
    x = torch.randn(4, 12, requires_grad=True)
    out = compiled(lambda x: (x.exp() * x).sum())(x)
    for _ in range(2):
        out.backward(retain_graph=True)
    close(x.grad, 2 * (x.exp() * x + x.exp()))
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@pytest.mark.parametrize("options", [{}, {"cache": False}, {"verify": 2}], ids=["cache", "alone", "verified"])
def test_a_graph_that_is_retained_later(options: dict[str, object]) -> None:
    """The backward was compiled at a call that retained nothing."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh(x @ w) * torch.sin(x @ w)).sum()

    run, given = compiled(f, options=options), torch.randn(2, 4, 4)
    for retain in (False, True, True):
        found = []
        for fn in (run, f):
            inputs = [t.clone().requires_grad_() for t in given]
            out = fn(*inputs)
            if retain:
                out.backward(retain_graph=True)
            out.backward()
            found.append([t.grad for t in inputs])
        close(*found)


def test_two_losses_of_one_forward() -> None:
    ours, eager, run = twins(Block())
    x = torch.randn(3, 12)
    for fn in (run, eager):
        out = fn(x)
        out[0].sum().backward(retain_graph=True)
        out[1:].square().sum().backward()
    close(gradients(ours), gradients(eager))


def test_frozen_parameters_get_no_gradient() -> None:
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(False)
    same_step(model, torch.randn(3, 12))
    model[1].up.weight.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    same_step(model, torch.randn(3, 12, requires_grad=True))


def test_parameters_that_are_frozen_later() -> None:
    ours, eager, run = twins(Block())
    x = torch.randn(3, 12)
    for frozen in (False, True, False):
        for model, fn in ((ours, run), (eager, eager)):
            model.up.requires_grad_(not frozen)
            model.zero_grad(set_to_none=True)
            fn(x).sum().backward()
        close(gradients(ours), gradients(eager))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(17, 12), Block(), nn.Linear(12, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))


def test_tied_weights() -> None:
    same_step(Tied(), torch.randint(0, 17, (3, 5)), steps=2)


class Counting(nn.Module):
    """Buffers that training changes: running statistics, a counter, a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.queue[(self.calls % 4).unsqueeze(0)] = x[:1]
            self.calls += 1
        return y - self.mean + self.queue.sum(0)


def test_buffers_that_training_changes() -> None:
    same_step(Counting(), torch.randn(5, 6), steps=3)


def test_hooks_of_tensors_and_modules() -> None:
    def scaled(model: nn.Module, seen: list[str]) -> nn.Module:
        model.up.weight.register_hook(lambda g: g * 2)
        model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
        model.up.register_forward_hook(lambda m, args, out: out + 1)
        model.down.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
        model.register_full_backward_hook(lambda m, g_in, g_out: (g_in[0] * 5,))
        return model

    ours, eager = Block(), Block()
    eager.load_state_dict(ours.state_dict())
    seen: dict[str, list[str]] = {"ours": [], "eager": []}
    scaled(ours, seen["ours"]), scaled(eager, seen["eager"])
    x = torch.randn(3, 12)
    grads = []
    for fn in (compiled(ours, fullgraph=False), eager):
        leaf = x.clone().requires_grad_()
        inner = leaf * 2
        inner.register_hook(lambda g: g + 1)
        fn(inner).sum().backward()
        grads.append(leaf.grad)
    close(*grads)
    close(gradients(ours), gradients(eager))
    assert seen["ours"] == seen["eager"] == ["accumulated"]


def test_a_hook_inside_of_the_region() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return (y * y.exp()).sum()

    results = []
    for fn in (compiled(f, fullgraph=False), f):
        x = torch.linspace(-2, 2, 9, requires_grad=True)
        fn(x).backward()
        results.append(x.grad)
    close(*results)


def test_gradients_of_some_inputs_only() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return (a * b).sum(-1), c.cos() * b.detach()

    a, b, c = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4), torch.randn(4, requires_grad=True)
    ours, eager = compiled(f)(a, b, c), f(a, b, c)
    assert [t.requires_grad for t in ours] == [t.requires_grad for t in eager]
    for wanted in ((a,), (a, c)):
        pair = [torch.autograd.grad(sum(t.sum() for t in r), wanted, retain_graph=True) for r in (ours, eager)]
        close(*pair)
    # A result whose gradient nobody asks for.
    close(torch.autograd.grad(compiled(f)(a, b, c)[0].sum(), a), (b,))


def test_gradients_under_no_grad_and_detached() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            scale = x.abs().amax()
        return x / scale, x.detach() * 2

    x = torch.randn(6, requires_grad=True)
    ours, eager = compiled(f)(x), f(x)
    close(ours, eager)
    assert not ours[1].requires_grad
    close(torch.autograd.grad(ours[0].sum(), x), torch.autograd.grad(eager[0].sum(), x))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.square() * 4  # on purpose not the derivative


def test_a_function_with_its_own_backward() -> None:
    x = torch.randn(5, requires_grad=True)
    (ours,) = torch.autograd.grad(compiled(lambda x: Cube.apply(x.sin()).sum())(x), x)
    close(ours, 4 * x.sin().square() * x.cos())


def test_anomaly_mode_and_saved_tensor_hooks() -> None:
    x = torch.randn(4, 12, requires_grad=True)
    run = compiled(lambda x: (x.exp() * x.sin()).sum())
    packed: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t)[1], lambda t: t):
        out = run(x)
    with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out.backward()
    close(x.grad, x.exp() * (x.sin() + x.cos()))
    assert packed


def test_clipping_and_scaling_in_a_compiled_step() -> None:
    """The whole step but the optimizer in one region: forward, loss, backward outside, gradients clipped."""
    ours, eager, run = twins(Block())
    x = torch.randn(3, 12)
    norms = []
    for model, fn in ((ours, run), (eager, eager)):
        (fn(x).square().mean() * 1024).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    close(*norms)
    close(gradients(ours), gradients(eager))
    clip = compiled(torch.nn.utils.clip_grad_norm_, fullgraph=False)
    for model, fn in ((ours, clip), (eager, torch.nn.utils.clip_grad_norm_)):
        fn(model.parameters(), 0.1)
    close(gradients(ours), gradients(eager))


# --- transforms of functions ------------------------------------------------------------------------------------------


def test_vmap() -> None:
    w = torch.randn(5, 3)

    def one(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(w @ x, -1) * y.sum() + x.norm()

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.vmap(one, in_dims=(0, 1))(x, y)

    x, y = torch.randn(4, 3), torch.randn(7, 4)
    close(compiled(f)(x, y), f(x, y))


def test_gradients_of_each_sample() -> None:
    model = Block()
    weights = {k: v.detach() for k, v in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    def f(weights: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)

    x = torch.randn(4, 12)
    close(compiled(f)(weights, x), f(weights, x), rtol=1e-4, atol=1e-5)


def test_forward_derivatives() -> None:
    def f(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(lambda x: (x.tanh() * x).cumsum(0), (x,), (v,))

    x, v = torch.randn(5), torch.randn(5)
    close(compiled(f)(x, v), f(x, v))

    def g(x: Tensor, v: Tensor) -> Tensor:
        _, pull = torch.func.vjp(lambda x: x.exp().outer(x), x)
        return pull(v)[0]

    cotangent = torch.randn(5, 5)
    close(compiled(g)(x, cotangent), g(x, cotangent))


@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_that_carry_derivatives(dynamic: bool) -> None:
    """No guard of torch's tells such calls from others, and a program would drop what tensors carry."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh() * y + x.sum(), (x * y).cumsum(0)

    run = torch.compile(f, backend="mlc", dynamic=dynamic)
    x, y, v = torch.randn(3, 5)
    made = [counters["graphs_compiled"]]
    for carried in (False, True, False, True):
        for asked in (False, True):
            a = x.clone().requires_grad_(asked)
            with forward_ad.dual_level() if carried else nullcontext():
                given = forward_ad.make_dual(a, v) if carried else a
                for ours, eager in zip(run(given, y), f(given, y), strict=True):
                    close(ours, eager)
                    assert ours.requires_grad == eager.requires_grad
                    if carried:
                        close(*(forward_ad.unpack_dual(t).tangent for t in (ours, eager)))
        made.append(counters["graphs_compiled"])
    # Elsewhere programs run, and those that were made before.
    assert made[0] < made[1] == made[-1]


# --- breaks in the middle ---------------------------------------------------------------------------------------------


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        if x.sum().item() > 0:
            x = x * 2
        return self.second(x)


@pytest.mark.parametrize("sign", [1, -1])
def test_breaks_in_the_middle(sign: int) -> None:
    before = counters.snapshot()
    model = Broken()
    with torch.no_grad():
        model.norm.bias.add_(sign)
    same_step(model, torch.randn(3, 12, requires_grad=True), steps=2, fullgraph=False)
    made = counters.since(before)
    assert made.get("graphs_compiled", 0) + made.get("graph_cache_hits", 0) >= 4
