"""Patterns of users: where they are found, what takes their place, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torch_mlc
from torch_mlc.dynamo_backend.patterns.register import PATTERNS
from torch_mlc.dynamo_backend.patterns.replace_patterns import replace_patterns

ops = torch.ops.mlc_tests_patterns
MARK = "mlc_tests_patterns"


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Ops that tell that they were put in the place of others: they are the identity, or a sum."""
    with torch.library._scoped_library(MARK, "FRAGMENT") as lib:
        lib.define("one(Tensor x, Scalar by=1) -> Tensor")
        lib.define("two(Tensor x, Tensor y) -> Tensor")
        lib.define("pair(Tensor x) -> (Tensor, Tensor)")
        lib.impl("one", lambda x, by=1: x.clone(), "CompositeExplicitAutograd")
        lib.impl("two", lambda x, y: x + y, "CompositeExplicitAutograd")
        lib.impl("pair", lambda x: (x.amax(-1), x.exp().sum(-1)), "CompositeExplicitAutograd")
        yield


Trace = Callable[..., fx.GraphModule]
X = torch.empty(4, 6)


def found(trace: Trace, model: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> list[fx.Node]:
    """The calls of our ops that a model has after patterns were replaced."""
    gm = trace(model, inputs, dynamic)
    count = replace_patterns(gm)
    nodes = [n for n in gm.graph.nodes if str(n.target).startswith(MARK)]
    assert bool(count) == bool(nodes)
    return nodes


def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_sizes_and_floats(trace: Trace, dtype: torch.dtype, dynamic: bool) -> None:
    with torch_mlc.register_pattern(swish, lambda x: ops.one(x), examples=[X]):
        for shape in ((4, 6), (3, 1), (1, 7)):
            (node,) = found(trace, lambda x: swish(x + 1) - 1, torch.ones(shape, dtype=dtype), dynamic=dynamic)
            assert node.meta["val"].dtype is dtype and node.args[0].target is torch.ops.aten.add.Tensor
        assert not found(trace, swish, torch.ones(3, dtype=dtype)), "of another rank"
        assert len(found(trace, lambda x: swish(swish(x)), torch.ones(2, 3, dtype=dtype))) == 2
    assert not found(trace, swish, torch.ones(4, 6, dtype=dtype))


def test_operands_in_either_order_and_used_twice(trace: Trace) -> None:
    with torch_mlc.register_pattern(swish, lambda x: ops.one(x), examples=[X]):
        assert found(trace, lambda x: x.sigmoid() * x, X)
        assert not found(trace, lambda x: x * x.cos().sigmoid(), X), "of another operand"
    with torch_mlc.register_pattern(lambda x, y: x - y, lambda x, y: ops.two(x, y), examples=[X, X], name="less"):
        (node,) = found(trace, lambda x, y: y.cos() - x, X, X)
        assert node.args[0].target is torch.ops.aten.cos.default


def test_sizes_in_the_arguments_of_ops_are_those_of_the_operands(trace: Trace) -> None:
    """Heads are split alike for whatever sizes, and another split is another function."""

    def fold(x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1] // 2, 2).sum(-1)

    with torch_mlc.register_pattern(fold, lambda x: ops.one(x).unflatten(-1, (-1, 2)).sum(-1), examples=[X], name="a"):
        for dynamic in (False, True):
            assert found(trace, fold, torch.ones(3, 10), dynamic=dynamic)
            assert not found(trace, lambda x: x.view(x.shape[0], 2, x.shape[1] // 2).sum(-1), torch.ones(3, 10))
        assert found(trace, lambda x: x.view(3, 2, 2).sum(-1), torch.ones(3, 4))


def test_numbers_that_are_free_and_others(trace: Trace) -> None:
    def scaled(x: Tensor, by: float) -> Tensor:
        return (x * by).tanh() + 2

    with torch_mlc.register_pattern(scaled, lambda x, by: ops.one(x, by), examples=[X, 0.5]):
        (node,) = found(trace, lambda x: scaled(x, 3.0), X)
        assert node.args[1] == 3.0
        assert not found(trace, lambda x: (x * 3.0).tanh() + 1, X)
        assert not found(trace, lambda x: (x * x).tanh() + 2, X), "a tensor is no number"


def test_several_results(trace: Trace) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.amax(-1), x.exp().sum(-1)

    with torch_mlc.register_pattern(both, lambda x: ops.pair(x), examples=[X]):
        (node,) = found(trace, lambda x: both(x)[0] + both(x * 2)[1] - both(x)[1], X)
        assert len(node.users) == 2
        assert not found(trace, lambda x: both(x)[0], X), "the other one is not there"


def test_what_is_read_elsewhere_stays(trace: Trace) -> None:
    def model(x: Tensor) -> Any:
        y = x.sigmoid()
        return x * y, y

    with torch_mlc.register_pattern(swish, lambda x: ops.one(x), examples=[X]):
        assert not found(trace, model, X)


def test_a_check_is_asked_of_the_operands(trace: Trace) -> None:
    seen: list[Any] = []

    def check(x: Tensor, by: float) -> bool:
        seen.append((tuple(x.shape), by))
        return x.shape[0] > 2

    with torch_mlc.register_pattern(
        lambda x, by: (x * by).cos(), lambda x, by: ops.one(x, by), examples=[X, 0.5], name="p", check=check
    ):
        assert found(trace, lambda x: (x * 2).cos(), torch.ones(3, 4))
        assert not found(trace, lambda x: (x * 2).cos(), torch.ones(2, 4))
    assert seen == [((3, 4), 2), ((2, 4), 2)]


def test_the_last_one_is_looked_for_first(trace: Trace) -> None:
    first = torch_mlc.register_pattern(swish, lambda x: ops.one(x, 1), examples=[X])
    with first, torch_mlc.register_pattern(swish, lambda x: ops.one(x, 2), examples=[X], name="second"):
        (node,) = found(trace, swish, X)
        assert node.args[1] == 2


def test_another_layout_is_another_result(trace: Trace) -> None:
    with torch_mlc.register_pattern(
        lambda x: x.cos().sin(), lambda x: x.t().contiguous().t(), examples=[X], name="turned"
    ):
        gm = trace(lambda x: x.cos().sin(), [torch.ones(3, 4)])
        before = str(gm.graph)
        assert not replace_patterns(gm) and str(gm.graph) == before


@torch.library.custom_op("mlc_tests_patterns_compiled::swish", mutates_args=())
def fast_swish(x: Tensor) -> Tensor:
    return F.silu(x)


fast_swish.register_fake(lambda x: torch.empty_like(x))


def test_inference_and_training_as_eager() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return swish(x @ w).sum(-1)

    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    with torch_mlc.register_pattern(swish, fast_swish, examples=[X]):
        reports = torch_mlc.explain(model, x, w, training=True), torch_mlc.explain(model, x.detach(), w.detach())
        compiled = torch.compile(model, backend="mlc")
        got, want = compiled(x, w), model(x, w)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), (x, w)), torch.autograd.grad(want.sum(), (x, w)))
    for report in reports:
        notes = [call.reason for call in report.graphs[0].libraries if "swish" in call.op]
        assert notes and all("replaced by pattern swish" in note for note in notes)


