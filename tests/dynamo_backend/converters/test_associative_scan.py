"""Scans by functions of the user's: one kernel, and what a loop over the elements gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan, associative_scan_op
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Library
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show

pytestmark = pytest.mark.usefixtures("fresh_compiler")


Combine = Callable[..., Any]


def scanned(combine: Combine, *xs: Tensor) -> tuple[Tensor, ...]:
    """torch's own function asks for tensors on a GPU; the op behind it does not."""
    return tuple(associative_scan_op(lambda *states: list(combine(*states)), list(xs), ()))


def by_loop(combine: Combine, xs: Sequence[Tensor]) -> list[Tensor]:
    states = [[x[0] for x in xs]]
    for k in range(1, xs[0].shape[0]):
        states.append([*combine(*states[-1], *(x[k] for x in xs))])
    return [torch.stack(list(column)) for column in zip(*states, strict=True)]


def affine(a0: Tensor, a1: Tensor, b0: Tensor, b1: Tensor) -> tuple[Tensor, Tensor]:
    """y = b y + a, one after the other: a linear recurrence."""
    return a0 * b0, a1 * b0 + b1


def latest(a: Tensor, b: Tensor) -> tuple[Tensor]:
    """Not commutative, and without a neutral element."""
    return (torch.where(b > 0, b, a),)


def product(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
) -> tuple[Tensor, ...]:
    """Two by two matrices."""
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


def check(combine: Combine, *xs: Tensor, dynamic: bool | None = None, **tolerance: float) -> None:
    run = torch.compile(lambda *xs: scanned(combine, *xs), backend="mlc", fullgraph=True, dynamic=dynamic)
    exact = by_loop(combine, [x.double() if x.is_floating_point() else x for x in xs])
    for got, wanted in zip(run(*xs), exact, strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), **tolerance)


@pytest.mark.parametrize("shape", [(1, 4), (37,), (130, 3, 4), (9, 33)])
def test_a_recurrence(shape: tuple[int, ...]) -> None:
    check(affine, torch.rand(shape), torch.randn(shape))


@pytest.mark.parametrize("dynamic", [False, True])
def test_functions_of_all_kinds(dynamic: bool) -> None:
    for width in (6,) if dynamic else (1, 6):
        check(latest, torch.randn(50, width), dynamic=dynamic)
        check(product, *(torch.rand(20, width) for _ in range(4)), dynamic=dynamic)


def test_types() -> None:
    check(affine, torch.rand(40, 6).double(), torch.randn(40, 6).double())
    check(affine, torch.rand(40, 6).bfloat16(), torch.randn(40, 6).bfloat16(), rtol=2e-2, atol=2e-2)
    check(lambda a, b: (a | b,), torch.randint(0, 1 << 20, (40, 6)))
    check(lambda a, b: (a ^ b,), torch.rand(40, 6) > 0.5)
    check(lambda a, b: (torch.maximum(a, b),), torch.randint(-9, 9, (40, 6)).to(torch.int8))


def test_numbers_that_torchs_own_scan_casts() -> None:
    """Written out by torch, the function's numbers are cast as if they were tensors. Of eight elements or more Dynamo
    cannot trace what torch writes, with any backend."""
    x = torch.randn(7)
    run = torch.compile(
        lambda x: associative_scan(lambda a, b: torch.minimum(a, b) * 1, x, 0, combine_mode="generic"), backend="mlc"
    )
    torch.testing.assert_close(run(x), x.cummin(0).values)


def test_along_the_last_dimension_and_backwards() -> None:
    def fn(x: Tensor) -> Tensor:
        (y,) = scanned(latest, x.t().flip(0))
        return y.flip(0).t() + 1

    x = torch.randn(5, 40)
    (wanted,) = by_loop(latest, [x.t().flip(0)])
    got = torch.compile(fn, backend="mlc", fullgraph=True)(x)
    torch.testing.assert_close(got, wanted.flip(0).t() + 1)


def test_tensors_that_the_function_reads_besides() -> None:
    scale = torch.rand(6) + 0.5
    scalar = torch.tensor(0.7)

    def combine(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> list[Tensor]:
        return [a + b + a * b * s * t]

    def fn(x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return associative_scan_op(combine, [x], (s, t))[0] * 2

    x = torch.rand(30, 4, 6) * 0.1
    (wanted,) = by_loop(lambda a, b: combine(a, b, scale, scalar), [x])
    got = torch.compile(fn, backend="mlc", fullgraph=True)(x, scale, scalar)
    torch.testing.assert_close(got, wanted * 2)


def test_what_stands_around_it_is_in_the_kernel() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        _, h = scanned(affine, x.sigmoid(), y * 2)
        return h.tanh() * y

    x, y = torch.randn(64, 33), torch.randn(64, 33)
    (graph,) = torch_mlc.explain(fn, x, y).graphs
    assert [k.rule for k in graph.kernels] == ["cpu_scan"] and not graph.libraries
    (_, wanted) = by_loop(affine, [x.sigmoid(), y * 2])
    got = torch.compile(fn, backend="mlc", fullgraph=True)(x, y)
    torch.testing.assert_close(got, wanted.tanh() * y)


def test_the_text_holds_the_function() -> None:
    (gm,) = capture(lambda x, y: scanned(affine, x, y), (torch.rand(9, 4), torch.rand(9, 4)))
    graph = import_graph(gm)
    text = show(graph)
    assert "scan(associative(mul(var('a0', float32), var('b0', float32))" in text
    assert parse(text) == graph
    other = parse(text.replace("add(", "sub("))
    assert other != graph, "another function is another monoid"


def whole(x: Tensor, combine: Combine) -> Tensor:
    return associative_scan_op(combine, [x], ())[0]


def test_what_is_no_function_of_elements_stays_the_op() -> None:
    """Dynamo refuses such functions; other tracers do not."""
    for combine, reason in (
        (lambda a, b: [a + b * b.sum()], "no function of single elements"),
        (lambda a, b: [a + b.flip(0)], "reads other elements"),
        (lambda a, b: [a + b * torch.arange(4)], "depends on positions"),
    ):
        gm = make_fx(partial(whole, combine=combine), tracing_mode="fake")(torch.rand(9, 4))
        (found,) = (n for n in import_graph(gm).nodes if isinstance(n, Library))
        assert found.target == "hop::associative_scan" and reason in found.reason
