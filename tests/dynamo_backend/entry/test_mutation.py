"""Inputs that are written, and results that share memory with inputs or with each other: eager's aliasing, kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(params=[False, True], ids=["static", "dynamic"])
def dynamic(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def layout_kept(values: list[Any]) -> list[Any]:
    """Copies of the tensors, in which those that share a storage still do."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: list[Any] = []
    for x in values:
        if not isinstance(x, Tensor):
            made.append(x)
            continue
        storage = storages.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().clone())
        made.append(torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride()))
    return made


def sharing(tensors: list[Any]) -> list[tuple[int, int, bool]]:
    """Which of some tensors lie in one storage, and at which distance: two calls agree where these do."""
    found = []
    for i, a in enumerate(tensors):
        for j, b in enumerate(tensors[:i]):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel() and b.numel():
                same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
                found.append((i, j, same and a.data_ptr() - b.data_ptr()))
    return found


def same(fn: Callable[..., Any], *inputs: Any, dynamic: bool = False, calls: int = 2, fullgraph: bool = True) -> None:
    """Values, layouts and aliasing of results and inputs after each call; results stay tied to what they alias."""
    run = torch.compile(fn, backend="mlc", fullgraph=fullgraph, dynamic=dynamic)
    sides = []
    for call in (run, fn):
        given = layout_kept(list(inputs))
        seen: list[Any] = []
        for _ in range(calls):
            results = [r for r in tree_leaves(call(*given))]
            seen.append(sharing([*results, *given]))
            for r in results:
                if isinstance(r, Tensor) and r.is_floating_point() and r.numel():
                    with torch.no_grad():
                        r.reshape(-1)[:1].add_(1)  # where it is a view, whoever shares it changes
            seen += [r.clone() if isinstance(r, Tensor) else r for r in (*results, *given)]
            seen += [(r.shape, r.stride(), r.storage_offset()) for r in (*results, *given) if isinstance(r, Tensor)]
        sides.append(seen)
    for ours, eager in zip(*sides, strict=True):
        if isinstance(eager, Tensor):
            torch.testing.assert_close(ours, eager)
        else:
            assert ours == eager


# --- inputs that are written ------------------------------------------------------------------------------------------


def test_inputs_written_twice_and_read_between(dynamic: bool) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        z = x * y
        x.mul_(z)
        y.copy_(x)
        return z + x

    same(f, torch.randn(4, 5), torch.randn(4, 5), dynamic=dynamic)


