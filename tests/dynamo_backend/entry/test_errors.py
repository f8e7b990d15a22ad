"""Illegal inputs: where eager raises, so does a compiled function, and the process lives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses import FakeTensorMode, fake_impls
from torch.nn import functional as F

import torch_mlc
from torch_mlc.ir.errors import DivisionByZeroError, FreedInputError, OutOfRangeError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Fn = Callable[..., Any]


def raises_alike(fn: Fn, good: tuple[Any, ...], bad: tuple[Any, ...], traced: bool = True, **how: Any) -> BaseException:
    """Compiled for what is right, called with what is wrong: an error of the kind that eager raises."""
    run = torch.compile(fn, backend="mlc", **how)
    torch.testing.assert_close(run(*good), fn(*good))
    with pytest.raises(Exception) as eager:
        fn(*bad)
    # What is wrong for all values Dynamo finds while it traces, and tells as a RuntimeError.
    with pytest.raises((eager.type, RuntimeError) if traced else eager.type) as ours:
        run(*bad)
    torch.testing.assert_close(run(*good), fn(*good))
    return ours.value


# --- wrong indices ----------------------------------------------------------------------------------------------------

TABLE = torch.arange(35.0).view(7, 5)
GATHERS: dict[str, tuple[Fn, Tensor, int]] = {
    "embedding": (lambda i, t=TABLE: F.embedding(i, t) * 2, torch.tensor([[1, 6], [0, 3]]), 7),
    "index": (lambda i, t=TABLE: t[i].exp(), torch.tensor([1, -7, 6]), 7),
    "index of columns": (lambda i, t=TABLE: t[:, i] + 1, torch.tensor([1, -5, 4]), 5),
    "index of two": (lambda i, t=TABLE: t[i, i + 1].sin(), torch.tensor([0, 3, 2]), 4),
    "index_select": (lambda i, t=TABLE: t.index_select(1, i).sum(0), torch.tensor([4, 0, 0]), 5),
    "gather": (lambda i, t=TABLE: t.gather(1, i) - 1, torch.tensor([[4], [0], [1]]), 5),
    "take": (lambda i, t=TABLE: t.take(i) * 3, torch.tensor([34, 0, -35]), 35),
    "in a slice": (lambda i, t=TABLE: t[2:5][i] * 2, torch.tensor([2, 0, -3]), 3),
    "in a transpose": (lambda i, t=TABLE: F.embedding(i, t.t()) * 2, torch.tensor([4, 0]), 5),
    "in a reshape": (lambda i, t=TABLE: t.view(-1)[i] * 2, torch.tensor([34, 0]), 35),
    "computed": (lambda i, t=TABLE: t[i * 2 - 1].sum(-1), torch.tensor([3, 0]), 4),
    "summed": (lambda i, t=TABLE: t[i].sum(), torch.arange(6).repeat(50), 7),
    "scatter": (lambda i, t=TABLE: t.scatter(1, i, 3.0) + 1, torch.tensor([[4], [0], [1], [2], [3], [0], [4]]), 5),
    "scatter of a tensor": (lambda i, t=TABLE: t.scatter(1, i, t * 2), torch.tensor([[4]] * 7), 5),
    "scatter_add": (lambda i, t=TABLE: t.scatter_add(1, i, t * 2), torch.tensor([[4]] * 7), 5),
    "one_hot": (lambda i: F.one_hot(i, 5) * 2, torch.tensor([4, 0, 3]), 5),
    "unpool": (
        lambda i, t=TABLE: F.max_unpool2d(t[None, :1, :4].view(1, 1, 2, 2), i, 2),
        torch.arange(12, 16).view(1, 1, 2, 2),
        16,
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", GATHERS)
def test_wrong_indices(name: str, dynamic: bool) -> None:
    fn, good, wrong = GATHERS[name]
    for value in (wrong, 10**9, -(10**9)):
        bad = good.clone()
        bad.view(-1)[-1] = value
        if name == "one_hot":
            traced = torch.compile(fn, backend="aot_eager", dynamic=dynamic)
            with suppress(IndexError, RuntimeError):
                traced(bad)
                pytest.skip("torch 2.11 traces comparisons with every class, of which none is wrong")
        error = raises_alike(fn, (good,), (bad,), traced=False, dynamic=dynamic)
        assert isinstance(error, (IndexError, RuntimeError))
        if name == "index":
            assert isinstance(error, OutOfRangeError) and f"index {value} is out of bounds" in str(error)


DIVISIONS: dict[str, Callable[..., Tensor]] = {
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "fmod": torch.fmod, "number": lambda a, b: 100 // b + a,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "row": lambda a, b: (a.view(-1, 5) // b[:5]).sum(1),
}  # fmt: skip


@pytest.mark.parametrize("form", ["python", "native"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_integers_divided_by_zero(name: str, dtype: torch.dtype, form: str) -> None:
    a, b = torch.arange(35).to(dtype), torch.randint(1, 9, (35,)).to(dtype)
    for place in (0, 4):
        wrong = b.clone()
        wrong[place] = 0
        options = {"host_program": form}
        error = raises_alike(DIVISIONS[name], (a, b), (a, wrong), traced=False, dynamic=True, options=options)
        assert isinstance(error, DivisionByZeroError) and "ZeroDivisionError" in str(error)
        torch.compiler.reset()


def test_divisors_that_are_sizes_or_numbers() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x // y.shape[0], x % y.sum().item()

    x = torch.arange(12)
    raises_alike(f, (x, torch.ones(3, dtype=torch.int64)), (x, torch.ones(0, dtype=torch.int64)), dynamic=True)
    raises_alike(f, (x, torch.tensor([1, 2])), (x, torch.tensor([1, -1])), dynamic=True)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.compile(lambda x: x % 0, backend="mlc")(x)
    # Floats have a quotient, and nothing is divided where there is nothing.
    y = torch.zeros(12)
    torch.testing.assert_close(torch.compile(lambda x, y: x // y, backend="mlc")(x, y), x // y, equal_nan=True)
    assert torch.compile(lambda x: x // 0, backend="mlc")(x[:0]).shape == (0,)


def test_targets_that_are_no_class() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y)

    x, y = torch.randn(4, 9), torch.tensor([1, 8, -100, 0])
    for value in (9, -1, 200):
        raises_alike(f, (x, y), (x, torch.tensor([1, value, -100, 0])), traced=False)


def test_bags_that_begin_where_no_index_is() -> None:
    indices, table = torch.tensor([1, 2, 3]), torch.randn(7, 5)

    def f(offsets: Tensor) -> Tensor:
        return F.embedding_bag(indices, table, offsets, mode="sum") + 1

    good = torch.tensor([0, 1, 3])
    for place, value in ((2, 4), (2, 10**12), (1, -1), (0, 1), (0, -1)):
        wrong = good.clone()
        wrong[place] = value
        raises_alike(f, (good,), (wrong,), traced=False)
        torch.compiler.reset()


def test_a_mask_that_takes_more_than_there_is() -> None:
    def f(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        return x.masked_scatter(mask, source) + 1

    x, source = torch.randn(3, 4), torch.randn(7)
    error = raises_alike(f, (x, x < 0.1, source[:1].expand(12)), (x, x < 9, source), dynamic=True)
    assert "out of bounds for dimension 0 with size 7" in str(error)
    raises_alike(f, (x, x > 9, source), (x, (x > 9).byte(), source))


def test_a_wrong_index_in_training() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    run = torch.compile(model, backend="mlc")
    run(torch.tensor([1, 9])).sum().backward()
    with pytest.raises(IndexError, match="index 10 "):
        run(torch.tensor([1, 10])).sum().backward()
    model.zero_grad()
    run(torch.tensor([1, 9])).sum().backward()
    assert model[0].weight.grad[9].abs().sum() > 0 and model[0].weight.grad[2].abs().sum() == 0


def test_a_wrong_index_among_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        table, index = torch.randn(1000, 64), torch.randint(0, 1000, (4096,))
        run = torch.compile(lambda t, i: t[i].relu(), backend="mlc")
        torch.testing.assert_close(run(table, index), table[index].relu())
        index[4000] = 1000
        with pytest.raises(IndexError, match="index 1000 "):
            run(table, index)
    finally:
        torch.set_num_threads(before)


def accumulate(x: Tensor, i: Tensor) -> None:
    x.add_(TABLE[i])


def normalize(x: Tensor, i: Tensor) -> None:
    x.sub_(TABLE[i].mean(1, keepdim=True)).mul_(x.sum(1, keepdim=True))


def gather_scattered(x: Tensor, i: Tensor) -> None:
    x.index_add_(0, torch.arange(3), TABLE[i] * 2)


def gather_places(x: Tensor, i: Tensor) -> None:
    x[(torch.arange(7) // 3)[i]] = 5


def quotients(x: Tensor, i: Tensor) -> None:
    x.add_((i + 12) // (i - 9))


def beside(x: Tensor, i: Tensor) -> Tensor:
    made = x + TABLE[i]
    x.mul_(2)
    return made


def scan_after(x: Tensor, i: Tensor) -> Tensor:
    rows = TABLE[i].sin()
    x.add_(1)
    return rows.cumsum(0) + 1


def divide_after(x: Tensor, i: Tensor) -> Tensor:
    quotients = TABLE[:3].long() // (i - 9)[:, None]
    x.add_(1)
    return quotients.cumsum(0) + 1


@pytest.mark.parametrize("form", ["python", "native"])
@pytest.mark.parametrize(
    "fn", [accumulate, normalize, gather_scattered, gather_places, quotients, beside, scan_after, divide_after]
)
def test_arguments_of_a_call_that_raises(fn: Fn, form: str) -> None:
    """Eager raises before it writes; a kernel that tells of a wrong index at its end would have written elements."""
    wanted, given = torch.ones(3, 5), torch.ones(3, 5)
    if fn is quotients:
        wanted, given = wanted[:, 0].long(), given[:, 0].long()
    run = torch.compile(fn, backend="mlc", options={"host_program": form})
    for wrong in (False, True, False):
        i = torch.tensor([6, 9 if wrong else 1, 2])
        for call, x in ((fn, wanted), (run, given)):
            with pytest.raises((IndexError, RuntimeError)) if wrong else nullcontext():
                call(x, i)
        torch.testing.assert_close(given, wanted)


def test_a_cache_is_updated_where_it_is_whatever_is_checked() -> None:
    """Of a scatter eager looks at one place after the other: the check of its own places costs it no copy."""

    def f(cache: Tensor, i: Tensor, x: Tensor) -> None:
        cache.index_copy_(0, i, x * 2)

    (graph,) = torch_mlc.explain(f, torch.zeros(50, 8), torch.tensor([3, 4]), torch.ones(2, 8)).graphs
    assert not graph.libraries


def test_positions_past_the_table() -> None:
    """The most usual of these mistakes: a sequence longer than its positions."""
    place = nn.Embedding(16, 8)

    def f(x: Tensor) -> Tensor:
        return x + place(torch.arange(x.shape[0]))

    run = torch.compile(f, backend="mlc", dynamic=True)
    for n in (3, 16):
        torch.testing.assert_close(run(torch.ones(n, 8)), f(torch.ones(n, 8)))
    with pytest.raises(IndexError):
        run(torch.ones(17, 8))


def test_a_table_without_elements() -> None:
    def f(t: Tensor, i: Tensor) -> Tensor:
        return t[i] * 2

    run = torch.compile(f, backend="mlc", dynamic=True)
    t = torch.empty(0, 3)
    torch._dynamo.decorators.mark_unbacked(t, 0)
    with pytest.raises((IndexError, RuntimeError)):
        run(t, torch.tensor([0, 1]))


# --- wrong shapes, devices, memory ------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu() + 1

    raises_alike(f, (torch.randn(3, 4), torch.randn(4, 5)), (torch.randn(3, 4), torch.randn(6, 5)), dynamic=True)
    raises_alike(lambda a, b: a + b, (torch.ones(3), torch.ones(3)), (torch.ones(3), torch.ones(4)))
    raises_alike(lambda x: x.view(4, -1), (torch.ones(2, 6),), (torch.ones(2, 7),))


def test_a_kernel_of_the_users_that_lies_about_its_shape() -> None:
    @torch.library.custom_op("mlc_errors::liar", mutates_args=())
    def liar(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0] + 1)

    @liar.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0])

    @torch.library.custom_op("mlc_errors::other_type", mutates_args=())
    def other_type(x: Tensor) -> Tensor:
        return x.double()

    @other_type.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    for form in ("python", "native"):
        options = {"host_program": form}
        with pytest.raises(RuntimeError, match=r"mlc_errors::liar\.default got shape \(4,\)") as caught:
            torch.compile(lambda x: liar(x) + 1, backend="mlc", options=options)(torch.ones(3))
        for told in ("tracing promised (3,)", "torch.library.opcheck(torch.ops.mlc_errors.liar.default, args)"):
            assert told in str(caught.value)
        # Kernels would read the bytes of one type as those of another.
        said = r"other_type.* type torch\.float64 where tracing promised .*torch\.float32"
        with pytest.raises(RuntimeError, match=said):
            torch.compile(lambda x: other_type(x) + 1, backend="mlc", options=options)(torch.ones(3))


def test_other_devices() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(0) + 1

    run = torch.compile(f, backend="mlc")
    x = torch.randn(3, 4)
    torch.testing.assert_close(run(x, x), f(x, x))
    abstract = run(x.to("meta"), x.to("meta"))
    assert abstract.device.type == "meta" and abstract.shape == (4,)
    for given in ((x, x.to("meta")), (x.to("meta"), x)):
        with pytest.raises(Exception, match="meta"):
            f(*given)
        with pytest.raises(Exception, match="meta"):
            run(*given)
    torch.testing.assert_close(run(x, x), f(x, x))


@pytest.mark.parametrize("training", [False, True])
def test_what_is_opened_elsewhere_on_devices_without_kernels(training: bool) -> None:
    """Products, convolutions, attention and losses, where the tensors are on no device that kernels are made for."""

    def attention(x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x

    def loss(x: Tensor, w: Tensor, at: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), at)

    def wide(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.conv2d(x, w, padding=1, groups=w.shape[0] // w.shape[1])).sum((2, 3))

    image, at = torch.randn(2, 8, 9, 9), torch.randint(5, (6,))
    examples: tuple[tuple[Fn, tuple[Tensor, ...]], ...] = (
        (lambda x, w: torch.relu(x @ w) + 1, (torch.randn(3, 3), torch.randn(3, 3))),
        (lambda x, w, b: F.gelu(F.linear(x, w, b)), (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5))),
        (attention, (torch.randn(2, 4, 8),)), (lambda q: F.scaled_dot_product_attention(q, q, q), (image,)),
        (wide, (image, torch.randn(8, 1, 3, 3))), (wide, (image, torch.randn(8, 8, 1, 1))),
        (loss, (torch.randn(6, 4), torch.randn(5, 4), at)),
    )  # fmt: skip
    # torch itself differentiates no loss there.
    for f, given in examples[: -1 if training else None]:
        torch._dynamo.reset()
        run = torch.compile(f, backend="mlc", options={"loss_chunk": 2})
        inputs = [t.to("meta").requires_grad_(training and t.is_floating_point()) for t in given]
        ours, eager = run(*inputs), f(*inputs)
        assert (ours.device, ours.shape, ours.stride()) == (eager.device, eager.shape, eager.stride())
        if training:
            ours.sum().backward()
            assert all(t.grad is not None and t.grad.is_meta for t in inputs if t.requires_grad)
        torch.testing.assert_close(run(*given), f(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["python", "native"])
def test_memory_that_was_freed(form: str) -> None:
    """Eager's process dies of it."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2 + y).sum(0)

    run = torch.compile(f, backend="mlc", dynamic=True, options={"host_program": form})
    x, y = torch.randn(40, 30), torch.randn(40, 30)
    torch.testing.assert_close(run(x, y), f(x, y))
    for freed in (0, 1):
        given = [x.clone(), y.clone()]
        given[freed].untyped_storage().resize_(0)
        with pytest.raises(FreedInputError, match=r"shape \(40, 30\), .* has a storage of 0 bytes"):
            run(*given)
    torch.testing.assert_close(run(x, y), f(x, y))
    torch.testing.assert_close(run(x[:0], y[:0]), torch.zeros(30))
    empty = torch.empty(0, 30)
    torch.testing.assert_close(run(empty, empty.clone()), torch.zeros(30))


