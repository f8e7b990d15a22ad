"""Small programs at the edges of torch's semantics: torch.compile(backend="mlc") equals eager, static and dynamic.

Equal means values, NaN and infinities, dtypes, shapes and strides of every output, and what becomes of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[False, True], ids=["static", "dynamic"])
def dynamic(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def compiled(fn: Callable[..., Any], dynamic: bool, fullgraph: bool = True) -> Callable[..., Any]:
    return torch.compile(fn, backend="mlc", fullgraph=fullgraph, dynamic=dynamic)


def layout_kept(x: Tensor) -> Tensor:
    """A copy with the strides and the storage offset of the original."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())


def same(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool, exact: Callable[..., Any] | None = None, **tolerance: Any
) -> None:
    """Run ``fn`` compiled and eager on copies of the inputs; compare outputs with layout, and inputs after.

    ``exact`` stands in for ``fn`` in eager.
    """
    ours_in = [layout_kept(x) if isinstance(x, Tensor) else x for x in inputs]
    eager_in = [layout_kept(x) if isinstance(x, Tensor) else x for x in inputs]
    ours, eager = compiled(fn, dynamic)(*ours_in), (exact or fn)(*eager_in)
    both = zip(torch.utils._pytree.tree_leaves((ours, ours_in)), torch.utils._pytree.tree_leaves((eager, eager_in)))
    for a, b in both:
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, equal_nan=True, check_stride=b.numel() > 1, **tolerance)
        else:
            assert a == b


def same_gradients(fn: Callable[..., Tensor], *inputs: Tensor, dynamic: bool) -> None:
    """``same`` for the sum of squares of a float result and the gradients of every float input."""
    results = []
    for run in (compiled(fn, dynamic), fn):
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = run(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves if x.is_floating_point())])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, equal_nan=True)


# --- shapes and layouts -----------------------------------------------------------------------------------------------


