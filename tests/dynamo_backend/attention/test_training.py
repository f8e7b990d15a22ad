"""Attention in plain operations, trained: one kernel forward, three backward, gradients as in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.dynamo_backend.aten_passes.attention import joint_match as joint_match
from torch_mlc.runtime.counters import counters

Fn = Callable[..., Tensor]


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def softcap_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = _positions(q, k)
    scores = torch.tanh((q @ k.mT) * q.shape[-1] ** -0.5 / 2) * 2
    return torch.softmax(scores.masked_fill(n > m, float("-inf")), -1) @ v


def bias(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 4 + added, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Rows that see nothing are NaN, and so are the gradients of all that they meet."""
    return torch.softmax(torch.where(seen, q @ k.mT, float("-inf")), -1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    m, n = _positions(q, k)
    slopes = torch.arange(1, 5)[:, None, None] * 0.125
    return torch.softmax(q @ k.mT / 4 - slopes * (m - n).abs(), -1) @ v


def rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(2, -1, 4, 16).transpose(1, 2) for x in (q, k, v))
    return softcap_causal(q, k, v).transpose(1, 2).flatten(2)


def gradients(fn: Fn, inputs: list[Tensor], flow: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = fn(*leaves)
    out.backward(flow.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def check(fn: Fn, inputs: list[Tensor], compiled: Fn, tolerance: float) -> None:
    flow = torch.randn(fn(*inputs).shape)
    got = gradients(compiled, inputs, flow)
    expected = gradients(fn, [wide(x) for x in inputs], flow.to(inputs[0].dtype))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance, equal_nan=True)


def qkv(m: int, n: int, e: int, d: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 4, rows, width).to(dtype) for rows, width in ((m, e), (n, e), (n, d))]


def rules(fn: Fn, inputs: list[Tensor]) -> list[list[str]]:
    report = torch_mlc.explain(fn, *(x.clone().requires_grad_(x.is_floating_point()) for x in inputs), training=True)
    assert not any(g.libraries for g in report.graphs), str(report)
    return [[k.rule for k in g.kernels for _ in range(k.calls)] for g in report.graphs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_kernel_forward_and_three_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = qkv(37, 70, 16, 24, dtype)
    forward, backward = rules(softcap_causal, inputs)
    assert forward == ["cpu_attention"]
    assert sorted(backward) == ["cpu_attention", "cpu_attention", "cpu_row_reduction"]
    check(softcap_causal, inputs, torch.compile(softcap_causal, backend="mlc"), 3e-2 if dtype.itemsize == 2 else 1e-5)


def test_sizes_that_vary() -> None:
    torch.manual_seed(0)
    compiled = torch.compile(softcap_causal, backend="mlc", dynamic=True)
    for m, n in ((33, 70), (64, 64)):
        check(softcap_causal, qkv(m, n, 16, 16), compiled, 1e-5)


@pytest.mark.parametrize("fn", [grouped, rows_first], ids=lambda f: f.__name__)
def test_layouts(fn: Fn) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 33, 64) for _ in range(3)] if fn is rows_first else qkv(33, 33, 16, 16)
    counters.reset()
    check(fn, inputs, torch.compile(fn, backend="mlc"), 1e-5)
    assert counters["library_calls"] == 0


