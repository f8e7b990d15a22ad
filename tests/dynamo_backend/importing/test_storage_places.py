"""Places in a storage: of arguments that begin anywhere in theirs, which no guard tells. Eager's answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BASE = torch.arange(160.0).reshape(20, 8)
# Ways to cut 4 rows of memory, the first without anything in front of it.
CUTS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "blocks": [lambda b: b[:4, :4], lambda b: b[2:6, 1:5], lambda b: b[9:13, 4:]],
    "rows": [lambda b: b[:4], lambda b: b[2:6], lambda b: b[11:15]],
}


@torch.library.custom_op("mlc_tests::add_to", mutates_args=("x",))
def add_to(x: Tensor, y: float) -> None:
    x.add_(y)


@torch.library.custom_op("mlc_tests::add_to_each", mutates_args=("xs",))
def add_to_each(xs: list[Tensor], y: float) -> None:
    for k, x in enumerate(xs):
        x.mul_(k + 2).add_(y)


def turned(x: Tensor) -> Tensor:
    t = x.t()
    add_to(t, 1.0)
    return t * 2


def turned_before_a_write(x: Tensor) -> Tensor:
    t = x.t()
    t[1:].fill_(2)
    add_to(t, 1.0)
    return t * 2


def cut_before_a_write(x: Tensor) -> Tensor:
    t = x.t()[:2, 1:]
    x[0].fill_(3)
    add_to(t, 1.0)
    return t * 2


def cut_after_a_write(x: Tensor) -> Tensor:
    x[0].fill_(3)
    t = x[1:, ::2]
    add_to(t, 1.0)
    return t * 2


def of_a_new_value(x: Tensor) -> Tensor:
    x.add_(1)
    t = x[1:]
    add_to(t, 1.0)
    return t * 2


def columns(x: Tensor) -> Tensor:
    t = x[:, 1:3]
    add_to(t, 1.0)
    return t * 2


def rows(x: Tensor) -> Tensor:
    t = x[1:]
    add_to(t, 1.0)
    return t * 2


def whole(x: Tensor) -> Tensor:
    add_to(x, 1.0)
    return x * 2


def many(x: Tensor) -> Tensor:
    parts = [x[1], x[2:, ::2], x.t()]
    x[:, 1].neg_()
    add_to_each(parts, 1.0)
    return parts[1] * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "fn",
    [turned, turned_before_a_write, cut_before_a_write, cut_after_a_write, of_a_new_value, columns, rows, whole, many],
    ids=lambda f: f.__name__,
)
def test_ops_that_write_to_views(fn: Callable[[Tensor], Tensor], cut: str, dynamic: bool) -> None:
    compare(fn, cut, dynamic, verify=1)


@pytest.mark.parametrize("fn", [turned, turned_before_a_write, cut_after_a_write, columns], ids=lambda f: f.__name__)
def test_aten_ops_are_told_the_same_places(fn: Callable[[Tensor], Tensor]) -> None:
    compare(fn, "blocks", dynamic=False, verify=2)


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "at a place": lambda x: torch.as_strided(x, (2, 3), (8, 1), 26) * 2,
    "of a view": lambda x: torch.as_strided(x[1:].t(), (2, 3), (1, 2), 26) * 2,
    "of a part": lambda x: torch.as_strided(x.split(2)[1], (3,), (2,), 17) * 2,
    "from its own": lambda x: torch.as_strided(x[1:], (2, 3), (8, 1)) * 2,
    "copied": lambda x: torch.as_strided_copy(x, (3,), (1,), 20),
    "in place": lambda x: x.view_as(x).as_strided_((2, 2), (8, 1), 17) * 2,
    "of a value": lambda x: torch.as_strided((x * 2)[1:], (3,), (1,), 2) + 1,
    "into": lambda x: torch.as_strided_scatter(x, torch.ones(2), (2,), (2,), 12),
    "into a value": lambda x: torch.as_strided_scatter((x * 2)[1:], torch.ones(2), (2,), (2,), 5),
}


@pytest.mark.parametrize("verify", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("read", READ)
def test_views_at_places_of_a_storage(read: str, cut: str, verify: int) -> None:
    compare(READ[read], cut, dynamic=False, verify=verify)


def compare(fn: Callable[[Tensor], Tensor], cut: str, dynamic: bool, verify: int) -> None:
    """One compiled function for every cut; then, for each of them, one that is compiled for it."""
    cuts = CUTS[cut]
    for fresh in (False, True):
        for k, part in enumerate(cuts):
            if fresh or k == 0:
                torch._dynamo.reset()
                compiled = torch.compile(fn, backend="mlc", dynamic=dynamic, options={"verify": verify})
            wanted, given = BASE.clone(), BASE.clone()
            result, found = fn(part(wanted)), compiled(part(given))
            assert torch.equal(found, result) and torch.equal(given, wanted), f"{k}, compiled for it: {fresh}"
            assert found.stride() == result.stride()
