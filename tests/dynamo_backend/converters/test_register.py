"""Converters of users: what they may be for, what they are given, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_mlc
from torch_mlc.dynamo_backend.converters import CONVERTERS
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Compute, Graph, Library

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library("mlc_tests_register", "FRAGMENT") as lib:
        lib.define("swish(Tensor x, Scalar beta=1, bool negate=False) -> Tensor")
        lib.define("both(Tensor x, Tensor y) -> (Tensor, Tensor)")
        lib.define("below(Tensor x, Tensor y) -> Tensor")
        lib.define("write(Tensor(a!) x) -> ()")
        lib.define("composed(Tensor x) -> Tensor")
        lib.impl("composed", lambda x: x + 1, "CompositeImplicitAutograd")

        def swish(x: Tensor, beta: float = 1, negate: bool = False) -> Tensor:
            return (-1 if negate else 1) * x * torch.sigmoid(beta * x)

        for name, fn in (
            ("swish", swish), ("both", lambda x, y: (x + y, x * y)), ("below", lambda x, y: x < y),
        ):  # fmt: skip
            lib.impl(name, fn, "CompositeExplicitAutograd")
        yield


def swish_of(x: Any, beta: Any = 1.0, negate: bool = False) -> Any:
    y = x * (x * beta).sigmoid()
    return -y if negate else y


def swishes(x: Tensor) -> Tensor:
    op = torch.ops.mlc_tests_register.swish
    return op(x) + op(x, 2.0) + op(x, x.shape[0], True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_formula_of_operands_numbers_sizes_and_flags(
    check: Callable[..., Graph], dtype: torch.dtype, dynamic: bool
) -> None:
    with torch_mlc.register_converter("mlc_tests_register::swish", swish_of, pointwise=True):
        check(swishes, torch.randn(3, 5, dtype=dtype), dynamic=dynamic)
    check(swishes, torch.randn(3, 5, dtype=dtype), dynamic=dynamic, library=["mlc_tests_register::swish.default"] * 3)


def test_several_results_and_conditions(check: Callable[..., Graph]) -> None:
    ops = torch.ops.mlc_tests_register
    both = torch_mlc.register_converter(ops.both, lambda x, y: (x + y, x * y), pointwise=True)
    with both, torch_mlc.register_converter(ops.below, lambda x, y: x < y, pointwise=True):
        check(lambda x, y: ops.both(x, y), torch.randn(4, 5), torch.randn(5))
        check(lambda x, y: ops.below(x, y), torch.randn(4, 5), torch.randn(5))


def test_ops_that_are_decomposed_reach_their_converter(trace: Callable[..., Any]) -> None:
    assert aten.celu.default in decomposition_table()
    x = torch.randn(7)
    with torch_mlc.register_converter("aten::celu", lambda x, alpha=1.0: x, pointwise=True) as handle:
        assert "celu" in str(trace(torch.celu, [x]).graph)
        (node,) = import_graph(trace(torch.celu, [x]), [x]).nodes
        assert isinstance(node, Compute) and repr(handle) == "<converter of aten.celu.default>"
    assert aten.celu.default in decomposition_table() and "celu" not in str(trace(torch.celu, [x]).graph)
    assert handle.is_removed and repr(handle).endswith("removed>")
    handle.remove()


def test_ours_come_back_in_whatever_order_others_go() -> None:
    ours = CONVERTERS["aten.sin.default"]
    register = torch_mlc.register_converter
    first = register("aten.sin", lambda ctx, x: x, replace=True)
    second = register(aten.sin.default, lambda ctx, x: x, replace=True)
    assert CONVERTERS["aten.sin.default"] is second.value
    first.remove()
    assert CONVERTERS["aten.sin.default"] is second.value
    second.remove()
    assert CONVERTERS["aten.sin.default"] is ours


def test_a_converter_may_decline(trace: Callable[..., Any]) -> None:
    @torch_mlc.register_converter("aten.celu")
    def celu(ctx: Any, x: Any, alpha: float = 1.0) -> Any:
        raise torch_mlc.NoConversion("for a test")

    with celu:
        (node,) = import_graph(trace(torch.celu, [torch.ones(3)])).nodes
        assert isinstance(node, Library) and node.reason == "for a test"


REFUSED: dict[Any, str] = {
    "mlc_tests_register::swis": "no op mlc_tests_register::swis .* did you mean mlc_tests_register::swish",
    "aten::siin": "did you mean aten::sin or",
    "aten.add": "several overloads, of which one must be named: Tensor, Scalar",
    "aten.add.Tenso": "no overload 'Tenso': .* did you mean Tensor",
    "aten.sin": "has a converter already, one of torch-mlc's; .*replace=True",
    "mlc_tests_register::write": "writes to its arguments",
    "mlc_tests_register::composed": "composed of other ops",
    "sin": "names no op; write 'namespace::name'",
    3: "not a int",
}


@pytest.mark.parametrize("op", REFUSED)
def test_what_is_refused(op: Any) -> None:
    before = dict(CONVERTERS)
    with pytest.raises(torch_mlc.RegistrationError, match=REFUSED[op]):
        torch_mlc.register_converter(op, lambda ctx, x: x)
    assert before == CONVERTERS


def test_more_that_is_refused() -> None:
    with pytest.raises(torch_mlc.RegistrationError, match="a converter is a function, not a int"):
        torch_mlc.register_converter("aten.celu", 3)
    with (
        torch_mlc.register_converter("aten.celu", lambda x: x, pointwise=True),
        pytest.raises(torch_mlc.RegistrationError, match="a registered one"),
    ):
        torch_mlc.register_converter("aten.celu", lambda x: x, pointwise=True)


def test_formulas_that_are_none(trace: Callable[..., Any]) -> None:
    with torch_mlc.register_converter("aten.celu", lambda x: 3, pointwise=True):
        graph = trace(torch.celu, [torch.ones(3)])
        with pytest.raises(torch_mlc.RegistrationError, match=r"gives a int; it must give a torch_mlc\.Formula"):
            import_graph(graph)
    with (
        torch_mlc.register_converter("aten.celu", lambda x: x.tanhh(), pointwise=True),
        pytest.raises(AttributeError, match="no 'tanhh'"),
    ):
        import_graph(graph)
