"""Scans that are read beside where they are made move there, and share a kernel with their readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import shift_scans

Fn = Callable[..., Any]


def padded(x: Tensor) -> Tensor:
    return F.pad(x.cumsum(-1), (1, 0))[..., :-1]


def joined(x: Tensor) -> Tensor:
    c = x.cumsum(-1)
    return torch.cat([torch.zeros_like(c[..., :1]), c[..., :-1]], -1) * x


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    """What comes before each element, and the sums themselves."""
    c = x.cumsum(-1)
    return torch.cat([torch.zeros_like(c[..., :1]), c[..., :-1]], -1) * x, c


def offsets(x: Tensor) -> Tensor:
    """One more than there are elements."""
    return torch.cat([torch.zeros_like(x[..., :1]), x.cumsum(-1)], -1)


def behind(x: Tensor) -> Tensor:
    return x.cumsum(-1)[..., 1:] * 2


def differences(x: Tensor) -> Tensor:
    c = x.cumsum(-1)
    return c[..., 1:] - c[..., :-1] * 2


def from_the_end(x: Tensor) -> Tensor:
    return F.pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1))[..., 1:] + x


def backward(x: Tensor) -> Tensor:
    """Read from the end, without the first."""
    return x.cumsum(-1).flip(-1)[..., :-1] * 3


def columns(x: Tensor) -> Tensor:
    return F.pad(x.cumsum(-2), (0, 0, 1, 0))[..., :-1, :] * x


def transmittance(x: Tensor) -> Tensor:
    """How much light is left in front of each sample of a ray."""
    opacity = 1 - torch.exp(-F.relu(x))
    passed = torch.cat([torch.ones_like(opacity[..., :1]), 1 - opacity + 1e-10], -1)
    return opacity * passed.cumprod(-1)[..., :-1]


def pairs(x: Tensor) -> Tensor:
    return F.pad(x.logcumsumexp(-1), (1, 0), value=-1e9)[..., :-1] - x


def best(x: Tensor) -> tuple[Tensor, Tensor]:
    value, place = x.cummax(-1)
    return F.pad(value, (1, 0), value=-9.0)[..., :-1] - x, F.pad(place, (1, 0), value=-1)[..., :-1] * 2


MOVED = (
    padded, joined, both, offsets, behind, differences, from_the_end, backward, columns, transmittance, pairs, best,
)  # fmt: skip


def last(x: Tensor) -> Tensor:
    c = x.cumsum(-1)
    return c[..., -1:] - c


def far_apart(x: Tensor) -> Tensor:
    c = x.cumsum(-1)
    return c[..., 4:] - c[..., :-4]


def lengths(x: Tensor) -> tuple[Tensor, Tensor]:
    c = x.cumsum(-1)
    return c, F.pad(c, (1, 0))


def halves(x: Tensor) -> Tensor:
    """A join looks for what it is made of beyond the end of each part."""
    c = x.cumsum(-1)
    return F.glu(torch.cat([c, c * 0.3], -1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    got, expected = ((t if isinstance(t, (tuple, list)) else [t]) for t in (got, expected))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fn", MOVED, ids=lambda f: f.__name__)
def test_one_kernel_that_is_right(fn: Fn, reference: Callable[..., Any]) -> None:
    x = numbers(2, 3, 11)
    made = reference(fn, (x,))
    assert sum(isinstance(n, CallTensor) for n in made.fusion.graph.nodes) == 1
    same(made.run((x,)), fn(x.double()))


@pytest.mark.parametrize("fn", [padded, both, differences, columns], ids=lambda f: f.__name__)
def test_sizes_that_vary(fn: Fn, reference: Callable[..., Any]) -> None:
    x = numbers(3, 13, 5)
    made = reference(fn, (x,), dynamic=True)
    assert sum(isinstance(n, CallTensor) for n in made.fusion.graph.nodes) == 1


@pytest.mark.parametrize("fn", [joined, both, differences, best], ids=lambda f: f.__name__)
def test_integers_are_exact(fn: Fn, reference: Callable[..., Any]) -> None:
    x = (numbers(4, 17) * 9).int()
    same(reference(fn, (x,)).run((x,)), fn(x), 0.0)


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.cumsum(-1) * x, lambda x: x.cumsum(-1)[..., ::2] * 1.5, lambda x: x.cumsum(-1).roll(1, -1), last,
     far_apart, lengths, lambda x: torch.cat([x, x.cumsum(-1)], -1), halves],
    ids=["at hand", "every other", "around", "last", "far apart", "lengths", "a part of a join", "halves of a join"],
)  # fmt: skip
def test_others_stay(fn: Fn) -> None:
    (gm,) = capture(fn, (numbers(4, 12),))
    graph = import_graph(gm)
    assert shift_scans(graph) is graph


@pytest.mark.parametrize("shape", [(4, 12), (3, 2), (16,)], ids=str)
def test_nothing_is_read_beyond_the_parts_of_a_join(shape: tuple[int, ...]) -> None:
    compiled = torch.compile(halves, backend="mlc", options={"verify": 2, "cache": False})
    same(compiled(numbers(*shape)), halves(numbers(*shape).double()))


@pytest.mark.parametrize("fn", MOVED, ids=lambda f: f.__name__)
def test_moved_graphs_are_well_formed(fn: Fn) -> None:
    (gm,) = capture(fn, (numbers(4, 12),))
    graph = import_graph(gm)
    moved = shift_scans(graph)
    assert moved is not graph
    verify(moved)


@pytest.mark.parametrize("shape", [(3, 70), (2, 33, 16), (5, 1), (0, 4), (4, 2)], ids=str)
def test_compiled(shape: tuple[int, ...]) -> None:
    x = numbers(*shape)
    for fn in (joined, both, differences, transmittance, best):
        same(torch.compile(fn, backend="mlc", dynamic=False)(x), fn(x.double()))


@pytest.mark.parametrize("scan", [lambda x: x.cumsum(-1), lambda x: x.cummax(-1).values], ids=["sums", "maxima"])
@pytest.mark.parametrize("part", [torch.tril, torch.triu], ids=["lower", "upper"])
def test_what_is_made_of_a_place_moves_too(scan: Fn, part: Fn) -> None:
    """A triangle looks at where an element is, not only at the scan there."""

    def behind(x: Tensor) -> Tensor:
        return part(scan(x))[..., 1:] * 2

    def before(x: Tensor) -> Tensor:
        return F.pad(part(scan(x)), (1, 0))[..., :-1] + x

    def neighbours(x: Tensor) -> Tensor:
        y = part(scan(x))
        return y[..., 1:] - y[..., :-1] * 2

    for fn in (behind, before, neighbours):
        for x in (numbers(5, 7).double(), (numbers(5, 7) * 9).long()):  # whose sums are not rounded behind the scan
            same(torch.compile(fn, backend="mlc", options={"cache": False})(x), fn(x))


def test_gradients() -> None:
    x = numbers(3, 29).requires_grad_()
    torch.compile(transmittance, backend="mlc")(x).square().sum().backward()
    y = x.detach().double().requires_grad_()
    transmittance(y).square().sum().backward()
    same(x.grad, y.grad)