def test_zero_sizes(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.exp() + 1, x.sum(0), x.sum(1), x.transpose(0, 1) * 2, torch.cat((x, x), 0), x.softmax(-1), x.mean(0)

    for shape in ((0, 5), (4, 0)):
        same(f, torch.empty(shape), dynamic=dynamic)


def test_products_over_nothing_and_with_nothing(dynamic: bool) -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (a @ b).relu() + 1, a.prod(1), a.any(1), a.all(1)

    same(f, torch.empty(3, 0), torch.empty(0, 4), dynamic=dynamic)


def test_cat_with_an_empty_tensor(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat((x, y, z)) * 2

    same(f, torch.randn(3, 4), torch.empty(0, 4), torch.randn(2, 4), dynamic=dynamic)
    same(f, torch.randn(3), torch.empty(0), torch.randn(2), dynamic=dynamic)


def test_no_dimensions(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + 1, y * x, y.sum() / x, x.sum(), x.argmax(), torch.stack((x, x)), x.expand(3), x.reshape(1), x.clone()

    same(f, torch.tensor(2.5), torch.randn(4), dynamic=dynamic)


def strided() -> dict[str, Tensor]:
    base = torch.randn(7, 6, 5)
    return {
        "transposed": base.transpose(0, 2),
        "sliced": base[1:6:2, 1:, 2:4],
        "offset": base.reshape(-1)[3:],
        "expanded": base[:1].expand(4, 6, 5),
        "diagonal": base[:, :5].diagonal(0, 1, 2),
        "selected": base[:, 2],
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "overlapping": base.reshape(-1).unfold(0, 5, 2),
    }


@pytest.mark.parametrize("how", list(strided()))
def test_inputs_of_any_layout(how: str, dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.sin(),
            x + x,
            x.sum(-1),
            x.softmax(0),
            x.contiguous() * 2,
            x.clone(),
            x.amax(0),
            x.t() if x.dim() < 3 else x.mT,
        )

    same(f, strided()[how], dynamic=dynamic)


def test_outputs_have_the_strides_of_eager(dynamic: bool) -> None:
    with FakeTensorMode():  # that of torch 2.11 promises other strides of ``zero``
        like = torch.empty_strided((5, 3, 4), (1, 20, 5))
        is_promised = torch.ops.aten.zero.default(like).stride() == like.stride()

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.permute(2, 0, 1)
        return (
            y + 1, y.contiguous(), torch.zeros_like(y), y.sum(1), (y * 2).flatten(1), y.to(torch.float64),
            torch.empty_like(y).zero_() if is_promised else y,
            y.clone(memory_format=torch.contiguous_format), (x.relu()).mT, y[:, ::2].neg(), y.new_ones(2, 3),
            y.argmax(0),
        )  # fmt: skip

    same(f, torch.randn(3, 4, 5), dynamic=dynamic)


def test_views_as_outputs_of_made_values(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.relu() + 1
        return (
            y,
            y[1:],
            y.t(),
            y[:, 2],
            y.reshape(-1)[::3],
            y.unsqueeze(1).expand(-1, 3, -1),
            y.view(-1),
            y.unfold(1, 2, 1),
        )

    x = torch.randn(5, 6)
    same(f, x, dynamic=dynamic)
    ours = compiled(f, dynamic)(x)
    assert all(o.untyped_storage().data_ptr() == ours[0].untyped_storage().data_ptr() for o in ours)


def test_outputs_that_alias_inputs(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x, x.t(), x[1:], x.view(-1), x.detach(), x * 2

    x = torch.randn(4, 3)
    same(f, x, dynamic=dynamic)
    ours = compiled(f, dynamic)(x)
    ours[0].zero_()
    assert all((o == 0).all() for o in ours[:-1])


def test_one_value_returned_several_times(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y, y, y + 0, x.sin(), y.clone(), y.view(-1)

    x = torch.randn(4, 3)
    same(f, x, dynamic=dynamic)
    ours = compiled(f, dynamic)(x)
    ours[4].zero_()
    assert not (ours[0] == 0).any()
    ours[2].zero_()
    assert not (ours[0] == 0).any(), "x + 0 and x are different tensors in eager"


def test_a_size_of_one_and_sizes_that_are_equal(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + y, (x * y).sum(-1), torch.maximum(x, y.flip(0)).softmax(-1)

    run = compiled(f, dynamic)
    for a, b in (((4, 1), (4, 6)), ((1, 6), (4, 6)), ((4, 4), (4, 4)), ((3, 5), (3, 5)), ((1, 1), (1, 1))):
        x, y = torch.randn(a), torch.randn(b)
        for ours, eager in zip(run(x, y), f(x, y)):
            torch.testing.assert_close(ours, eager)


# --- mutation ---------------------------------------------------------------------------------------------------------


def test_inputs_that_are_written(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.add_(1)
        y[1:, ::2] = x[0, 0]
        z.t().mul_(y.sum())
        return x * y

    same(f, torch.randn(4, 6), torch.randn(4, 6), torch.randn(5, 4), dynamic=dynamic)
    base = torch.randn(8, 12)
    same(f, base[::2, ::2], torch.randn(6, 4).t(), torch.randn(5, 4), dynamic=dynamic)


def test_values_written_in_place(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[0] = 7
        y[:, 1].neg_()
        y.masked_fill_(y > 1, 0.5)
        z = torch.zeros_like(y)
        z.copy_(y.t().contiguous().t())
        z.fill_diagonal_(3)
        return y, z, y.relu_() + z

    same(f, torch.randn(5, 5), dynamic=dynamic)


def test_swapped_inputs(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> None:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)

    same(f, torch.randn(6), torch.randn(6), dynamic=dynamic)


# --- dtypes -----------------------------------------------------------------------------------------------------------


def test_types_that_mix(dynamic: bool) -> None:
    def f(i: Tensor, b: Tensor, h: Tensor, x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return (
            i + b, i * h, h + x, b + 1, b * 0.5, i / 2, i // 3, i.sum(), b.sum(0), h.sum(), i + 2.5, s + i, s * h,
            x * s, h + 1,
            b & (i > 2), ~b, i << 2, i ^ 5, i.float().mean(), b.float().cumsum(0).to(torch.int32), h > i, i == 2.0,
            x.to(torch.int64), h.double(),
        )  # fmt: skip

    same(
        f, torch.arange(6, dtype=torch.int32) - 2, torch.tensor([True, False] * 3), torch.randn(6).bfloat16(),
        torch.randn(6) * 4,
        torch.tensor(3, dtype=torch.int64), dynamic=dynamic,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_wrap_around(dtype: torch.dtype, dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x + 100,
            x * x,
            x - 120,
            -x,
            x.abs(),
            x.sum(),
            x.prod(),
            x.sum(dtype=dtype),
            x.square(),
            x.to(torch.int16).to(torch.int8),
        )

    limits = torch.iinfo(dtype)
    same(f, torch.tensor([limits.min, limits.max, 1, 100, limits.max - 1], dtype=dtype), dynamic=dynamic)


def test_division_and_remainder_by_negative_numbers(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"),
            torch.div(x, y, rounding_mode="floor"), x / y,
            x // -3, x % -3, torch.fmod(x, -3), 7 // y, x.remainder(2),
        )  # fmt: skip

    x, y = torch.arange(-8, 9).repeat(4), torch.tensor([-3, -1, 2, 5]).repeat_interleave(17)
    same(f, x, y, dynamic=dynamic)
    same(f, x.float() / 2, y.float(), dynamic=dynamic)
    same(f, x.bfloat16(), y.bfloat16(), dynamic=dynamic)


def test_float_remainders_at_the_edges(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x % y, torch.fmod(x, y), torch.floor_divide(x, y), torch.div(x, y, rounding_mode="trunc")

    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 5.5, INF, -INF, NAN])
    x, y = torch.meshgrid(values, values, indexing="ij")
    same(f, x.contiguous(), y.contiguous(), dynamic=dynamic)


def test_float_to_integer_and_rounding(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.to(torch.int32),
            x.round(),
            x.floor(),
            x.ceil(),
            x.trunc(),
            x.frac(),
            x.to(torch.int8),
            x.sign(),
            x.bool(),
            x.long() // 2,
        )

    same(f, torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 100.7, -100.7, 0.0, -0.0]), dynamic=dynamic)


# --- values that are not finite ---------------------------------------------------------------------------------------

ODD = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, 3e38, 1e-30, -100.0, 100.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_finite_values_in_elementwise_functions(dtype: torch.dtype, dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.maximum(x, y), torch.minimum(x, y), x.relu(), x.clamp(-1, 1), x.clamp(min=y), F.hardtanh(x),
            F.leaky_relu(x), x.sign(),
            torch.fmax(x, y), torch.fmin(x, y), x > y, x <= y, x == y, x != y, torch.where(x > y, x, y), x.isnan(),
            x.isinf(), x.isfinite(), x.nan_to_num(),
        )  # fmt: skip

    x, y = torch.meshgrid(torch.tensor(ODD, dtype=dtype), torch.tensor(ODD, dtype=dtype), indexing="ij")
    same(f, x.contiguous(), y.contiguous(), dynamic=dynamic)


def test_not_finite_values_in_transcendental_functions(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.exp(), x.log(), x.tanh(), x.erf(), x.sigmoid(), x.sqrt(), x.rsqrt(), x.log1p(), x.expm1(), F.softplus(x),
            F.silu(x), F.gelu(x, approximate="tanh"), F.elu(x), F.mish(x), F.logsigmoid(x), x.pow(2), x.pow(0.5),
            x.pow(-1), x.reciprocal(), x.exp2(), x.log2(), x.sin(), x.atan(),
        )  # fmt: skip

    # Without the subnormal and the number near the largest, where functions may differ by a flush or an overflow.
    x = torch.tensor([v for v in ODD if abs(v) not in (1e-45, 3e38)])
    same(f, x, dynamic=dynamic)
    # With AVX-512, torch's kernel for float32 makes NaN of an infinity, which that for float64 keeps.
    same(F.gelu, x, dynamic=dynamic, exact=lambda x: F.gelu(x.double()).float())


def test_not_finite_values_in_reductions(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.amax(1), x.amin(1), x.max(1).values, x.max(1).indices, x.min(1).indices, x.argmax(1), x.argmin(0),
            x.sum(1), x.mean(0), x.softmax(1), x.softmax(0),
            x.log_softmax(1), x.logsumexp(1), x.any(1), x.all(0), x.prod(1), x.var(1), x.norm(dim=1), x.max(),
            x.argmax(), x.amax(0),
        )  # fmt: skip

    rows = [
        [-INF] * 19, [INF] * 19, [NAN] + [1.0] * 18, [1.0] * 18 + [NAN], [0.0] * 9 + [NAN, INF] + [1.0] * 8,
        [-INF] * 18 + [2.0],
        [0.5] * 18 + [INF], [INF, -INF] + [0.0] * 17,
    ]  # fmt: skip
    same(f, torch.tensor(rows), dynamic=dynamic)
    same(f, torch.tensor(rows)[:, :3], dynamic=dynamic)


def test_a_row_that_is_masked_whole(dynamic: bool) -> None:
    def f(x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(~mask, -INF).softmax(-1)

    x, mask = torch.randn(4, 9), torch.ones(4, 9, dtype=torch.bool).tril()
    mask[2] = False
    same(f, x, mask, dynamic=dynamic)
    same_gradients(f, x[:2], mask[:2], dynamic=dynamic)


def test_ties_of_argmax_go_to_the_first(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(1), x.argmin(1), x.argmax(0), x.argmin(0), x.argmax(), x.max(1).indices, x.min(0).indices

    same(f, torch.randint(0, 3, (37, 41)).float(), dynamic=dynamic)
    same(f, torch.randint(0, 3, (5, 200)), dynamic=dynamic)


# --- data movement ----------------------------------------------------------------------------------------------------


def test_movements(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.pad(x, (1, 2, 0, 3), value=-1.0), F.pad(x, (-1, 1)), x.roll(2, 1), x.roll((1, -2), (0, 1)), x.roll(3),
            x.flip(0), x.flip((0, 1)), x.repeat(2, 3),
            x.repeat_interleave(2, 1), torch.stack((x, x * 2), 1), x.tril(), x.triu(1), torch.cat((x, x.flip(1)), 1),
            x.rot90(), x.narrow(1, 1, 2),
            F.pad(x[None], (1, 1), mode="reflect"), F.pad(x[None], (2, 0), mode="replicate"), x.cumsum(1),
            x.cumsum(0) + 1,
        )  # fmt: skip

    same(f, torch.randn(5, 6), dynamic=dynamic)


def test_where_with_numbers(dynamic: bool) -> None:
    def f(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.where(x > 0, 1.0, 0.0), torch.where(x > 0, x, 0), torch.where(x > 0, 2, i),
            torch.where(x > 0, i, 0.5), torch.where(i > 1, True, False),
            x.masked_fill(x < 0, 9), torch.where(x > 0, x, x.new_tensor(2.0)),
        )  # fmt: skip

    same(f, torch.randn(8), torch.arange(8), dynamic=dynamic)


def test_gathers(dynamic: bool) -> None:
    def f(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return (
            x[i],
            x[:, i],
            x[i, i.flip(0)],
            x.index_select(0, i.abs()),
            x.gather(1, i.abs()[None].expand(4, -1)),
            F.one_hot(i.abs(), 6),
            x[-1],
        )

    same(f, torch.randn(4, 5), torch.tensor([0, -1, 2, -3]), dynamic=dynamic)


# --- random numbers, training -----------------------------------------------------------------------------------------


def test_dropout_agrees_with_its_backward_and_follows_the_seed(dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.3) * 2, 0.2)

    run, x = compiled(f, dynamic), torch.ones(300, 101, requires_grad=True)
    torch.manual_seed(5)
    first = run(x)
    first.sum().backward()
    assert x.grad is not None and torch.equal(first.detach(), x.grad)
    assert abs((first > 0).float().mean() - 0.56) < 0.02
    kept = first.detach()[first > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / 0.7 / 0.8))
    torch.manual_seed(5)
    assert torch.equal(run(x), first)
    assert not torch.equal(run(x), first)


def test_uniform_and_normal_numbers(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.rand(x.shape[0], 3),
            torch.bernoulli(x * 0 + 0.25),
            torch.randint_like(x, 2, 9),
        )

    u, n, v, b, i = compiled(f, dynamic)(torch.zeros(20000, 2))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.003
    assert abs(n.mean()) < 0.02 and abs(n.var() - 1) < 0.03 and not torch.equal(u[:, 0], u[:, 1])
    assert v.shape == (20000, 3) and abs(v.mean() - 0.5) < 0.01
    assert abs(b.mean() - 0.25) < 0.01 and i.min() == 2 and i.max() == 8 and torch.equal(i, i.round())


def test_batch_norm_keeps_its_running_statistics(dynamic: bool) -> None:
    eager, ours = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    run = compiled(ours, dynamic)
    for step in range(3):
        x = torch.randn(4 + step, 3, 5, 6) * (step + 1) + step
        torch.testing.assert_close(run(x), eager(x))
    for (name, a), b in zip(ours.named_buffers(), eager.buffers()):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
    eager.eval(), ours.eval()
    torch.testing.assert_close(run(x), eager(x))


def test_gradients_add_up_over_two_steps(dynamic: bool) -> None:
    eager = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    ours = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    ours.load_state_dict(eager.state_dict())
    run = compiled(ours, dynamic)
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        run(x).square().mean().backward()
        eager(x).square().mean().backward()
    for p, q in zip(ours.parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_two_graphs_around_a_break(dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return y.softmax(-1) + x

    run = compiled(f, dynamic, fullgraph=False)
    a, b = torch.randn(4, 5).requires_grad_(), torch.zeros(4, 5).requires_grad_()
    b.data.copy_(a.data)
    run(a).square().sum().backward()
    f(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_embedding_with_a_padding_index(dynamic: bool) -> None:
    table, index = torch.randn(9, 4), torch.tensor([[1, 2, 0], [0, 2, 8]])
    same_gradients(lambda w: F.embedding(index, w, padding_idx=2).sin(), table, dynamic=dynamic)
    same_gradients(lambda w: F.embedding(index, w, padding_idx=-1), table, dynamic=dynamic)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: str, smoothing: float, dynamic: bool) -> None:
    targets, weight = torch.tensor([1, -100, 3, 0, -100, 4]), torch.rand(5)

    def f(x: Tensor) -> Tensor:
        return F.cross_entropy(x, targets, reduction=reduction, label_smoothing=smoothing)

    def g(x: Tensor) -> Tensor:
        return F.cross_entropy(x, targets, weight, ignore_index=3, reduction=reduction, label_smoothing=smoothing)

    x = torch.randn(6, 5)
    same_gradients(f, x, dynamic=dynamic)
    targets = targets.abs() % 5
    same_gradients(g, x, dynamic=dynamic)


def test_cross_entropy_where_every_target_is_ignored(dynamic: bool) -> None:
    targets = torch.full((4,), -100)
    same_gradients(lambda x: F.cross_entropy(x, targets), torch.randn(4, 5), dynamic=dynamic)


def test_gradients_at_ties_and_edges(dynamic: bool) -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 2.0, 2.0, 0.0])
    y = torch.tensor([0.0, 1.0, 3.0, 2.0, -2.0, -0.0])
    for f in (
        torch.maximum, torch.minimum, lambda a, b: a.clamp(-1, 1) + b, lambda a, b: a.relu() + b.abs(),
        lambda a, b: a.amax(0) * b,
        lambda a, b: a.max(0).values * b, lambda a, b: a.sign() * b,
        lambda a, b: F.hardtanh(a, 0, 2) * F.leaky_relu(b), lambda a, b: torch.where(a > b, a, b),
    ):  # fmt: skip
        torch._dynamo.reset()
        same_gradients(f, x, y, dynamic=dynamic)


def test_gradients_of_inputs_in_every_layout(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x.mT.softmax(-1) * y).sum(1).tanh() + x.amax(-1)

    x = torch.randn(5, 6, 4).permute(2, 0, 1)
    y = torch.randn(4, 6, 1).expand(4, 6, 5)
    same_gradients(f, x, y, dynamic=dynamic)


# --- sizes that the data decide ---------------------------------------------------------------------------------------


def number_of(n: Tensor) -> int:
    k = n.item()
    torch._check(k >= 0)
    return int(k)


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda x, n: x.sin() * number_of(n), id="a number inside a kernel"),
        pytest.param(lambda x, n: torch.zeros(number_of(n), 3) + x.sum(), id="a number as a size"),
        pytest.param(lambda x, n: (x[x > 0].sum(), x * 2), id="a reduction over what is chosen"),
        pytest.param(lambda x, n: x * (x > 0).nonzero().shape[0], id="a size alone"),
        pytest.param(lambda x, n: (x[x > 0], x * 2)[1], id="a size that nobody reads"),
        pytest.param(lambda x, n: (x > 0).nonzero().shape[0], id="a size as the result"),
    ],
)
def test_sizes_decided_by_data(f: Callable[..., Any], dynamic: bool) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        same(f, torch.randn(6), torch.tensor(4), dynamic=dynamic)