def shared_rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four heads of queries read two of keys and values, which a model copies for them."""
    k, v = (x[..., :32].view(2, -1, 2, 1, 16).expand(-1, -1, -1, 2, -1).flatten(2) for x in (k, v))
    return rows_first(q, k, v)


@pytest.mark.parametrize("target", [None, "cuda:sm_90"])
@pytest.mark.parametrize("fn", [rows_first, shared_rows_first], ids=lambda f: f.__name__)
def test_heads_behind_rows_are_kept_where_they_are(fn: Fn, target: str | None) -> None:
    """Nothing is copied into the order that a product wants, neither for itself nor for the backward."""
    inputs = [torch.randn(2, 70, 64, requires_grad=True) for _ in range(3)]
    forward = torch_mlc.explain(fn, *inputs, training=True, target=target).graphs[0]
    assert [k.rule for k in forward.kernels] == ["gpu_attention" if target else "cpu_attention"], str(forward)
    assert forward.launches == 1


def test_masks_and_biases_without_gradient() -> None:
    torch.manual_seed(0)
    inputs = qkv(20, 40, 8, 8)
    check(
        bias, [*inputs, torch.randn(4, 20, 40, dtype=torch.float64).float()], torch.compile(bias, backend="mlc"), 1e-5
    )
    seen = torch.rand(2, 1, 20, 40) < 0.5
    seen[1, 0, 3] = False
    check(masked, [*inputs, seen], torch.compile(masked, backend="mlc"), 1e-5)


def added_mask(scores: Tensor, seen: Tensor) -> Tensor:
    return scores + torch.where(seen, 0.0, -3.4e38)


def filled_mask(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -3.4e38)


def added_bias(scores: Tensor, seen: Tensor) -> Tensor:
    return scores + (seen.cumsum(-1) * 0.25).sin()


@pytest.mark.parametrize("target", [None, "cuda:sm_90"])
@pytest.mark.parametrize("mask", [added_mask, filled_mask, added_bias], ids=lambda f: f.__name__)
def test_every_layer_of_a_model_that_reads_one_mask(mask: Callable[..., Tensor], target: str | None) -> None:
    torch.manual_seed(0)

    def layers(x: Tensor, seen: Tensor) -> Tensor:
        seen = seen & torch.ones(70, 70, dtype=torch.bool).tril()
        for _ in range(3):
            x = x + torch.softmax(mask(x @ x.mT / 8, seen), -1) @ x
        return x

    seen = torch.arange(70) < torch.tensor([70, 50])[:, None]
    inputs = [torch.randn(2, 70, 16), seen[:, None].expand(2, 1, 70).contiguous()]
    leaves = (inputs[0].clone().requires_grad_(), inputs[1])
    report = torch_mlc.explain(layers, *leaves, training=True, target=target)
    forward, backward = ([k for k in g.kernels for _ in range(k.calls)] for g in report.graphs)
    assert sum(k.rule.endswith("_attention") for k in forward) == 3, str(report)
    assert not any("softmax" in k.name for k in backward), str(report)
    if target is None:
        check(layers, inputs, torch.compile(layers, backend="mlc"), 1e-4)


def lowest(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Rows that see nothing are means, for their scores are the same: no logarithm can be added to such a number."""
    return torch.softmax((q @ k.mT).masked_fill(~seen, torch.finfo(torch.float32).min), -1) @ v


