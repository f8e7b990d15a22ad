"""Substituted products give the same results: exactly, over whole numbers, whatever order, part or sum was chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, IRModule, Library, Reduction
from torch_mlc.ir.oracle.arrays import OracleError
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL, PassContext
from torch_mlc.scheduler.passes import substitute
from torch_mlc.scheduler.passes.products.operands import product_of
from torch_mlc.scheduler.passes.substitute import einsum, joined, rewrite, sites
from torch_mlc.scheduler.passes.substitute.search import GraphBudget


def imported(fn: Callable[..., object], *inputs: Tensor) -> Graph:
    """The graph of a function, its inputs in the order of the arguments."""
    return torch_mlc.from_fx(make_fx(fn)(*inputs)).graph


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers, of which float64 holds every sum of products of these tests exactly."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randint(-3, 4, shape, generator=generator).double()


def multiplied(node: Library, arrays: dict[str, Any]) -> list[Any]:
    """What a library's product gives."""
    found = product_of(node)
    assert found is not None, node
    result = found.alpha * (arrays[found.left] @ arrays[found.right])
    return [result if found.added is None else result + found.beta * arrays[found.added]]


def run(graph: Graph, inputs: tuple[Tensor, ...], **sizes: int) -> list[Any]:
    found = run_graph(graph, [x.numpy() for x in inputs], sizes, library=multiplied)
    return [found[o] for o in graph.outputs if isinstance(o, str)]


def flops(graph: Graph) -> int:
    """Terms that the products of a graph add up."""
    types, total = graph.types(), 0
    for node in graph.nodes:
        p = product_of(node)
        if p is not None:
            total += graph.symbols.hint(p.type.numel * types[p.left].shape[-1])
    return total


@pytest.fixture
def eager_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that may be substituted is, whatever it costs."""
    for module in (joined, rewrite, sites):
        monkeypatch.setattr(module, "gain_of", lambda before, after: 1e9)
    # Each rewrite seems to pay again: a few of them are enough.
    whole = import_module("torch_mlc.scheduler.passes.substitute.substitute")
    monkeypatch.setattr(whole, "GraphBudget", lambda: GraphBudget(10))


# --- random programs --------------------------------------------------------------------------------------------------


KINDS = (*("right",) * 3, "left", "swap", "split", "merge", "repeat", "part", "rows", "scale", "add", "sum")


def random_program(seed: int) -> tuple[Callable[..., object], tuple[Tensor, ...]]:
    """Products in a row, with views, factors, sums, repeated and chosen rows between."""
    rng = random.Random(seed)
    inputs = [whole(*(rng.randint(1, 5) for _ in range(rng.choice((2, 2, 3)))), seed=seed)]
    steps: list[tuple[str, Any]] = []
    shape, products = list(inputs[0].shape), 0

    def given(*size: int) -> int:
        inputs.append(whole(*size, seed=seed + len(inputs)))
        return len(inputs) - 1

    for _ in range(rng.randint(3, 8)):
        kind = rng.choice(KINDS)
        rank = len(shape)
        if kind == "right" and products < 4 and rank >= 2:
            n = rng.randint(1, 5)
            lead = shape[:-2] if rng.random() < 0.5 else []
            steps.append(("right", given(*lead, shape[-1], n)))
            shape[-1], products = n, products + 1
        elif kind == "left" and products < 4 and rank >= 2:
            m = rng.randint(1, 5)
            steps.append(("left", given(*(shape[:-2] if rng.random() < 0.5 else []), m, shape[-2])))
            shape[-2], products = m, products + 1
        elif kind == "swap" and rank >= 2:
            a, b = rng.sample(range(rank), 2)
            steps.append(("swap", (a, b)))
            shape[a], shape[b] = shape[b], shape[a]
        elif kind == "split" and rank == 2:
            d = rng.randrange(rank)
            by = next((k for k in (2, 3, 5) if shape[d] % k == 0), None)
            if by is not None:
                shape[d : d + 1] = [shape[d] // by, by]
                steps.append(("reshape", tuple(shape)))
        elif kind == "merge" and rank == 3:
            d = rng.randrange(2)
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
            steps.append(("reshape", tuple(shape)))
        elif kind == "repeat" and rank == 3:
            steps.append(("repeat", 2))
            shape[0] *= 2
        elif kind == "part" and shape[d := rng.randrange(rank)] > 1:
            start = rng.randrange(shape[d])
            length = rng.randint(1, shape[d] - start)
            steps.append(("part", (d, start, length)))
            shape[d] = length
        elif kind == "rows" and rank == 3:
            steps.append(("rows", rng.randrange(shape[1])))
            del shape[1]
        elif kind == "scale":
            steps.append(("scale", rng.choice((-1, 2))))
        elif kind == "add":
            steps.append(("add", given(*shape)))
        elif kind == "sum" and rank == 3:
            steps.append(("sum", d := rng.randrange(3)))
            del shape[d]

    def program(*xs: Tensor) -> object:
        x = xs[0]
        for what, how in steps:
            match what:
                case "right":
                    x = x @ xs[how]
                case "left":
                    x = xs[how] @ x
                case "swap":
                    x = x.transpose(*how)
                case "reshape":
                    x = x.reshape(how)
                case "repeat":
                    x = x[:, None].expand(-1, how, -1, -1).reshape(-1, *x.shape[1:])
                case "part":
                    x = x.narrow(*how)
                case "rows":
                    x = x[:, how]
                case "scale":
                    x = x * how
                case "add":
                    x = x + xs[how]
                case "sum":
                    x = x.sum(how)
        return x

    return program, tuple(inputs)


@pytest.mark.parametrize("seed", range(80))
def test_every_substitution_is_exact(seed: int, eager_search: None) -> None:
    program, inputs = random_program(seed)
    graph = imported(program, *inputs)
    changed = substitute(graph)
    verify(IRModule({"main": changed}))
    (have,) = run(changed, inputs)
    np.testing.assert_array_equal(have, np.asarray(program(*inputs)))


def test_random_programs_have_substitutions(eager_search: None) -> None:
    changed = 0
    for seed in range(80):
        graph = imported(*(lambda p: (p[0], *p[1]))(random_program(seed)))
        changed += substitute(graph) is not graph
    assert changed > 20


@pytest.mark.parametrize("fault", ["scale", "order", "part"])
def test_a_wrong_rule_is_seen(fault: str, eager_search: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above tells rules that are wrong on purpose: a factor lost, a transposed operand, another row."""
    reader = einsum.EinsumReader
    views, at = reader.through_views, reader.at

    def without_scale(self: Any, e: Any) -> Any:
        return replace(views(self, e), scale=1.0)

    def other_order(self: Any, e: Any) -> Any:
        found = views(self, e)
        first = found.factors[0]
        if len(first.indices) < 2:
            return found
        swapped = replace(first, indices=(*first.indices[:-2], first.indices[-1], first.indices[-2]))
        square = len({found.extents[s] for s in found.axes_of(first)}) == 1
        return replace(found, factors=(swapped, *found.factors[1:])) if square else found

    def first_row(self: Any, e: Any, axes: Any, indices: Any, extents: Any) -> Any:
        return at(self, e, axes, tuple(i if not i.is_Integer else i * 0 for i in indices), extents)

    if fault == "part":
        monkeypatch.setattr(reader, "at", first_row)
    else:
        monkeypatch.setattr(reader, "through_views", without_scale if fault == "scale" else other_order)
    wrong = 0
    for seed in range(80):
        program, inputs = random_program(seed)
        try:
            (have,) = run(substitute(imported(program, *inputs)), inputs)
        except OracleError:  # it reads beside a tensor
            wrong += 1
        else:
            wrong += not np.array_equal(have, np.asarray(program(*inputs)))
    assert wrong