def test_inputs_written_through_views(dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        x[1:3].mul_(2)
        x.t()[0].zero_()
        x.view(-1)[::3].add_(x.view(-1)[1])
        x.diagonal().fill_(7)
        return x.sum(0)

    same(f, torch.randn(4, 5), dynamic=dynamic)


def test_inputs_written_through_views_of_views(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x.unsqueeze(0).transpose(1, 2)[:, 1:]
        b = a[0].narrow(1, 0, 2)
        b.sub_(5)
        a.clamp_(min=-1)
        return b, a

    same(f, torch.randn(4, 5), dynamic=dynamic)


def test_strided_inputs_that_are_written(dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        x.exp_()
        x[0].neg_()
        return x + 1

    base = torch.randn(6, 8)
    for x in (base.t(), base[1::2, 2:6], base[:, 3], base.view(2, 3, 8).permute(2, 0, 1)):
        same(f, x, dynamic=dynamic)


def test_integer_and_bool_inputs_that_are_written(dynamic: bool) -> None:
    def f(x: Tensor, m: Tensor) -> Tensor:
        x += 3
        m ^= x > 4
        x[m] = -1
        return x.masked_fill(m, 0)

    same(f, torch.arange(12).view(3, 4), torch.zeros(3, 4, dtype=torch.bool), dynamic=dynamic)


def test_swapped_and_rotated_inputs(dynamic: bool) -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> None:
        kept = a.clone()
        a.copy_(b)
        b.copy_(c)
        c.copy_(kept)

    same(f, *(torch.randn(3, 4) for _ in range(3)), dynamic=dynamic)


def test_inputs_that_overlap_each_other(dynamic: bool) -> None:
    """Two arguments in one storage: what is written through one is read through the other."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        c = b + 1
        b.add_(10)
        return a + c

    base = torch.randn(24)
    if not dynamic:  # of storages of symbolic size torch wants to know the tensor that they are of
        same(f, base.view(4, 6), base.view(4, 6))
        same(f, base[:12], base[6:18])
    run = torch.compile(f, backend="mlc", fullgraph=True, dynamic=dynamic)
    for first, second in ((slice(0, 12), slice(6, 18)), (slice(0, 8), slice(7, 15))):
        twin = base.clone()
        torch.testing.assert_close(run(base[first], base[second]), f(twin[first], twin[second]))
        torch.testing.assert_close(base, twin)


def test_a_cache_that_is_filled_step_by_step(dynamic: bool) -> None:
    def f(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
        cache[:, at] = new.unsqueeze(1)
        return cache.sum(1) * new

    cache, run = torch.zeros(2, 6, 3), torch.compile(f, backend="mlc", fullgraph=True, dynamic=dynamic)
    twin = cache.clone()
    for k in range(6):
        new = torch.randn(2, 3)
        torch.testing.assert_close(run(cache, new, torch.tensor([k])), f(twin, new, torch.tensor([k])))
        torch.testing.assert_close(cache, twin)


def test_training_with_inputs_that_are_written() -> None:
    def f(x: Tensor, state: Tensor) -> Tensor:
        state.lerp_(x.detach().mean(0), 0.25)
        return (x - state).square().sum()

    grads = []
    for fn in (torch.compile(f, backend="mlc", fullgraph=True), f):
        x, state = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(), torch.ones(4)
        for _ in range(2):
            fn(x, state).backward()
        grads.append((x.grad, state))
    torch.testing.assert_close(*grads)


def written_after(x: Tensor, y: Tensor) -> Tensor:
    t = torch.sigmoid(y) * x
    y.add_(1)
    return t.sin()


def partly_written_after(x: Tensor, y: Tensor) -> Tensor:
    t = torch.sigmoid(y[::2]) * x[:3] + y.flip(0)[:3].exp() * x[2:]
    y[1:].mul_(2)
    return t.sin()


def written_behind_expansions_and_parts(x: Tensor, y: Tensor) -> Tensor:
    t = y.expand(3, 5).sigmoid() * x
    a, b = y.split([2, 3])
    t = t.sum() + (b.tanh() * x[2:] * a[0].exp()).sum()
    b.copy_(x[:3].detach())
    t = t * (y + 1)
    y.neg_()
    return t.sin() * (y * 2)


@pytest.mark.parametrize("f", [written_after, partly_written_after, written_behind_expansions_and_parts])
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_backwards_read_inputs_as_they_were(f: Callable[..., Tensor], strided: bool, dynamic: bool) -> None:
    """The forward writes at its end, and its backward may not make again of an input what the forward made of it."""
    found = []
    for fn in (f, torch.compile(f, backend="mlc", dynamic=dynamic)):
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        y = torch.linspace(-2, 1, 10)[::2] if strided else torch.linspace(-2, 1, 5)
        out = fn(x, y)
        found.append((out, y, *torch.autograd.grad(out.sum(), x)))
    torch.testing.assert_close(*found)


def test_a_leaf_that_needs_gradients_is_not_written() -> None:
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    for fn in (f, torch.compile(f, backend="mlc")):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            fn(torch.ones(3, requires_grad=True))
    inner = torch.ones(3, requires_grad=True)
    out = torch.compile(f, backend="mlc")(inner * 3)
    (g,) = torch.autograd.grad(out.sum(), inner)
    assert torch.equal(g, torch.full((3,), 6.0))


# --- results that alias -----------------------------------------------------------------------------------------------


def test_results_that_are_views_of_inputs(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x, x.t(), x[1:], x.view(-1), x[0].expand(3, -1), x.as_strided((2, 2), (1, 2), 1), x.detach()

    same(f, torch.randn(4, 6), dynamic=dynamic)


def test_results_that_share_memory_with_each_other(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.relu() + 1
        a, b = y.chunk(2)
        return y, a, b, a.t(), y, y[0, 1:3]

    same(f, torch.randn(4, 6), dynamic=dynamic)


@pytest.mark.parametrize("host_program", ["python", "native"])
def test_results_that_share_memory_count_writes_together(host_program: str) -> None:
    """What autograd saved of one of them, and a later graph that is given several, sees writes to another."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1:], y.t()[:2].t()

    def g(x: Tensor) -> tuple[Tensor, ...]:
        return (x * 2).chunk(2)

    weight = torch.ones(6, requires_grad=True)
    for fn in (f, g):
        run = torch.compile(fn, backend="mlc", fullgraph=True, options={"host_program": host_program})
        for call in (fn, run, run):
            results = call(torch.randn(4, 6))
            loss = (results[1] * weight).sum()
            results[0].zero_()
            assert len({r._version for r in results}) == 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_results_of_libraries_have_the_layout_that_they_give() -> None:
    """torch's fake tensors promise a contiguous result here, which nobody relies on who only returns it."""
    x = torch.randint(0, 3, (5, 4)).float()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(lambda x: torch.unique(x, dim=1), backend="mlc", fullgraph=True)
        torch.testing.assert_close(run(x), torch.unique(x, dim=1), check_stride=True)


def test_views_that_a_later_graph_writes() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        part = y[:-1]
        torch._dynamo.graph_break()
        y.mul_(3)
        return part * 1, part @ w

    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    for ours, eager in zip(torch.compile(f, backend="mlc")(x, w), f(x, w), strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_written_input_that_is_returned(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        return x, x[0], x + 1, x.view(-1)

    same(f, torch.randn(4, 6), dynamic=dynamic)


@pytest.mark.parametrize("strides", [(1, 2), (2, 3), (1, 1), (10, 2)])
def test_results_whose_elements_share_memory(dynamic: bool, strides: tuple[int, int]) -> None:
    """Copies with the strides of an overlapping operand: who writes last is eager's."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.slice_scatter(x, x[1:] - 1, 0, 1), torch.select_scatter(x, x[0] * 2, 0, 2),
            torch.diagonal_scatter(x, x.diagonal() + 1), torch.ops.aten.copy(x, x * 2 + 1),
        )  # fmt: skip

    x = torch.randn(64).as_strided((5, 3), strides)
    torch.testing.assert_close(torch.compile(f, backend="mlc", dynamic=dynamic)(x), f(x), check_stride=True)


def test_copies_behind_views_that_libraries_make(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.view_as_complex(x).clone()
        return torch.view_as_real(y), torch.view_as_real((y * 2j).clone()), torch.view_as_complex(x.clone()).real

    same(f, torch.randn(3, 4, 2), dynamic=dynamic)


def test_views_of_values_that_are_written(dynamic: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        a, b = y[:2], y.t()
        a.add_(1)
        b[1].zero_()
        return a, b, y.sum(), y

    same(f, torch.randn(4, 6), dynamic=dynamic)


def test_results_that_alias_in_training() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y[0], y, x.view(-1)

    results = []
    for fn in (torch.compile(f, backend="mlc", fullgraph=True), f):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        inner = x * 1
        a, b, c = fn(inner)
        assert a._base is not None or fn is not f
        (a.sum() * 2 + (b * b).sum() + c.sum()).backward()
        results.append((a.detach(), b.detach(), c.detach(), x.grad))
    torch.testing.assert_close(*results)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_storage_that_is_set_or_resized() -> None:
    """Either the frame runs as it is or torch's own words say why not; never another answer."""

    def resized(x: Tensor) -> Tensor:
        x.resize_(2, 2)
        return x * 2

    def changed(x: Tensor, y: Tensor) -> Tensor:
        x.set_(y)
        return x + 1

    def data(x: Tensor, y: Tensor) -> Tensor:
        x.data = y
        return x + 1

    for fn, inputs in (
        (resized, (torch.arange(4.0),)), (changed, (torch.zeros(3), torch.ones(3))),
        (data, (torch.zeros(3), torch.ones(3))),
    ):  # fmt: skip
        ours, eager = ([x.clone() for x in inputs] for _ in range(2))
        expected = fn(*eager)
        torch.testing.assert_close(torch.compile(fn, backend="mlc")(*ours), expected)
        torch.testing.assert_close(ours, eager)


def test_inference_tensors() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.softmax(x @ w, -1)
        return y + x.sum()

    run = torch.compile(f, backend="mlc", fullgraph=True)
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with torch.inference_mode():
        ours = run(x, w)
        made = torch.randn(3, 4)
        torch.testing.assert_close(run(made, w), f(made, w))
        written = torch.compile(lambda x: x.add_(1).sum(), backend="mlc")(made)
        torch.testing.assert_close(written, made.sum())
    torch.testing.assert_close(ours, f(x, w))
    assert ours.is_inference()
    # Outside, with tensors that were made inside.
    torch.testing.assert_close(run(made, w), f(made, w))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        f(made, w.clone().requires_grad_())
    # A compiled graph may keep what it made of them instead.
    leaves = [w.clone().requires_grad_() for _ in range(2)]
    f(made.clone(), leaves[0]).square().sum().backward()
    run(made, leaves[1]).square().sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_a_result_that_eager_does_not_save_may_be_written() -> None:
    """The min-cut would save the result, and make of it again what eager saves."""

    def f(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.abs() + 0.5).pow(1.5)
        return y, torch.nn.functional.gelu(y.masked_fill(mask, 1.0))

    x, mask = torch.randn(6, 5, requires_grad=True), torch.rand(6, 5) > 0.5
    grads = []
    for fn in (f, torch.compile(f, backend="mlc", fullgraph=True)):
        y, z = fn(x, mask)
        with torch.no_grad():
            y.zero_()
        grads.append(torch.autograd.grad(z.sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_copies_for_the_backward_are_made_before_inputs_are_written() -> None:
    def f(x: Tensor, y: Tensor, at: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.tanh(x) * 2
        out = torch.index_put((t.abs() + 0.5).rsqrt(), (at,), y, accumulate=True)
        y.index_add_(0, to, torch.ones_like(y[:3]))
        return out, t

    at, to = torch.tensor([1, 3, 3, 0]), torch.tensor([0, 2, 2])
    x, y = torch.randn(8, 5, requires_grad=True), torch.randn(4, 5)
    seen = []
    for fn in (f, torch.compile(f, backend="mlc", fullgraph=True)):
        given = y.clone()
        out, t = fn(x, given, at, to)
        seen.append([out.detach(), t.detach(), given, *torch.autograd.grad(out.sum() + t.sum(), x)])
    torch.testing.assert_close(seen[1], seen[0])


def test_what_the_backward_needs_was_written() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y.exp()).sum()

    for fn in (f, torch.compile(f, backend="mlc")):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3)
        out = fn(x, y)
        y.zero_()
        if fn is f:
            out.backward()  # eager saves y.exp(), which nobody wrote
            assert torch.equal(x.grad, torch.ones(3).exp())
            continue
        # Ours may save y and compute the exponential again: an error, or the same number.
        try:
            out.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert torch.allclose(x.grad, torch.ones(3).exp())

    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    for fn in (g, torch.compile(g, backend="mlc")):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3)
        out = fn(x, y)
        y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@pytest.mark.parametrize("host_program", ["python", "native"])
def test_views_that_the_backward_needs_were_written(host_program: str) -> None:
    """A view of an argument that is saved in its place counts the writes to the argument, returned as well or not."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x.view(-1, 4) @ w

    def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, 4)
        return flat @ w, flat

    def attention(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ (x @ w)

    for fn in (product, returned, attention):
        run = torch.compile(fn, backend="mlc", fullgraph=True, options={"host_program": host_program})
        for call in (fn, run, run):
            for way in (Tensor.zero_, lambda t: t.view(-1)[1:].mul_(2)):
                x, w = torch.randn(2, 3, 4), torch.randn(4, 5, requires_grad=True)
                result = call(x.requires_grad_(fn is attention), w)
                out = result[0] if fn is returned else result
                with torch.no_grad():
                    way(x)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    out.sum().backward()
                call(x, w)


def test_equal_results_are_tensors_of_their_own() -> None:
    """Views of what is computed twice too: callers may write into either."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        twice = [(x + 1).view(-1)[1:] for _ in range(2)]
        z = [torch.complex(x, x).mT for _ in range(2)]
        return torch.stack([x, x], -4), torch.stack([x, x], 0), *twice, *z, x.exp(), x.exp().flatten()

    x = torch.randn(3, 4, 5)
    for dynamic in (False, True):
        found = torch.compile(run, backend="mlc", dynamic=dynamic)(x)
        assert len({t.untyped_storage().data_ptr() for t in found}) == len(found)
        torch.testing.assert_close(found, run(x))
