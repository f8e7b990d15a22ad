"""Sums of a row's own elements, made by the function that is told of them: the backward of attention on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.function.function import Stage, TensorFunction
from torch_mlc.ir.graph.graph import CallTensor, Library
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.passes.canonical.eliminate_dead import eliminate_dead
from torch_mlc.scheduler.passes.products.chain_products import chain_products
from torch_mlc.scheduler.rules import default_schedule

Function = Callable[..., Any]
B, H, M, N, E = 2, 2, 20, 24, 16
SM90 = gpu_target("cuda:sm_90")


def parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, the gradients of scores, and what those are told of each row."""
    told = (g * o).sum(-1, keepdim=True)
    p = torch.exp(q @ k.mT - lse)
    return p, p * (g @ v.mT - told), told


def three(q: Tensor, k: Tensor, v: Tensor, g: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    p, ds, _ = parts(q, k, v, g, o, lse)
    return ds @ k, ds.mT @ q, p.mT @ g


def told_to_others(*args: Tensor) -> tuple[Tensor, ...]:
    return *three(*args), parts(*args)[2]


def bias_too(*args: Tensor) -> tuple[Tensor, ...]:
    return *three(*args), parts(*args)[1].sum(0)


def of_keys_alone(*args: Tensor) -> tuple[Tensor, ...]:
    return three(*args)[1:]


def waits_for_keys(q: Tensor, k: Tensor, v: Tensor, g: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """The only function that has these rows takes the other's result, which is told of them."""
    p, ds, _ = parts(q, k, v, g, o, lse)
    dk = ds.mT @ q
    return ds @ (k + dk), dk, p.mT @ g


def rows_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Output and gradient are [batch, rows, heads, width], and so is what is told."""
    told = (g * o).sum(-1).transpose(1, 2).unsqueeze(-1)
    p = torch.exp(q @ k.mT - lse)
    g = g.transpose(1, 2)
    ds = p * (g @ v.mT - told)
    return ds @ k, ds.mT @ q, p.mT @ g


def inputs(m: int = M, n: int = N, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q, k, v, g = (torch.randn(B, H, rows, E) / 2 for rows in (m, n, n, m))
    scores = q @ k.mT
    q, k, v, g, o = (x.to(dtype) for x in (q, k, v, g, torch.softmax(scores, -1) @ v))
    return [q, k, v, g, o, torch.logsumexp(scores, -1, keepdim=True)]


def fused(fn: Function, given: list[Tensor], device: str, dynamic: bool = False) -> Fusion:
    def in_order(*args: Tensor) -> Any:
        # Dynamo numbers inputs in the order in which they are first looked at.
        assert all(x.dim() >= 0 for x in args)
        return fn(*args)

    (gm,) = found = capture(in_order, given, dynamic=dynamic)
    if device != "cpu":
        retarget(found, device)
    graph = import_graph(gm)
    graph = eliminate_dead(chain_products(run_passes(GRAPH_PASSES, graph, USUAL)))
    return fuse(graph)


def kernels(fusion: Fusion) -> list[TensorFunction]:
    assert not any(isinstance(n, Library) for n in fusion.graph.nodes)
    return [fusion.functions[n.function] for n in fusion.graph.nodes if isinstance(n, CallTensor)]


def prologues(function: TensorFunction) -> list[Stage]:
    """The sums over what no column has, before any of a column."""
    (keys,) = function.inner
    first = next(k for k, s in enumerate(function.stages) if keys.var in (s.axes or ()))
    return [s for s in function.stages[:first] if s.monoid is not None]


@pytest.fixture
def check(reference: Function) -> Callable[..., Fusion]:
    """``check(fn, inputs, tolerance=)``: the functions for a GPU, by the oracle, against float64."""
    kind = type(reference(lambda x: x + 1, [torch.ones(1)]))

    def run(fn: Function, given: list[Tensor], tolerance: float = 1e-5) -> Fusion:
        fusion = fused(fn, given, "cuda:0")
        nests = {name: lower_to_loops(f) for name, f in fusion.functions.items()}
        for nest in nests.values():
            verify(nest)
        wanted = fn(*(t.double() for t in given))
        for a, b in zip(kind(fusion, nests).run(given), wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
        return fusion

    return run


@pytest.mark.parametrize(
    ("fn", "count"), [(three, 2), (told_to_others, 2), (bias_too, 3)], ids=lambda x: getattr(x, "__name__", "")
)
def test_queries_make_what_they_are_told(check: Callable[..., Fusion], fn: Function, count: int) -> None:
    torch.manual_seed(0)
    fusion = check(fn, inputs())
    functions = kernels(fusion)
    assert len(functions) == count
    # It stands before the functions that read the sum by their columns.
    assert [len(prologues(f)) for f in functions] == [1] + [0] * (count - 1)
    assert len(functions[0].outputs) == 2
    assert default_schedule(lower_to_loops(functions[0]), SM90).rule == "gpu_attention_gradients"


def test_layout_of_another_reader(check: Callable[..., Fusion]) -> None:
    torch.manual_seed(0)
    q, k, v, g, o, lse = inputs()
    fusion = check(rows_first, [q, k, v, *(x.transpose(1, 2).contiguous() for x in (g, o)), lse])
    assert [len(prologues(f)) for f in kernels(fusion)] == [1, 0]


def test_half_types(check: Callable[..., Fusion]) -> None:
    torch.manual_seed(0)

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """As the backward is written: what is told is a sum in float32."""
        told = (g.float() * o.float()).sum(-1, keepdim=True)
        p = torch.exp((q @ k.mT).to(lse.dtype) - lse)
        ds = (p * ((g @ v.mT).to(lse.dtype) - told.to(lse.dtype))).to(q.dtype)
        return ds @ k, ds.mT @ q, p.to(g.dtype).mT @ g

    fusion = check(fn, inputs(dtype=torch.bfloat16), tolerance=4e-2)
    assert [len(prologues(f)) for f in kernels(fusion)] == [1, 0]


def test_lengths_that_vary() -> None:
    given = inputs()
    for x in given:
        torch._dynamo.mark_static(x, [1, 3])
    functions = kernels(fused(three, given, "cuda:0", dynamic=True))
    assert [len(prologues(f)) for f in functions] == [1, 0]
    assert default_schedule(lower_to_loops(functions[0]), SM90).rule == "gpu_attention_gradients"


@pytest.mark.parametrize("fn", [of_keys_alone, waits_for_keys], ids=lambda f: f.__name__)
def test_where_it_stays_a_kernel(check: Callable[..., Fusion], fn: Function) -> None:
    """Nobody has these rows, or who has them would wait for itself."""
    torch.manual_seed(0)
    fusion = check(fn, inputs())
    functions = [f for f in kernels(fusion) if f.extra]
    assert len(functions) == (1 if fn is of_keys_alone else 2)
    assert not any(prologues(f) for f in functions)


def test_cpus_keep_it_apart() -> None:
    functions = [f for f in kernels(fused(three, inputs(), "cpu")) if f.extra]
    assert len(functions) == 2 and not any(prologues(f) for f in functions)