def test_a_pattern_of_a_backward() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    gradient = torch.ops.aten.tanh_backward.default
    with torch_mlc.register_pattern(lambda g, y: gradient(g, y), lambda g, y: g - g * y * y, examples=[X, X], name="g"):
        report = torch_mlc.explain(lambda x: x.tanh().sum(0), x, training=True)
        (got,) = torch.autograd.grad(torch.compile(lambda x: x.tanh().sum(0), backend="mlc")(x).sum(), x)
    torch.testing.assert_close(got, 1 - x.tanh().square())
    assert not any("pattern" in n for k in report.graphs[0].kernels for n in k.notes)
    assert any("replaced by pattern g" in n for k in report.graphs[1].kernels for n in k.notes)


def test_a_replacement_by_other_ops_is_told_of_its_kernel() -> None:
    with torch_mlc.register_pattern(swish, F.silu, examples=[X]):
        (kernel,) = torch_mlc.explain(lambda x: swish(x) + 1, torch.ones(4, 8)).kernels
    assert any("replaced by pattern swish" in note for note in kernel.notes)


REFUSED: dict[str, tuple[Any, Any, list[Any], str]] = {
    "result": (swish, lambda x: (x, x), [X], "gives float32 of 2 dimensions, float32 of 2 dimensions, and the pattern"),
    "dtype": (swish, lambda x: x.double(), [X], "gives float64 of 2 dimensions, and the pattern float32 of 2"),
    "fails": (swish, lambda x: x.nope(), [X], "the replacement of fails cannot be traced with its examples: .*nope"),
    "arity": (lambda x, y: x, swish, [X], "the pattern of arity cannot be traced"),
    "unused": (lambda x, y: x.cos(), lambda x, y: x, [X, X], "does not use its tensor 1"),
    "argument": (lambda x: x, lambda x: x, [X], "must give results of ops, and not one of its arguments"),
    "number": (lambda x, c: x * (c + 1), lambda x, c: x, [X, 0.5], "lacks 0.5 among the arguments of its ops"),
    "example": (swish, swish, ["x"], "an example is a tensor or a number, not a str"),
    "none": (lambda c: c, lambda c: c, [1.0], "has no tensor among its examples"),
    "two words": (swish, swish, [X], "needs a name, such as name='my_pattern'; 'two words' is none"),
    "holds": (lambda x: x * X.add(1), lambda x: x, [torch.empty(4, 6)], "holds a tensor; make it an argument"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    pattern, replacement, examples, text = REFUSED[name]
    with pytest.raises(torch_mlc.RegistrationError, match=text):
        torch_mlc.register_pattern(pattern, replacement, examples=examples, name=name)
    assert not PATTERNS


def test_a_name_that_is_taken_and_a_decorator() -> None:
    @torch_mlc.register_pattern(swish, examples=[X])
    def mine(x: Tensor) -> Tensor:
        return F.silu(x)

    with mine, pytest.raises(torch_mlc.RegistrationError, match="there is a pattern 'swish' already"):
        torch_mlc.register_pattern(swish, swish, examples=[X])
    assert mine.is_removed and not PATTERNS
    torch.testing.assert_close(mine(torch.ones(2)), F.silu(torch.ones(2)))