@pytest.mark.parametrize("form", ["python", "native"])
def test_views_and_libraries_operands_that_were_freed(form: str) -> None:
    """What a kernel reads at an offset, what a library is given, what is written to, what only a view is made of."""
    functions: tuple[Callable[..., Any], ...] = (
        lambda x: x * 2, lambda x: torch.linalg.inv(x), lambda x: x.mul_(2), lambda x: x.t()[1:] @ x, lambda x: x.t()
    )  # fmt: skip
    whole = torch.randn(5, 4, 4)
    for f in functions:
        run = torch.compile(f, backend="mlc", options={"host_program": form})
        for _ in range(2):
            torch.testing.assert_close(run(whole.clone()[1]), f(whole.clone()[1]))
        for left in (0, 4 * 16 + 4 * 15):
            given = whole.clone()[1]
            given.untyped_storage().resize_(left)
            with pytest.raises(FreedInputError, match=f"offset 16 .* a storage of {left} bytes, .*at least 64"):
                run(given)


@pytest.mark.parametrize("form", ["python", "native"])
def test_tensors_that_never_had_memory(form: str) -> None:
    """Fakes say how large their storage is; only ops can do with them."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2 + y).sum(0)

    def g(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.cond(x.sum() > 0, lambda x, y: (x * 2, x @ y), lambda x, y: (x + y, y @ x), (x, y))

    def h(x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.inv(x) * 2 + y

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for function in (f, g, h):
        for dynamic in (False, True):
            torch._dynamo.reset()
            run = torch.compile(function, backend="mlc", dynamic=dynamic, options={"host_program": form})
            for _ in range(2):
                torch.testing.assert_close(run(x, y), function(x, y))
                with FakeTensorMode() as mode:
                    fakes = mode.from_tensor(x), mode.from_tensor(y)
                with pytest.raises(Exception, match="FakeTensor"):
                    run(*fakes)
    call = torch.compile(lambda x: torch.linalg.inv(x), backend="mlc", options={"host_program": form})
    torch.testing.assert_close(call(x), torch.linalg.inv(x))
    with FakeTensorMode() as mode:
        assert call(mode.from_tensor(x)).shape == (4, 4)


def test_layouts_that_have_no_strides() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).relu() + 1

    run = torch.compile(f, backend="mlc")
    x, y = torch.eye(4).to_sparse(), torch.randn(4, 3)
    torch.testing.assert_close(run(x, y), f(x, y))
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    ours, eager = (fn(nested) for fn in (torch.compile(lambda n: n.sin() * 2, backend="mlc"), lambda n: n.sin() * 2))
    torch.testing.assert_close(ours.values(), eager.values())


def test_types_that_do_not_fit() -> None:
    raises_alike(lambda x: x.softmax(-1), (torch.ones(3),), (torch.ones(3, dtype=torch.int64),))
    raises_alike(lambda x, y: x @ y, (torch.ones(3, 3),) * 2, (torch.ones(3, 3), torch.ones(3, 3, dtype=torch.float64)))
    raises_alike(lambda i, t: t[i], (torch.tensor([1]), torch.ones(3)), (torch.tensor([1.0]), torch.ones(3)))


def test_numbers_out_of_their_domain() -> None:
    """Integer division by zero raises in eager; on CPUs no kernel may trap."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x // y) + (x % y)

    x, y = torch.tensor([5, -7, 9]), torch.tensor([2, 3, -4])
    run = torch.compile(f, backend="mlc")
    torch.testing.assert_close(run(x, y), f(x, y))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        f(x, torch.tensor([2, 0, 1]))
    try:
        run(x, torch.tensor([2, 0, 1]))
    except RuntimeError as error:
        assert "ivision" in str(error)
    least = torch.tensor([-(2**63), -(2**63)])
    run(least, torch.tensor([-1, -1]))  # traps in hardware where nobody looks


