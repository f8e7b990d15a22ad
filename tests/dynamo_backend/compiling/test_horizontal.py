"""Steps of optimizers, and other equal independent work: results as in eager, and few launches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_mlc
from torch_mlc.runtime.counters import counters

SHAPES = [(17, 5), (33,), (1,), (0, 4), (8, 16), (64,), (3, 5, 7), (4096, 9)]


def launches(run: Callable[[], Any]) -> dict[str, int]:
    """The counters that compiling and running added."""
    before = counters.snapshot()
    run()
    return counters.since(before)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
    made.append(nn.Parameter(torch.randn(6, 10).to(dtype).t()))  # not contiguous
    for p in made:
        p.grad = torch.randn_like(p)
    return made


CASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adam_amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=True, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, foreach=True),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "single_tensor": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
}


@pytest.mark.parametrize("name", CASES)
def test_optimizer_steps(name: str) -> None:
    torch._dynamo.reset()
    ours, eager = parameters(), parameters()
    mine, theirs = CASES[name](ours), CASES[name](eager)
    theirs.step()
    mine.step()  # state is made eagerly
    step = torch.compile(mine.step, backend="mlc")
    addresses = [p.data_ptr() for p in ours]
    added = launches(step)
    assert added.get("library_calls", 0) == 0
    # One launch for the scalars, one for all the tensors that have memory to lay end to end, and some for those that
    # have one element or none.
    assert added["kernel_calls"] <= 5
    theirs.step()
    for k in range(3):
        for p, q in zip(ours, eager, strict=True):
            p.grad.add_(k)
            q.grad.add_(k)
        step()
        theirs.step()
    assert addresses == [p.data_ptr() for p in ours]
    for p, q in zip(ours, eager, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for key, value in theirs.state[q].items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(mine.state[p][key], value, rtol=1e-5, atol=1e-6)


def test_equal_work_is_one_launch() -> None:
    """Rotary embedding of queries and keys with different numbers of heads."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def f(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = [torch.randn(2, 4, 33, 16), torch.randn(2, 4, 33, 16), torch.randn(33, 16), torch.randn(33, 16)]
    run = torch.compile(f, backend="mlc")
    assert launches(lambda: run(*inputs))["kernel_calls"] == 1
    torch.testing.assert_close(run(*inputs), f(*inputs), rtol=1e-5, atol=1e-5)