def far(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return torch.softmax(torch.where(seen, 0.0, 2.0**30) + (q @ k.mT) * 0, -1) @ v


@pytest.mark.parametrize("fn", [lowest, far], ids=lambda f: f.__name__)
def test_rows_whose_scores_are_beside_all_measure(fn: Fn) -> None:
    torch.manual_seed(0)
    seen = torch.rand(2, 1, 20, 40) < 0.5
    seen[1, 0, 3], seen[:, :, 7:9] = False, False
    check(fn, [*qkv(20, 40, 8, 8), seen], torch.compile(fn, backend="mlc"), 1e-5)


def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``einsum`` writes products with dimensions of one element that it moves about."""
    m, n = _positions(q, k)
    scores = torch.einsum("bhid,bhjd->bhij", q * 0.25, k).clamp(-1.5, 1.5) - (m - n).abs() * 0.125
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v).transpose(1, 2).flatten(2)


def summed_rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    return torch.einsum("bhij,bjhd->bihd", (scores / 4).softmax(-1), v).flatten(2)


def filled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = _positions(q, k)
    scores = q @ k.mT
    scores /= 4
    scores.masked_fill_(n > m + 3, torch.finfo(scores.dtype).min)
    scores += (m - n) * 0.125
    return torch.softmax(scores, -1) @ v


def below_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    return torch.softmax(scores - scores.amax(-1, keepdim=True).detach(), -1) @ v


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn", [summed, summed_rows_first, filled_in_place, below_the_largest], ids=lambda f: f.__name__
)
def test_ways_to_write_it(fn: Fn, dynamic: bool) -> None:
    torch.manual_seed(0)
    inputs = qkv(37, 70, 16, 16)
    if not dynamic:
        forward, backward = rules(fn, inputs)
        assert "cpu_attention" in forward and backward.count("cpu_attention") == 2, (forward, backward)
    check(fn, inputs, torch.compile(fn, backend="mlc", dynamic=dynamic), 1e-5)


def windows(x: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """Positions look their bias up, one for each head and pair, and windows share it."""
    q, k, v = x.view(6, 25, 3, 2, 8).permute(2, 0, 3, 1, 4)
    added = table[places.flatten()].view(25, 25, 2).permute(2, 0, 1)
    return (torch.softmax(q @ k.mT / 3 + added, -1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("fn", "dtype", "dynamic"),
    [(bias, torch.float32, False), pytest.param(bias, torch.bfloat16, True, marks=pytest.mark.slow),
     pytest.param(windows, torch.float32, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_gradient_of_a_bias(monkeypatch: pytest.MonkeyPatch, fn: Fn, dtype: torch.dtype, dynamic: bool) -> None:
    """It is summed over the batch where the gradients of keys and values are made."""
    monkeypatch.setattr(joint_match, "KEPT_BESIDE_BIAS", 0)
    torch.manual_seed(0)
    if fn is bias:
        inputs = [*qkv(37, 70, 16, 24, dtype), torch.randn(4, 37, 70).to(dtype)]
    else:
        inputs = [torch.randn(6, 25, 48), torch.randn(81, 2), torch.randint(81, (25, 25))]
    _, backward = rules(fn, inputs)
    assert backward.count("cpu_attention") == 2 and backward.count("cpu_row_reduction") == 1
    assert set(backward) <= {"cpu_attention", "cpu_row_reduction", "cpu_pointwise", "cpu_scatter"}
    check(fn, inputs, torch.compile(fn, backend="mlc", dynamic=dynamic), 3e-2 if dtype.itemsize == 2 else 1e-5)


def test_small_probabilities_beside_the_gradient_of_a_bias_are_kept() -> None:
    inputs = [x.requires_grad_() for x in (*qkv(20, 20, 8, 8), torch.randn(4, 20, 20))]
    assert "probabilities are kept for the backward: they take 0.0122 MiB" in str(
        torch_mlc.explain(bias, *inputs, training=True)
    )


@pytest.mark.slow
def test_gradient_of_a_bias_on_a_gpu() -> None:
    """A kernel of its own makes it, since programs do not combine results. That of queries makes what all are told."""
    inputs = [x.requires_grad_() for x in (*qkv(64, 64, 16, 16, torch.bfloat16), torch.randn(4, 64, 64).bfloat16())]
    report = torch_mlc.explain(bias, *inputs, training=True, options={"target": "cuda:sm_90"})
    assert [k.rule for k in report.graphs[1].kernels] == [
        "gpu_attention_gradients", "gpu_attention_gradients", "gpu_attention_bias",
    ]  # fmt: skip
    assert not report.graphs[1].libraries


@pytest.mark.parametrize(
    ("heads", "window", "width", "first"),
    [(8, 4, 32, "q"), (2, 49, 33, "v"), pytest.param(3, 64, 48, "q", marks=pytest.mark.slow),
     pytest.param(2, 300, 16, "v", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.parametrize("biased", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_queries_keys_and_values_of_a_head_in_one_row(
    heads: int, window: int, width: int, first: str, biased: bool
) -> None:
    """What the tile of a kernel's own rows holds is as wide as a head, whatever lies beside it: all compile."""

    def fn(x: Tensor, added: Tensor) -> Tensor:
        a, b, c = x.transpose(1, 2).chunk(3, -1)
        q, k, v = (a, b, c) if first == "q" else (b, c, a)
        scores = q @ k.mT / 6
        return torch.softmax(scores + added if biased else scores, -1) @ v

    inputs = [torch.randn(4, window, heads, 3 * width), torch.randn(heads, window, window)]
    report = torch_mlc.explain(fn, *(x.requires_grad_() for x in inputs), training=True, target="cuda:sm_90")
    assert not [k.error for k in report.kernels if k.error]
    assert [k.rule for k in report.graphs[1].kernels].count("gpu_attention_gradients") == 2


def test_probabilities_that_are_wanted_are_kept() -> None:
    torch.manual_seed(0)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(q @ k.mT, -1)
        return p @ v, p

    inputs = [x.requires_grad_() for x in qkv(20, 20, 8, 8)]
    report = torch_mlc.explain(fn, *inputs, training=True)
    assert "probabilities are kept for the backward: the graph's result reads them" in str(report)


class Halved(torch.autograd.Function):
    """A function of the user's: what it gives is what it is given, and half of the gradient goes back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, flow: Tensor) -> Tensor:  # type: ignore[override]
        return flow * 0.5


class Bounded(Halved):
    """The gradient is not even linear."""

    @staticmethod
    def backward(ctx: object, flow: Tensor) -> Tensor:  # type: ignore[override]
        return flow.clamp(-0.1, 0.1)


class Shifted(Halved):
    """Gradients of other places."""

    @staticmethod
    def backward(ctx: object, flow: Tensor) -> Tensor:  # type: ignore[override]
        return flow.roll(1, -1)


OWN: dict[str, Fn] = {
    "halved": Halved.apply, "bounded": Bounded.apply, "shifted": Shifted.apply,
    "half of them": lambda p: Halved.apply(p) * 0.5,
    "squares": lambda p: p * p.clone(),
    "squares with one gradient": lambda p: p * p.detach(),
    "quotient": lambda p: p / p.detach().clamp(min=0.1),
    "transposed": lambda p: p * p.mT,
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_gradients_that_are_not_of_the_same_factors(name: str) -> None:
    """The sum of probabilities times their gradients is not that of the output times its gradient."""
    torch.manual_seed(0)
    torch._dynamo.reset()

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OWN[name](torch.softmax(q @ k.mT / 4, -1)) @ v

    check(fn, qkv(40, 40, 16, 16), torch.compile(fn, backend="mlc"), 1e-5)


FACTORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gate": lambda p, g: p * g.sigmoid(),
    "several": lambda p, g: (p / 3 * g)[:, None].view(2, 4, 40, 40) * 0.5 / (1 + g.square()),
    "chosen": lambda p, g: torch.where(g > 0, p, 0) * 2,
    "filled": lambda p, g: (p * g).masked_fill(g > 0.3, 0),
    "dropped in evaluation": lambda p, g: F.dropout(p, 0.5, training=False) * g,
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_probabilities(name: str) -> None:
    """They go back as they came, and no probabilities are kept."""
    torch.manual_seed(0)
    torch._dynamo.reset()

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return FACTORS[name](torch.softmax(q @ k.mT / 4, -1), g) @ v

    inputs = [*qkv(40, 40, 16, 16), torch.randn(4, 40, 40)]
    report = torch_mlc.explain(fn, *(x.clone().requires_grad_() for x in inputs), training=True)
    assert "probabilities are kept" not in str(report)
    check(fn, inputs, torch.compile(fn, backend="mlc"), 1e-5)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(q @ k.mT / 4, -1), 0.25) @ v


def dropped_by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)


def dropped_rows_without_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows that see nothing are zeros, and so are their gradients."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, attn_mask=_seen(q, k))


def _seen(q: Tensor, k: Tensor) -> Tensor:
    m, n = _positions(q, k)
    return (m + n) % 3 > m // 30


@pytest.mark.parametrize(
    ("fn", "dtype", "dynamic"),
    [(dropped, torch.float32, True), (dropped_by_torch, torch.bfloat16, False),
     (dropped_rows_without_keys, torch.float32, False)],
)  # fmt: skip
def test_dropout_draws_its_numbers_again(fn: Fn, dtype: torch.dtype, dynamic: bool) -> None:
    """Which probabilities are kept is read off a product with the identity, made of the same seed."""
    torch.manual_seed(0)
    q, k, v = qkv(70, 24, 16, 24, dtype)
    forward, backward = (
        [k.rule for k in g.kernels]
        for g in torch_mlc.explain(fn, *(x.clone().requires_grad_() for x in (q, k, v)), training=True).graphs
    )
    assert forward.count("cpu_attention") == 1 and set(forward) <= {"cpu_attention", "cpu_pointwise"}
    assert sorted(backward) == ["cpu_attention", "cpu_attention", "cpu_row_reduction"]
    compiled = torch.compile(fn, backend="mlc", dynamic=dynamic)
    torch.manual_seed(1)
    shown = compiled(q, k, torch.eye(24, dtype=dtype).expand(2, 4, 24, 24).clone().requires_grad_())
    seen = _seen(q, k) if fn is dropped_rows_without_keys else torch.ones(70, 24, dtype=torch.bool)
    kept = (shown != 0).double()
    assert abs(float(kept.sum() / seen.expand(2, 4, 70, 24).sum()) - 0.75) < 0.03

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / 4).masked_fill(~seen, float("-inf"))
        rows = seen.any(-1, keepdim=True)
        return torch.where(rows, torch.softmax(torch.where(rows, scores, 0), -1), 0) * kept / 0.75 @ v

    def seeded(*inputs: Tensor) -> Tensor:
        torch.manual_seed(1)
        return compiled(*inputs)

    flow = torch.randn(2, 4, 70, 24)
    tolerance = 3e-2 if dtype.itemsize == 2 else 1e-5
    expected = gradients(reference, [wide(x) for x in (q, k, v)], flow.to(dtype))
    for a, b in zip(gradients(seeded, [q, k, v], flow), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_both_terms_of_the_gradient_of_scores_have_the_same_rounding() -> None:
    """They nearly cancel: one of a gradient as it is in memory and one as it is in registers would leave the rounding.

    Logits are so large that rounding decides; what is here is the error of eager itself.
    """

    def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.softmax(q @ k.mT * 0.3, -1) @ v
        return torch.tanh(out * 0.01) * out

    compiled = torch.compile(gated, backend="mlc", dynamic=False)
    ours, eager = 0.0, 0.0
    for seed in range(6):
        torch.manual_seed(seed)
        x, y = ((torch.randint(-40, 41, (4, 9, 16)) / 8).bfloat16() for _ in range(2))
        flow = torch.randn(4, 9, 16)
        truth, rounded, found = (
            torch.cat([t.double().flatten() for t in gradients(fn, inputs, flow)[1:]])
            for fn, inputs in ((gated, [wide(t) for t in (x, y, y)]), (gated, [x, y, y]), (compiled, [x, y, y]))
        )
        ours += float((found - truth).norm() / truth.norm())
        eager += float((rounded - truth).norm() / truth.norm())
    assert ours < 0.7 * eager, (ours, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(4, 9), (5, 64), (33, 8)])
def test_large_scores_of_few_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """Scores that are no larger than queries are saved, rounded; made again they are not, and weights of one would be
    the exponential of the difference."""

    def attend(x: Tensor) -> Tensor:
        x = x + 18
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        return torch.softmax(torch.where(mask, x @ x.mT, -1e4), -1) @ x

    torch.manual_seed(rows)
    x, flow = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    found = []
    for run, kind in ((attend, torch.float64), (attend, dtype), (torch.compile(attend, backend="mlc"), dtype)):
        given = x.to(kind).requires_grad_()
        found.append(torch.autograd.grad(run(given), given, flow.to(kind))[0].double())
    exact, eager, ours = found
    scale = float(exact.abs().max())
    # Rounded scores of eager's are no measure where they move weights: ours may be as far off as those at least.
    least = 0.1 if dtype.itemsize == 2 else 1e-2
    assert float((ours - exact).abs().max()) <= 2 * float((eager - exact).abs().max()) + least * scale