def test_errors_of_the_graph_name_the_users_line() -> None:
    @torch.library.custom_op("mlc_errors::no_fake", mutates_args=())
    def no_fake(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(Exception, match="no_fake") as caught:
        torch.compile(lambda x: no_fake(x) * 2, backend="mlc", fullgraph=True)(torch.ones(3))
    assert not isinstance(caught.value, IndexError)


def test_distributions_that_are_none() -> None:
    x = torch.zeros(5)
    for draw in (lambda t: t.clone().uniform_(3, -1), lambda t: t.clone().normal_(0.0, -1.0)):
        with pytest.raises(RuntimeError, match="expects"):
            torch.compile(draw, backend="mlc")(x)


def test_positions_that_torch_takes_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fake tensors of torch 2.11 do: kernels would read the bytes of integers as those of floats."""
    op, known = torch.ops.aten._unique2.default, fake_impls.op_implementations_dict

    def old(mode: Any, func: Any, x: Tensor, *args: Any, **how: Any) -> Any:
        values, *others = torchs(mode, func, x, *args, **how)
        return values, *(x.new_empty(t.shape) for t in others)

    torchs = known[op]
    monkeypatch.setitem(known, op, old)
    x = torch.randn(5).round()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.raises(BackendCompilerFailed, match=r"say that the positions it gives are torch\.float32"):
            torch.compile(lambda x: x.unique(return_inverse=True)[1] * 2.0, backend="mlc", fullgraph=True)(x)
        torch.testing.assert_close(
            torch.compile(lambda x: x.unique() * 2.0, backend="mlc", fullgraph=True)(x), x.unique() * 2.0
        )