def same_after(f: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> dict[str, int]:
    """Results and every input are as eager leaves them, twice over; gives the counters of compiling."""
    torch._dynamo.reset()
    run = torch.compile(f, backend="mlc", dynamic=dynamic)
    before = counters.snapshot()
    mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    for _ in range(2):
        torch.testing.assert_close(run(*mine), f(*theirs), equal_nan=True)
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    return counters.since(before)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_fewer_keys_are_one_launch(dtype: torch.dtype, dynamic: bool) -> None:
    """Rotated as models do it: heads by views of a projection, each half of a head in the place of the other."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in (q, k))
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin

    torch.manual_seed(0)
    compiled = torch.compile(rotate, backend="mlc", dynamic=dynamic)
    for length in (5, 8) if dynamic else (5,):
        given = [torch.randn(s).to(dtype) for s in ((2, length, 96), (2, length, 32), (length, 16), (length, 16))]
        added = launches(lambda inputs=given: compiled(*inputs))  # type: ignore[misc]
        assert added.get("kernel_calls", 1) == 1
        expected = rotate(*(x.double() for x in given))
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-6
        for got, wanted in zip(compiled(*given), expected, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_written_in_place(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).add_(y)
        return y.exp()

    added = same_after(f, torch.randn(37, 11), torch.randn(37, 11), dynamic=dynamic)
    assert added.get("library_calls", 0) == 0, "the copy is part of the kernel"


def test_what_is_written_in_place_and_returned() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.mul_(2).add_(y), y.sin_()

    added = same_after(f, torch.randn(37, 11), torch.randn(37, 11), dynamic=False)
    assert added.get("library_calls", 0) == 0, "the copies are part of the kernels"
    x, y = torch.randn(5), torch.randn(5)
    first, second = torch.compile(f, backend="mlc")(x, y)
    assert first is x and second is y


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_must_not_be_written_in_place(dynamic: bool) -> None:
    def shifted(x: Tensor) -> None:
        x.copy_(x.roll(1, 0) + x)

    def transposed(x: Tensor) -> None:
        x.copy_(x.t() * 2)

    def read_later(x: Tensor, w: Tensor) -> Tensor:
        y = x + 1
        z = torch.mm(y, w)
        old = x * z
        x.copy_(y)
        return old

    def returned(x: Tensor) -> Tensor:
        y = x * 3
        x.copy_(y)
        return y

    def swapped(x: Tensor, y: Tensor) -> None:
        kept = x + 0.5
        x.copy_(y + 0.5)
        y.copy_(kept)

    def normalised(x: Tensor) -> None:
        x.sub_(x.mean(0, keepdim=True))

    def viewed(x: Tensor) -> Tensor:
        y = x[1:].clone()
        x.add_(1)
        return torch.mm(y, x.t())

    for f in (shifted, transposed, returned, normalised, viewed):
        same_after(f, torch.randn(9, 9), dynamic=dynamic)
    for g in (read_later, swapped):
        same_after(g, torch.randn(9, 9), torch.randn(9, 9), dynamic=dynamic)


def test_inputs_that_share_memory() -> None:
    base = torch.randn(40)

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    for cut in (0, 4, 20):
        # torch has no guard on how inputs overlap: each case is a program of its own.
        torch._dynamo.reset()
        run = torch.compile(f, backend="mlc")
        a, b = base.clone(), base.clone()
        torch.testing.assert_close(run(a[:20], a[cut : cut + 20]), f(b[:20], b[cut : cut + 20]))
        torch.testing.assert_close(a, b)


def test_a_list_of_tensors_of_every_size(dynamic: bool = True) -> None:
    def f(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        torch._foreach_lerp_(xs, ys, 0.75)
        torch._foreach_addcdiv_(xs, ys, [y.abs() + 1 for y in ys], -0.1)
        return torch._foreach_norm(xs)

    torch.manual_seed(1)
    torch._dynamo.reset()
    run = torch.compile(f, backend="mlc", dynamic=dynamic)
    for sizes in ((3, 70, 1, 0), (5, 4, 1, 9)):
        xs, ys = [torch.randn(n) for n in sizes], [torch.randn(n) for n in sizes]
        mine, theirs = copy.deepcopy(xs), copy.deepcopy(xs)
        torch.testing.assert_close(run(mine, ys), f(theirs, ys))
        torch.testing.assert_close(mine, theirs)


def test_running_statistics_are_written_in_place() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5).train()
    mine, theirs = copy.deepcopy(norm), copy.deepcopy(norm)
    torch._dynamo.reset()
    run = torch.compile(mine, backend="mlc")
    before = counters.snapshot()
    for _ in range(3):
        x = torch.randn(4, 5, 6, 7)
        # With gradients the backward keeps the new statistics, and they need memory of their own.
        with torch.no_grad():
            torch.testing.assert_close(run(x), theirs(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
    assert counters.since(before).get("library_calls", 0) == 0


def test_second_stages_of_a_backward_are_one_launch_on_a_gpu() -> None:
    """Three sums of a norm, two of another and one of a product's tiles, of other numbers of pieces: before, three
    launches."""

    def block(x: Tensor, *given: Tensor) -> Tensor:
        w1, b1, w2, b2, up, up_bias, down, down_bias = given
        h = F.layer_norm(x, (64,), w1, b1)
        h = h + F.linear(F.gelu(F.linear(h, up, up_bias)), down, down_bias)
        return F.layer_norm(h, (64,), w2, b2)

    shapes = ((4096, 64), *((64,),) * 4, (256, 64), (256,), (64, 256), (64,))
    given = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    backward = torch_mlc.explain(block, *given, training=True, target="cuda:sm_90").graphs[1]
    assert [k.rule for k in backward.kernels].count("gpu_column_reduction") == 1
    assert backward.launches == 4