# --- what is substituted ----------------------------------------------------------------------------------------------

X, W, A, B = (torch.zeros(s) for s in ((4, 128, 512), (512, 512), (512, 8), (8, 512)))


def _low_rank(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x[:, 0] @ (w + 0.5 * (a @ b))


def _low_rank_beside(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w + (x @ (a @ b)) * 2


def _last_row(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ w)[:, -1]


def _chosen_rows(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ w)[torch.arange(4), b[0, :4].abs().clamp(max=127).long()]


def _some_columns(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ w)[..., 10:74].relu()


def _mean(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ w).mean(1)


def _without_softmax(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = (x.view(4, 128, 64, 8).transpose(1, 2) * s for s in (1.0, 2.0, 3.0))
    return (q @ k.transpose(-1, -2)) @ v


def _compressed_keys(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    keys = (x[0] @ w).view(128, 8, 64).transpose(0, 1)
    return w.view(8, 64, 512)[:, :, :1].transpose(1, 2) @ keys.transpose(1, 2)


GAINS = [
    (_low_rank, 2.5), (_low_rank_beside, 1.9), (_last_row, 100), (_chosen_rows, 100), (_some_columns, 7), (_mean, 100),
    (_without_softmax, 10), (_compressed_keys, 10),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "gain"), GAINS, ids=[f.__name__[1:] for f, _ in GAINS])
def test_fewer_operations(fn: Callable[..., Tensor], gain: float) -> None:
    graph = imported(fn, X, W, A, B)
    changed = substitute(graph)
    verify(IRModule({"main": changed}))
    assert flops(graph) >= gain * flops(changed)
    torch.manual_seed(0)
    given = [torch.randn(t.shape, dtype=torch.float64) for t in (X, W, A, B)]
    (have,) = run(substitute(imported(fn, *given)), tuple(given))
    np.testing.assert_allclose(have, fn(*given).numpy(), rtol=1e-9, atol=1e-9)


def test_rows_nobody_reads_are_not_made() -> None:
    """The last row's logits: norms and products before them run over that row alone, up to what reads all of them."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        h = x + torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (512,)) @ w) @ w
        return (torch.nn.functional.layer_norm(h, (512,)) @ w)[:, -1].softmax(-1)

    graph = imported(model, X, W)
    changed = substitute(graph)
    verify(IRModule({"main": changed}))
    assert flops(changed) * 128 == flops(graph)
    rows = [n.types[0].numel for n in changed.nodes if isinstance(n, Reduction)]
    assert rows and all(r == 4 for r in rows)


# --- what is not ------------------------------------------------------------------------------------------------------


def test_what_others_read_stays() -> None:
    def seen(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y[:, -1], y.relu()

    def made(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        weight = a @ b
        return x @ weight, weight

    for graph in (imported(seen, X, W), imported(made, X, A, B)):
        assert substitute(graph) is graph


@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_order_follows_numerics(dtype: torch.dtype, numerics: str) -> None:
    """Float16 may overflow in one order alone, and eager's rounding is that of eager's products. Rows that nobody reads
    have no rounding."""
    x, w, a, b = (t.to(dtype) for t in (X, W, A, B))
    context = PassContext(numerics=numerics, target_of=USUAL.target_of)
    (gm,) = capture(lambda x, a, b: x @ (a @ b), (x, a, b))
    graph = import_graph(gm, numerics="eager")
    products = [n for n in graph.nodes if product_of(n) is not None]
    if len(products) == 2:  # where there are no products of a half type, they are of float32, with what that rounds
        allowed = numerics == "fast" and dtype is not torch.float16
        assert (substitute(graph, context) is not graph) == allowed
    (gm,) = capture(lambda x, w: (x @ w)[:, -1], (x, w))
    graph = import_graph(gm, numerics="eager")
    if any(product_of(n) is not None and n.types[0].dtype.torch is dtype for n in graph.nodes):
        assert substitute(graph, context) is not graph


def test_written_memory_is_read_before_it_is_written() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = x @ w
        w.mul_(2)
        return y @ v

    x, w, v = (torch.randn(*s) for s in ((64, 256), (256, 256), (256, 2)))
    written, own = w.clone(), w.clone()
    want, have = fn(x, own, v), torch.compile(fn, backend="mlc")(x, written, v)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-3)
    assert torch.equal(written, own)


# --- through torch.compile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("fn", "gain"), GAINS, ids=[f.__name__[1:] for f, _ in GAINS])
def test_compiled(fn: Callable[..., Tensor], gain: float, dynamic: bool) -> None:
    torch.manual_seed(1)
    given = [torch.randn(t.shape) for t in (X, W, A, B)]
    wide = fn(*(t.double() for t in given))
    have = torch.compile(fn, backend="mlc", dynamic=dynamic)(*given)
    want = fn(*given)
    assert (have.shape, have.stride(), have.dtype) == (want.shape, want.stride(), want.dtype)
    error, own = (float((t.double() - wide).abs().max()) for t in (have, want))
    assert error <= 4 * own + 1e-6 * float(wide.abs().max())


def test_values_that_are_no_numbers_stay_such() -> None:
    x, w = torch.randn(4, 128, 512), torch.randn(512, 512)
    x[1, -1, 7], x[2, 3, 4] = float("nan"), float("inf")
    have = torch.compile(_last_row, backend="mlc")(x, w, A, B)
    assert bool(have[1].isnan().all()) and bool(have[[0, 2, 3]].isfinite().all())


@pytest.mark.parametrize("size", [0, 1])
def test_empty_and_single(size: int) -> None:
    x, w = torch.randn(size, 128, 512), torch.randn(512, 512)
    for fn in (_last_row, _mean):
        torch.testing.assert_close(
            torch.compile(fn, backend="mlc")(x, w, A, B), fn(x, w, A, B), rtol=1e-4, atol=1e-4
        )  # fmt: skip


@pytest.mark.parametrize(
    "shapes", [((0, 3), (3, 4), (4, 2)), ((5, 0), (0, 4), (4, 3)), ((5, 3), (3, 4), (4, 0))], ids=str
)
@pytest.mark.parametrize("batch", [(), (2,), (0,)], ids=str)
def test_chains_with_no_elements(shapes: tuple[tuple[int, int], ...], batch: tuple[int, ...]) -> None:
    """Sizes of zero anywhere: nothing is divided by them, and what sums nothing is zero."""

    def chain(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        d = a @ b @ c
        return d.mT.flatten(-2), (d @ d.mT).sum(-1)

    given = [torch.randn(*batch, *s) for s in shapes]
    for have, want in zip(torch.compile(chain, backend="mlc")(*given), chain(*given), strict=True):
        torch.testing.assert_close(have, want)


def test_gradients() -> None:
    """Forward and backward are graphs of their own; what the backward needs is kept."""
    torch.manual_seed(0)
    given = [torch.randn(t.shape, dtype=torch.float64) for t in (X, W, A, B)]
    for fn, _ in GAINS:
        grads = []
        for f in (fn, torch.compile(fn, backend="mlc")):
            xs = [t.clone().requires_grad_() for t in given]
            f(*xs).square().sum().backward()
            grads.append([x.grad for x in xs])
        for have, want in zip(*grads, strict=True):
            if want is not None:
                torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-6 * float(want.abs().max()))


def test_explain_names_it() -> None:
    report = torch_mlc.explain(_last_row, *(torch.randn(t.shape) for t in (X, W, A, B)))
    assert "in the place of mm" in report.graphs[0].libraries[0].reason
