"""Random numbers: seeds rule, forward and backward agree, checkpoints repeat, and the generator is a good one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(fn: Callable[..., object], **how: object) -> Callable[..., Tensor]:
    return torch.compile(fn, backend="mlc", **{"fullgraph": True, **how})  # type: ignore[call-overload,no-any-return]


def every_kind(x: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 3, 100), torch.bernoulli(x.sigmoid()),
        F.dropout(x, 0.3), torch.rand(3, 5) * 2, torch.normal(1.0, 2.0, (7,)), x.clone().uniform_(-1, 3),
        torch.empty(4).exponential_(0.5), torch.randperm(9), torch.multinomial(x.softmax(-1), 2), x.clone().normal_(),
        F.rrelu(x, training=True), F.alpha_dropout(x, 0.2, training=True), torch.empty(5).geometric_(0.3),
        torch.empty(5).log_normal_(), torch.empty(5).cauchy_(), F.gumbel_softmax(x),
    )  # fmt: skip


def test_a_seed_gives_the_same_numbers_again() -> None:
    run, x = compiled(every_kind), torch.randn(6, 8)
    torch.manual_seed(11)
    first, second = run(x), run(x)
    torch.manual_seed(11)
    for a, b in zip(first, run(x), strict=True):
        assert torch.equal(a, b)
    assert not any(torch.equal(a, b) for a, b in zip(first[:8], second[:8], strict=True))


def test_eagers_numbers_bit_for_bit() -> None:
    run, x = compiled(every_kind, options={"fallback_random": True}), torch.randn(6, 8)
    for _ in range(2):
        seed = torch.get_rng_state()
        ours = run(x)
        after = torch.get_rng_state()
        torch.set_rng_state(seed)
        for a, b in zip(ours, every_kind(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert torch.equal(after, torch.get_rng_state())


def drawn_beside(q: Tensor) -> tuple[Tensor, ...]:
    """Draws whose order nothing but the generator tells, the last of which an attention or a scatter reads."""
    return F.dropout(q, 0.5), torch.empty_like(q).geometric_(0.4)


def beside_attention(q: Tensor) -> tuple[Tensor, ...]:
    y = torch.softmax(q @ q.mT, -1) @ q
    dropped, trials = drawn_beside(q)
    return y.abs().sqrt(), dropped, trials * y


def behind_attention(q: Tensor) -> tuple[Tensor, ...]:
    """What the attention could take in waits for a draw that waits for the attention."""
    y = torch.softmax(q @ q.mT, -1) @ q
    dropped, trials = drawn_beside(y.abs().sqrt())
    return dropped, trials * y


def between_attentions(q: Tensor) -> tuple[Tensor, ...]:
    """Each could take in a draw; then each would wait for the other."""
    y, z = torch.softmax(q @ q.mT, -1) @ q, torch.softmax(q @ q.mT * 0.5, -1) @ q.sin()
    first, last = torch.rand_like(y), torch.empty_like(y)
    dropped = F.dropout(z.sum(-1), 0.5)
    return y * last.exponential_(), z * first, dropped


def beside_a_scatter(q: Tensor) -> tuple[Tensor, ...]:
    rows = torch.arange(q.shape[1]) // 2
    started = q.new_zeros(q.shape).index_add(1, rows, q.exp())
    dropped, trials = drawn_beside(q)
    return started.sqrt(), dropped, started.index_add(1, rows, trials)


@pytest.mark.parametrize("fn", [beside_attention, behind_attention, between_attentions, beside_a_scatter])
def test_draws_keep_their_order_around_functions_that_are_opened_first(fn: Callable[..., tuple[Tensor, ...]]) -> None:
    for rows in (4, 100):
        x = torch.randn(2, rows, 16)
        run = compiled(fn, options={"fallback_random": True}, dynamic=False)
        results = []
        for called in (run, fn):
            torch.manual_seed(5)
            results.append([*called(x), torch.get_rng_state()])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_eagers_numbers_in_training() -> None:
    def f(x: Tensor) -> Tensor:
        return (F.dropout(x.exp(), 0.4) * torch.rand_like(x)).sum()

    results = []
    for fn in (compiled(f, options={"fallback_random": True}), f):
        torch.manual_seed(5)
        x = torch.linspace(-1, 1, 40).requires_grad_()
        loss = fn(x)
        loss.backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(*results)


def test_two_uses_differ_and_ranks_of_a_loop_too() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.rand_like(x) for _ in range(4))

    found = compiled(f)(torch.empty(1000))
    for i, a in enumerate(found):
        for b in found[:i]:
            assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.15


def test_the_numbers_do_not_depend_on_layout_or_fusion() -> None:
    def alone(x: Tensor) -> Tensor:
        return torch.rand_like(x)

    def fused(x: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.rand_like(x)
        return r, (r * x.exp()).sum(0)

    x = torch.randn(13, 7)
    results = []
    for fn, given in ((alone, x), (fused, x), (alone, x.t().contiguous().t())):
        torch.manual_seed(2)
        out = compiled(fn)(given)
        results.append(out[0] if isinstance(out, tuple) else out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_forward_agrees_with_backward() -> None:
    def f(x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return F.dropout(x * noise, 0.25) * torch.rand_like(x)

    x = torch.ones(64, 33, requires_grad=True)
    out = compiled(f)(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_that_a_checkpoint_runs_again(dynamic: bool) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return F.dropout((x * w).sin(), 0.5) * torch.rand_like(x) * torch.rand(x.shape)

        return checkpoint(part, x, use_reentrant=False) * 3

    w = torch.full((40,), 1e-3)  # the sine of little is the thing itself
    x = torch.ones(30, 40, requires_grad=True)
    run = compiled(f, dynamic=dynamic)
    torch.manual_seed(4)
    out = run(x, w)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach(), rtol=1e-4, atol=1e-7)
    torch.manual_seed(4)
    assert torch.equal(run(x, w), out)


def test_a_checkpoint_around_a_compiled_region_with_dropout() -> None:
    run = compiled(lambda x: F.dropout(x * 2, 0.5))
    x = torch.ones(50, 20, requires_grad=True)
    out = checkpoint(run, x, use_reentrant=False)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


def test_forked_generators() -> None:
    run = compiled(lambda x: x + torch.rand_like(x))
    x = torch.zeros(20)
    torch.manual_seed(1)
    plain = [run(x), run(x)]
    torch.manual_seed(1)
    first = run(x)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        run(x)
    assert torch.equal(first, plain[0]) and torch.equal(run(x), plain[1])
    state = torch.get_rng_state()
    again = run(x)
    torch.set_rng_state(state)
    assert torch.equal(run(x), again)


def test_a_generator_of_the_users() -> None:
    def f(x: Tensor, g: torch.Generator) -> Tensor:
        return x + torch.rand(8, generator=g)

    run = torch.compile(f, backend="mlc")
    a, b = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(2):
        torch.testing.assert_close(run(torch.zeros(8), a), f(torch.zeros(8), b))


def test_seeding_inside_the_function() -> None:
    def f(x: Tensor) -> Tensor:
        torch.manual_seed(8)
        return x + torch.rand_like(x)

    run = torch.compile(f, backend="mlc")
    assert torch.equal(run(torch.zeros(9)), run(torch.zeros(9)))


# --- statistics -------------------------------------------------------------------------------------------------------

COUNT = 1 << 17


def draw(fn: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(2024)
    return compiled(fn)(torch.empty(COUNT, dtype=dtype))


def chi_squared(values: Tensor, bins: int) -> float:
    """Of values that should be uniform over [0, 1), in standard deviations from what is expected."""
    counts = torch.histc(values.float(), bins, 0, 1)
    expected = len(values) / bins
    return float(((counts - expected).square() / expected).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_uniform_numbers(dtype: torch.dtype) -> None:
    u = draw(torch.rand_like, dtype)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.double().mean() - 0.5) < 5 / math.sqrt(12 * COUNT) + (0.002 if dtype is torch.bfloat16 else 0)
    if dtype in (torch.float32, torch.float64):
        assert abs(chi_squared(u, 256)) < 5
        # Neighbours, and elements one register or one row apart, have nothing to do with each other.
        for lag in (1, 8, 16, 512):
            assert abs(torch.corrcoef(torch.stack((u[:-lag], u[lag:])))[0, 1]) < 5 / math.sqrt(COUNT)


def test_normal_numbers() -> None:
    z = draw(torch.randn_like).double()
    assert abs(z.mean()) < 5 / math.sqrt(COUNT) and abs(z.var() - 1) < 5 * math.sqrt(2 / COUNT)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / COUNT) and abs((z**4).mean() - 3) < 5 * math.sqrt(96 / COUNT)
    assert z.isfinite().all() and z.abs().max() > 4
    assert abs(chi_squared(torch.special.ndtr(z), 256)) < 5


def test_bernoulli_and_integers() -> None:
    for p in (0.1, 0.5, 0.93):
        kept = draw(lambda x, p=p: F.dropout(torch.ones_like(x), 1 - p)).gt(0).double().mean()
        assert abs(kept - p) < 5 * math.sqrt(p * (1 - p) / COUNT)
    values = draw(lambda x: torch.randint_like(x, 0, 10))
    assert values.min() == 0 and values.max() == 9
    assert abs(chi_squared((values + 0.5) / 10, 10)) < 5


def test_gradients_of_dropout_lie_as_they_came() -> None:
    grad, mask = torch.randn(3, 4, 5).permute(2, 1, 0), (torch.rand(3, 4, 5) < 0.5).permute(2, 1, 0)
    back = torch.ops.aten.native_dropout_backward
    for g in (grad, grad.contiguous()):
        ours, wanted = torch.compile(lambda g, m: back(g, m, 2.0), backend="mlc")(g, mask), back(g, mask, 2.0)
        torch.testing.assert_close(ours, wanted)
        assert ours.stride() == wanted.stride()


DISTRIBUTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "exponential": (lambda x: x.exponential_(2.5), D.Exponential(2.5)),
    "cauchy": (lambda x: x.cauchy_(1.0, 0.5), D.Cauchy(1.0, 0.5)),
    "log_normal": (lambda x: x.log_normal_(0.5, 0.75), D.LogNormal(0.5, 0.75)),
    "normal of tensors": (lambda x: torch.normal(x.fill_(3.0), torch.full_like(x, 0.25)), D.Normal(3.0, 0.25)),
    "normal of numbers": (lambda x: torch.normal(-1.0, 2.0, x.shape), D.Normal(-1.0, 2.0)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    """Shares of elements below some places are those of the distribution, without any call of torch's."""
    fn, wanted = DISTRIBUTIONS[name]
    torch.manual_seed(0)
    before = counters.snapshot()
    n = 40000
    made = torch.compile(fn, backend="mlc")(torch.empty(n))
    assert counters.since(before).get("library_calls", 0) <= 1, "the seeds"
    for share in (0.001, 0.1, 0.5, 0.75, 0.99):
        place = wanted.icdf(torch.tensor(share))
        assert (made < place).float().mean().item() == pytest.approx(share, abs=5 * (share * (1 - share) / n) ** 0.5)
    assert made.isfinite().all() and (name != "exponential" or (made > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_trials_until_success(dtype: torch.dtype) -> None:
    run = torch.compile(lambda x: x.geometric_(0.3), backend="mlc")
    made = run(torch.empty(40000, dtype=dtype))
    for k in (1, 2, 5):
        share = 0.3 * 0.7 ** (k - 1)
        assert (made == k).float().mean().item() == pytest.approx(share, abs=0.012)
    assert made.min() == 1


def test_slopes_that_are_drawn() -> None:
    x = torch.randn(40000)
    for training in (False, True):
        made = torch.compile(lambda x, t=training: F.rrelu(x, 0.1, 0.3, training=t), backend="mlc")(x)
        torch.testing.assert_close(made[x > 0], x[x > 0])
        slopes = (made / x)[x < 0]
        assert slopes.min() > 0.0999 and slopes.max() < 0.3001 and slopes.mean().item() == pytest.approx(0.2, abs=0.002)
        assert (slopes.std() > 0.05) == training


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_a_dropouts_gradient_of_whole_numbers_is_scaled_as_a_float(dtype: torch.dtype) -> None:
    grad, mask = torch.tensor([1, 1, 0]).to(dtype), torch.tensor([True, False, True])
    run = compiled(lambda g, m: torch.ops.aten.native_dropout_backward(g, m, 2.5))
    assert torch.equal(run(grad, mask), torch.tensor([2.5, 0.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("count", "replacement"), [(1, False), (1, True), (3, False), (4, True)])
def test_categories_are_drawn_as_often_as_they_weigh(dtype: torch.dtype, count: int, replacement: bool) -> None:
    """In kernels, of rows of sums other than one too; none that weighs nothing, none twice without replacement."""

    def draw(weights: Tensor) -> Tensor:
        return torch.multinomial(weights, count, replacement)

    weights = torch.tensor([0.5, 0.0, 2.5, 1.0, 0.0, 1.0, 0.0], dtype=dtype).expand(20000, 7)
    torch.manual_seed(1)
    before = counters.snapshot()
    found = compiled(draw)(weights)
    assert counters.since(before)["kernel_calls"], "generated, but for what raises eager's errors"
    assert found.shape == (20000, count) and found.dtype is torch.int64
    shares, theirs = (torch.bincount(x.flatten(), minlength=7) / x.numel() for x in (found, draw(weights)))
    torch.testing.assert_close(shares, theirs, rtol=0, atol=0.01)
    assert not shares[weights[0] == 0].any()
    if not replacement:
        assert all(len(set(row)) == count for row in found[:500].tolist())
    row = compiled(draw)(weights[0])
    assert row.shape == (count,) and bool((weights[0][row] > 0).all())


@pytest.mark.parametrize(("count", "replacement"), [(1, False), (2, False), (4, True)])
def test_weights_that_eager_refuses_are_refused(count: int, replacement: bool) -> None:
    run = compiled(lambda weights: torch.multinomial(weights, count, replacement))
    for bad in ([0.0, 0, 0, 0], [-1.0, 2, 3, 1], [math.nan, 1, 1, 1], [math.inf, 1, 1, 1]):
        with pytest.raises(RuntimeError, match="probabilit"):
            run(torch.tensor([[1.0, 1, 1, 1], bad]))
    assert run(torch.ones(2, 4)).shape == (2, count)


def test_categories_of_any_number_of_rows() -> None:
    run = compiled(lambda weights: torch.multinomial(weights * 2, 2), dynamic=True)
    for rows in (3, 17):
        weights = torch.eye(9)[: rows % 9] + torch.eye(9)[1 : rows % 9 + 1]
        found = run(weights)
        assert (found.sort(-1).values == torch.tensor([0, 1]) + torch.arange(rows % 9)[:, None]).all()
