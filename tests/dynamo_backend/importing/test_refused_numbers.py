"""Numbers, types and sizes that eager refuses, where tracing does not look: what is compiled refuses them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_compiler")

INF, NAN = float("inf"), float("nan")
BYTES, SMALL = torch.tensor([1, 200], dtype=torch.uint8), torch.tensor([-3, 100], dtype=torch.int8)
HALF, FLOATS, INTS = torch.tensor([0.5, -2.0]).half(), torch.tensor([2.5, 1.0, -2.0]), torch.tensor([1, 2, 3])
ROWS = torch.arange(12.0).reshape(3, 4)

# What torch refuses only where the op runs.
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "clamp": (lambda x: x.clamp(min=300), (BYTES,)),
    "clamp_min": (lambda x: x.clamp_min(200), (SMALL,)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1e9), (HALF,)),
    "masked_fill of bytes": (lambda x: x.masked_fill(x > 1, 256), (BYTES,)),
    "full": (lambda x: x + torch.full((2,), 300, dtype=torch.uint8), (BYTES,)),
    "full_like": (lambda x: torch.full_like(x, 70000.0), (HALF,)),
    "new_full": (lambda x: x.new_full((2,), 128), (SMALL,)),
    "fill_": (lambda x: x.clone().fill_(1e6), (HALF,)),
    "pad": (lambda x: torch.nn.functional.pad(x, (1, 1), value=300), (BYTES,)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 300), (BYTES, torch.tensor([0]))),
    "scatter": (lambda x, i: x.scatter(0, i, 300), (BYTES, torch.tensor([0]))),
    "power": (lambda x: torch.pow(x, -2), (INTS,)),
    "histogram": (lambda x: torch.histc(x, 10, 0, INF), (FLOATS,)),
    "index of int16": (lambda x, i: x[i], (FLOATS, torch.tensor([1], dtype=torch.int16))),
    "index_select of int16": (lambda x, i: x.index_select(0, i), (FLOATS, torch.tensor([1], dtype=torch.int16))),
    "index_select of a number": (lambda x, i: x.index_select(0, i), (torch.tensor(1.0), torch.tensor([5]))),
    "gather of a number": (lambda x, i: x.gather(0, i), (torch.tensor(1.0), torch.tensor([5]))),
    "index_put of another type": (
        lambda x, v: x.index_put((torch.tensor([1]),), v), (FLOATS, torch.tensor([1.0], dtype=torch.float64))),
    "max of nothing": (lambda x: x.max(), (FLOATS[:0],)),
    "max of no row": (lambda x: x.max(0), (ROWS[:0],)),
    "bernoulli": (lambda x: x.clone().bernoulli_(1.5), (FLOATS,)),
    "exponential": (lambda x: x.clone().exponential_(-1.0), (FLOATS,)),
    "geometric": (lambda x: x.clone().geometric_(1.5), (FLOATS,)),
    "cauchy": (lambda x: x.clone().cauchy_(0.0, -1.0), (FLOATS,)),
    "log-normal": (lambda x: x.clone().log_normal_(0.0, -1.0), (FLOATS,)),
    "uniform": (lambda x: x.clone().uniform_(2.0, 1.0), (FLOATS,)),
    "randint": (lambda x: torch.randint(0, 300, (2,), dtype=torch.uint8) + x, (BYTES,)),
}  # fmt: skip


def raised(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> str:
    try:
        fn(*args)
    except Exception as error:  # any: which one is asked by the test
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses(name: str) -> None:
    fn, args = REFUSED[name]
    eager = raised(fn, args)
    assert eager, "eager refuses nothing"
    assert raised(torch.compile(fn, backend="mlc"), args), f"eager: {eager}"


# What looks alike and is fine.
TAKEN: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "infinite": (lambda x: (x.masked_fill(x > 0, -INF), x.clamp(min=-INF), torch.full_like(x, NAN)), (HALF,)),
    "greatest": (lambda x: (x.masked_fill(x > 0, 65504.0), torch.full_like(x, -65504.0)), (HALF,)),
    "bytes": (lambda x: (x.clamp(max=255), x.masked_fill(x > 1, 255), x.new_full((2,), 0)), (BYTES,)),
    "least": (lambda x: (x.clamp(-128, 127), torch.full_like(x, -128)), (SMALL,)),
    "bools": (lambda x: ((x > 1).masked_fill(x > 0, 5), torch.full_like(x > 1, 3)), (INTS,)),
    "sums of bools": (
        lambda x: (x.sum(dtype=torch.bool), x.prod(0, dtype=torch.bool), x.sum(1, dtype=torch.bool)), (ROWS,)),
    "all of no dimension": (lambda x: (torch.all(x > 1, dim=()), torch.any(x > 1, dim=())), (ROWS,)),
    "places": (
        lambda x, b: (torch.bucketize(x, b), torch.searchsorted(b, 2.5), torch.bucketize(b, x.sort()[0])),
        (FLOATS, INTS)),
    "places among halves": (lambda x, n: torch.bucketize(n, x.sort()[0]), (HALF, torch.tensor(0.5000001))),
    "rounded far out": (lambda x: (x.round(decimals=40), x.round(decimals=-40)), (FLOATS,)),
    "next halves": (lambda x: torch.nextafter(x, -x), (HALF,)),
    "what numbers leave of halves": (lambda x: (x % 0.3, x.fmod(0.7), x % torch.tensor(0.1)), (HALF,)),
    "halves compared": (lambda x, n: (x == n, x <= n, x.half() == 0.1), (torch.tensor([0.1, 0.3]).half(),
        torch.tensor(0.1))),
    "one element more": (
        lambda x, i, v: (x.scatter_add(0, i, v), x.index_put((x,), torch.tensor(True), accumulate=True)),
        (torch.tensor([True, False, False]), torch.tensor([0, 1]), torch.tensor([True, True]))),
    "logsumexp of integers": (lambda x: x.logsumexp(0), (INTS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes(name: str) -> None:
    fn, args = TAKEN[name]
    torch.testing.assert_close(torch.compile(fn, backend="mlc")(*args), fn(*args), equal_nan=True)


@pytest.mark.parametrize("bound", [-300, -5, 300])
@pytest.mark.parametrize("x", [BYTES, SMALL], ids=["uint8", "int8"])
def test_bounds_beyond_a_type_are_what_eager_makes_of_them(x: Tensor, bound: int) -> None:
    """By torch's version they are refused, wrapped, or no bounds."""
    for fn in (
        lambda x: x.clamp(min=bound), lambda x: x.clamp(max=bound), lambda x: x.clamp(-abs(bound), abs(bound)),
        lambda x: x.clamp_min(bound), lambda x: x.clone().clamp_max_(bound), lambda x: F.hardtanh(x, bound, 300),
    ):  # fmt: skip
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="mlc")
        if raised(fn, (x,)):
            assert raised(compiled, (x,))
        else:
            torch.testing.assert_close(compiled(x), fn(x))


def test_strided_slices_that_are_written_with_a_step_that_varies() -> None:
    def fn(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        y, z = x.clone(), x.clone()
        y[::n] = 7.0
        z[:, 1::n] += x[:, 1::n]
        return y, z

    run = torch.compile(fn, backend="mlc", dynamic=True)
    for n in (2, 3, 5, 7):
        torch.testing.assert_close(run(ROWS, n), fn(ROWS, n))
