"""Plain PyTorch attention becomes one function whose nest, run by the oracle, agrees with eager in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, IRModule, Library, Reduction
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler import rules
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import (
    alias_copies,
    eliminate_common,
    eliminate_dead,
    rewrite_attention,
    simplify_algebra,
    widen,
)
from torch_mlc.scheduler.rules import Capability

B, H, M, N, D, V = 2, 4, 17, 19, 3, 5
INF = float("inf")


def rewritten(fn: Callable[..., Any], inputs: Sequence[Tensor], dynamic: bool = False) -> Graph:
    """The graph of ``fn`` with attention opened, verified."""

    def in_order(*args: Tensor) -> Any:
        # Dynamo numbers inputs in the order in which they are first looked at.
        assert all(x.dim() >= 0 for x in args)
        return fn(*args)

    for x in inputs if dynamic else ():
        torch._dynamo.maybe_mark_dynamic(x, list(range(x.dim())))
    (gm,) = capture(in_order, inputs, dynamic=dynamic)
    graph = import_graph(gm)
    for step in (widen, simplify_algebra, eliminate_common, alias_copies):
        graph = step(graph)
    graph = eliminate_dead(rewrite_attention(graph))
    verify(IRModule({graph.name: graph}, graph.name))
    return graph


def arguments(graph: Graph, tensors: Sequence[Tensor]) -> list[Any]:
    """The inputs of a graph: the tensors, and the sizes that their shapes tell."""
    sizes: dict[sympy.Symbol, int] = {}
    rest = iter(tensors)
    given = [next(rest) if isinstance(i, Input) else None for i in graph.inputs]
    for i, t in zip(graph.inputs, given, strict=True):
        if isinstance(i, Input):
            sizes |= {e: n for e, n in zip(i.type.shape, t.shape, strict=True) if e.is_Symbol}
    return [sizes[i.value] if t is None else t for i, t in zip(graph.inputs, given, strict=True)]  # type: ignore[union-attr]


def ops(graph: Graph) -> list[str]:
    return [n.target for n in graph.nodes if isinstance(n, Library)]


def check(
    run: Any, fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False, tolerance: float = 1e-5,
    others: Sequence[Sequence[Tensor]] = (), **allowed: Any,
) -> Graph:  # fmt: skip
    """Opens the attention of ``fn`` into one call without products left, runs the nest, compares with float64."""
    graph = rewritten(fn, inputs, dynamic)
    assert sum(isinstance(n, Reduction) and n.monoid.name == "attention" for n in graph.nodes) == 1
    assert ops(graph) == list(allowed.get("library", []))
    fusion = fuse(graph)
    chains = [f for f in fusion.functions.values() if f.extra]
    assert len(chains) == 1 and len(chains[0].outputs) == 1
    assert sum(isinstance(n, CallTensor) for n in fusion.graph.nodes) == allowed.get("kernels", 1)
    nests = {name: lower_to_loops(f) for name, f in fusion.functions.items()}
    for nest in nests.values():
        verify(nest)
    for tensors in (inputs, *others):
        (result,) = run(fusion, nests, arguments(graph, tensors))
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        expected = fn(*wide)
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return fusion.graph


@pytest.fixture
def run(reference: Callable[..., Any]) -> Callable[..., list[Any]]:
    """``run(fusion, nests, inputs)``: by the oracle."""
    kind = type(reference(lambda x: x + 1, [torch.ones(1)]))
    return lambda fusion, nests, inputs: kind(fusion, nests).run(inputs)


def qkv(*lead: int, m: int = M, n: int = N, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*lead, r, c, generator=g) for r, c in ((m, D), (n, D), (n, V))]


def attend(scores: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ v


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])[None, :]


# --- variants of the function of the scores ---------------------------------------------------------------------------


def plain(s: Tensor) -> Tensor:
    return s / math.sqrt(D)


def causal(s: Tensor) -> Tensor:
    keep = torch.tril(torch.ones(s.shape[-2], s.shape[-1], dtype=torch.bool))
    return (s * 0.3).masked_fill(~keep, -INF)


def additive(s: Tensor) -> Tensor:
    i, j = positions(s)
    return s + torch.where(j > i, -INF, 0.0).to(s.dtype)


def window(s: Tensor) -> Tensor:
    i, j = positions(s)
    return torch.where((i - j).abs() <= 2, s, torch.tensor(-INF, dtype=s.dtype))


def softcap(s: Tensor) -> Tensor:
    i, j = positions(s)
    return (torch.tanh(s / 2) * 2).masked_fill(j > i, -INF)


def to_float(s: Tensor) -> Tensor:
    return s.float() * 0.2 if s.dtype is torch.bfloat16 else s * 0.2


@pytest.mark.parametrize("score", [plain, causal, additive, window, softcap, to_float], ids=lambda f: f.__name__)
def test_functions_of_scores(run: Any, score: Callable[[Tensor], Tensor]) -> None:
    check(run, lambda q, k, v: attend(score(q @ k.mT), v), *qkv(B, H))


@pytest.mark.parametrize("lead", [(), (B,), (B, H, 2)], ids=["single", "batch", "groups"])
def test_any_batch(run: Any, lead: tuple[int, ...]) -> None:
    check(run, lambda q, k, v: attend(causal(q @ k.mT), v), *qkv(*lead))


def test_alibi_relative_bias_and_documents(run: Any) -> None:
    g = torch.Generator().manual_seed(1)
    slope, table = torch.randn(H, generator=g), torch.randn(M + N, H, generator=g)
    documents = torch.randint(0, 2, (B, N), generator=g)

    def alibi(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        i, j = positions(q @ k.mT)
        return attend(q @ k.mT + slope[:, None, None] * (j - i), v)

    def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i, j = positions(q @ k.mT)
        return attend(q @ k.mT + table[i - j + N].permute(2, 0, 1), v)

    def within(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
        return attend(torch.where(d[:, None, :M, None] == d[:, None, None], q @ k.mT, -1e9), v)

    check(run, alibi, *qkv(B, H), slope)
    check(run, relative, *qkv(B, H), table)
    check(run, within, *qkv(B, H), documents)


@pytest.mark.parametrize("shape", [(M, N), (B, 1, 1, N), (1, H, M, N), (B, 1, M, 1), (1,)], ids=str)
def test_mask_tensors_of_any_shape(run: Any, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(2)
    bias, keep = torch.randn(shape, generator=g), torch.rand(shape, generator=g) < 0.7
    check(run, lambda q, k, v, m: attend(q @ k.mT + m, v), *qkv(B, H), bias)
    check(run, lambda q, k, v, m: attend((q @ k.mT).masked_fill(~m, -INF), v), *qkv(B, H), keep)


# --- ways to write it -------------------------------------------------------------------------------------------------


def test_softmax_by_hand(run: Any) -> None:
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.einsum("bhmd,bhnd->bhmn", q, k)
        e = torch.exp(s - s.max(-1, keepdim=True).values)
        return torch.einsum("bhmn,bhnd->bmhd", e / e.sum(-1, keepdim=True), v)

    def by_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        e = (s - s.amax(-1, keepdim=True)).exp()
        return (e * e.sum(-1, keepdim=True).reciprocal()) @ v

    check(run, by_hand, *qkv(B, H))
    check(run, by_reciprocal, *qkv(B, H))


def test_transposed_products(run: Any) -> None:
    check(run, lambda q, k, v: v.mT @ torch.softmax(k @ q.mT, -2), *qkv(B, H))
    check(run, lambda q, k, v: torch.softmax((k @ q.mT).mT, -1) @ v, *qkv(B, H))


def test_products_that_add(run: Any) -> None:
    bias = torch.randn(B, 1, N, generator=torch.Generator().manual_seed(3))
    check(run, lambda q, k, v, b: attend(torch.baddbmm(b, q, k.mT, beta=0.5, alpha=0.3), v), *qkv(B), bias)


def test_grouped_heads_read_their_group(run: Any) -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(*s, generator=g) for s in ((B, H, M, D), (B, 2, N, D), (B, 2, N, V)))

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k[:, :, None].expand(B, 2, H // 2, N, D).reshape(B, H, N, D)
        return attend(q @ k.mT, v.repeat_interleave(H // 2, 1))

    graph = check(run, grouped, q, k, v)
    (call,) = [n for n in graph.nodes if isinstance(n, CallTensor)]
    types = {i.name: i.type for i in graph.inputs if isinstance(i, Input)}
    assert [types[a].shape[1] for a in call.args] == [H, 2, 2], "keys and values are read without copies"


def test_fused_projection_and_layout_of_the_reader(run: Any) -> None:
    g = torch.Generator().manual_seed(5)
    x, w, o = (torch.randn(*s, generator=g) for s in ((B, M, 8), (8, 3 * H * D), (H * D, 8)))

    def module(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
        q, k, v = (t.view(B, M, H, D).transpose(1, 2) for t in (x @ w).chunk(3, -1))
        y = attend(causal(q @ k.transpose(-2, -1)), v)
        return y.transpose(1, 2).reshape(B, M, H * D) @ o

    check(run, module, x, w, o, library=["aten::mm.default"] * 2)


def test_epilogue_is_taken_in(run: Any) -> None:
    gate = torch.randn(B, M, H * V, generator=torch.Generator().manual_seed(6))

    def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return attend(q @ k.mT, v).transpose(1, 2).reshape(B, M, H * V) * torch.sigmoid(gate)

    check(run, gated, *qkv(B, H), gate)


def test_half_types_keep_scores_in_float32(run: Any) -> None:
    half = [t.bfloat16() for t in qkv(B, H)]

    def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(to_float(q @ k.mT), -1).to(q.dtype) @ v

    check(run, upcast, *half, tolerance=1e-2)
    check(run, lambda q, k, v: attend(softcap(q @ k.mT), v), *half, tolerance=1e-2)


# --- dynamic sizes, and rows that are odd -----------------------------------------------------------------------------


def test_dynamic_batch_and_lengths(run: Any) -> None:
    others = [qkv(3, H, m=1, n=4), qkv(1, H, m=6, n=9)]
    check(run, lambda q, k, v: attend(causal(q @ k.mT), v), *qkv(B, H), dynamic=True, others=others)


@pytest.mark.parametrize("odd", [-INF, INF, float("nan")], ids=str)
def test_odd_rows_are_those_of_eager(run: Any, odd: float) -> None:
    bias = torch.zeros(M, N)
    bias[1, :] = -INF
    bias[2, 3] = odd
    bias[3, :] = odd
    check(run, lambda q, k, v, b: attend(q @ k.mT + b, v), *qkv(B), bias)
    check(run, lambda q, k, v, b: torch.softmax(q @ k.mT + b, -1).nan_to_num() @ v, *qkv(B), bias)
    check(run, lambda q, k, v, b: torch.ops.aten._safe_softmax(q @ k.mT + b, -1) @ v, *qkv(B), bias)


def test_no_columns_give_zeros(run: Any) -> None:
    """Whether or not an attention is seen where the probabilities are none."""
    empty = [t[..., :0, :] if k else t for k, t in enumerate(qkv(B, H))]
    graph = rewritten(lambda q, k, v: attend(q @ k.mT * 0.5, v), empty)
    fusion = fuse(graph)
    nests = {name: lower_to_loops(f) for name, f in fusion.functions.items()}
    (result,) = run(fusion, nests, arguments(graph, empty))
    torch.testing.assert_close(result, torch.zeros(B, H, M, V), rtol=0, atol=0)


# --- where it stays apart ---------------------------------------------------------------------------------------------


def refusal(fn: Callable[..., Any], *inputs: Tensor) -> str:
    graph = rewritten(fn, inputs)
    assert not any(isinstance(n, Reduction) and n.monoid.name == "attention" for n in graph.nodes)
    return "; ".join(n.reason for n in graph.nodes if isinstance(n, Library))


def test_probabilities_that_are_needed_elsewhere() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(q @ k.mT, -1)
        return p @ v, p

    assert "is an output of the graph" in refusal(both, *qkv(B))
    assert "needs" in refusal(lambda q, k, v: (lambda p: p @ v + p @ (v + 1))(torch.softmax(q @ k.mT, -1)), *qkv(B))


def test_what_is_no_softmax_over_the_contracted_axis() -> None:
    for fn in (
        lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v,
        lambda q, k, v: torch.sigmoid(q @ k.mT) @ v,
        lambda q, k, v: ((q @ k.mT).exp() / (q @ k.mT).exp().sum(-1, keepdim=True)) @ v,
        lambda q, k, v: torch.softmax(q @ k.mT, -1).to(torch.float8_e4m3fn).to(q.dtype) @ v,
        lambda q, k, v: torch.softmax((q @ k.mT).double(), -1).float() @ v,
        lambda q, k, v: (lambda s: (s - s.amin(-1, keepdim=True)).exp() / s.exp().sum(-1, keepdim=True))(q @ k.mT) @ v,
    ):
        assert "stays apart" not in refusal(fn, *qkv(B))


def test_a_nan_of_weights_is_that_of_an_element(run: Any) -> None:
    """Those of a softmax come by whole rows; what multiplies probabilities has its own."""

    def weighted(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.nan_to_num(torch.softmax(q @ k.mT, -1) * w) @ v

    def tested(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        p = torch.softmax(q @ k.mT, -1)
        return torch.where(torch.isnan(p * w), 0.0, p) @ v

    w = torch.ones(B, M, N)
    w[0, 3, 4], w[1, 5, 6] = float("nan"), INF
    for fn in (weighted, tested):
        assert "stays apart" not in refusal(fn, *qkv(B), w)
        result = torch.compile(fn, backend="mlc", options={"cache": False})(*qkv(B), w)
        torch.testing.assert_close(result, fn(*qkv(B), w), rtol=1e-4, atol=1e-5)
    check(run, lambda q, k, v, w: (torch.nan_to_num(torch.softmax(q @ k.mT, -1)) * w) @ v, *qkv(B), w)


def test_scores_of_no_product_stay() -> None:
    reason = refusal(lambda q, k, v: torch.softmax((q @ k.mT).cumsum(-1), -1) @ v, *qkv(B))
    assert "attention stays apart: its scores are not one product of matrices" in reason


def test_scores_that_are_read_elsewhere_are_made_apart(run: Any) -> None:
    """What combines them then says nothing of attention, for it makes no scores."""
    graph = rewritten(lambda q, k, v: attend(q @ k.mT, v), inputs := qkv(B, m=1))
    (scores,) = (n for n in graph.nodes if isinstance(n, Reduction) and n.monoid.name == "sum")
    graph = replace(graph, outputs=(*graph.outputs, scores.names[0]))
    fusion = fuse(graph)
    verify(fusion.module)
    (attention,) = (f for f in fusion.functions.values() if f.extra)
    assert all(s.role is None for s in attention.stages)
    result, made = run(fusion, {n: lower_to_loops(f) for n, f in fusion.functions.items()}, arguments(graph, inputs))
    q, k, v = (t.double() for t in inputs)
    torch.testing.assert_close(result.double(), attend(q @ k.mT, v), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.double().view(B, 1, N), q @ k.mT, rtol=1e-5, atol=1e-5)


def test_targets_without_a_rule_for_it_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def products() -> int:
        graph = rewritten(lambda q, k, v: attend(q @ k.mT, v), qkv(B))
        return sum(isinstance(n, Library) for n in graph.nodes)

    assert products() == 0
    monkeypatch.setattr(rules, "RULES", tuple(r for r in rules.RULES if Capability.ATTENTION not in r.can))
    assert products() == 2
