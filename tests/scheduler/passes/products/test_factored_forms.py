"""In every form of a product, factors that are the same along its sum are applied to its result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.scheduler.passes.products.test_decompose_contractions import answer, opened, tensors
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Call, Load, call, cast, loads, symbol
from torch_mlc.ir.graph.graph import Graph, Reduction
from torch_mlc.scheduler.facts.row_factors import Factored, factored
from torch_mlc.scheduler.passes import widen

I0, R0 = symbol("i0"), symbol("r0")


def graph_of(fn: Callable[..., Tensor], inputs: list[Tensor], numerics: str = "fast") -> Graph:
    (gm,) = capture(fn, inputs, dynamic=False)
    graph = import_graph(gm, numerics=numerics)
    return opened(widen(graph) if numerics == "fast" else graph, inlined=True)


def product(graph: Graph) -> Reduction:
    return [n for n in graph.nodes if isinstance(n, Reduction)][-1]


def weighted(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return (x * r[:, None]) @ w


def divided(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return (x / (r[:, None].abs() + 1)) @ w


def of_columns(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return x @ (w * s)


def of_both(x: Tensor, r: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (x * r[:, None]) @ (w * s)


def activated(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x) * r[:, None]) @ w


def with_bias(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x * r[:, None], w, beta=2, alpha=3)


FORMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]] = {
    # What is left in the sum is so many tensors.
    "a row's": (weighted, ((7, 33), (7,), (33, 5)), 2),
    "a row's divisor": (divided, ((7, 33), (7,), (33, 5)), 2),
    "a column's": (of_columns, ((7, 33), (5,), (33, 5)), 2),
    "both": (of_both, ((7, 33), (7,), (33, 5), (5,)), 2),
    "behind an activation": (activated, ((7, 33), (7,), (33, 5)), 2),
    "beside a bias": (with_bias, ((7, 33), (7,), (33, 5), (5,)), 2),
    "no rows": (weighted, ((0, 33), (0,), (33, 5)), 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_sum_reads_no_factor_and_the_result_has_it(name: str) -> None:
    fn, shapes, left = FORMS[name]
    inputs = tensors(*shapes, dtype=torch.bfloat16)
    graph = graph_of(fn, inputs)
    if shapes[0][0]:
        assert len({ld.buffer for ld in loads(product(graph).values[0])}) == left
    wanted = fn(*(t.double() for t in inputs)).float()
    torch.testing.assert_close(answer(graph, inputs).float(), wanted, rtol=3e-2, atol=1e-1)


def test_a_sum_of_no_terms_is_what_is_added() -> None:
    inputs = tensors((7, 0), (7,), (0, 5), (5,), dtype=torch.bfloat16)
    assert torch.equal(answer(graph_of(with_bias, inputs), inputs), 2 * inputs[3].float().expand(7, 5))


def test_the_row_of_a_norm_is_divided_by_its_root_once() -> None:
    def normed(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (33,)) @ w

    inputs = tensors((7, 33), (33, 5), dtype=torch.bfloat16)
    graph = graph_of(normed, inputs)
    types = graph.types()
    assert all(len(types[ld.buffer].shape) == 2 for ld in loads(product(graph).values[0]))
    wanted = normed(*(t.double() for t in inputs)).float()
    torch.testing.assert_close(answer(graph, inputs).float(), wanted, rtol=3e-2, atol=1e-1)


@pytest.mark.parametrize(("dtype", "numerics"), [(torch.bfloat16, "eager"), (torch.float32, "fast")])
def test_roundings_that_are_promised_stay(dtype: torch.dtype, numerics: str) -> None:
    inputs = tensors((7, 33), (7,), (33, 5), dtype=dtype)
    assert len({ld.buffer for ld in loads(product(graph_of(weighted, inputs, numerics)).values[0])}) == 3


def test_what_a_factor_keeps_small_is_not_left_without_it_in_float16() -> None:
    def squared(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return ((x.float() * x.float()) * r[:, None]).half() @ w

    x, r, w = torch.full((7, 33), 3e3).half(), torch.full((7,), 1e-6), torch.ones(33, 5).half()
    found = answer(graph_of(squared, [x, r, w]), [x, r, w])
    torch.testing.assert_close(found.float(), squared(x, r, w).float(), rtol=1e-2, atol=1e-2)


def test_values_that_are_not_numbers_stay_so() -> None:
    x, r, w = tensors((4, 33), (4,), (33, 5), dtype=torch.bfloat16)
    x[0, 3], r[1], x[2, 5], r[2] = float("nan"), float("nan"), float("inf"), 0.0
    found, wanted = answer(graph_of(weighted, [x, r, w]), [x, r, w]), weighted(x, r, w)
    assert torch.equal(found.isnan(), wanted.isnan()) and not found[3].isnan().any()


def _load(name: str, *indices: object, dtype: DType = DType.BFLOAT16) -> Load:
    return Load(name, indices, dtype)  # type: ignore[arg-type]


def test_only_what_does_not_move_along_the_sum_is_a_factor() -> None:
    x, r, g = (cast(_load(n, *at), DType.FLOAT32) for n, at in (("x", (I0, R0)), ("r", (I0,)), ("g", (R0,))))
    value = cast(call("mul", call("mul", x, r), g), DType.BFLOAT16, when_stored=True)
    found = factored(value, R0)
    assert found.factors == (r,) and not found.divisors
    assert {ld.buffer for ld in loads(found.rest)} == {"x", "g"} and found.rest.dtype is DType.BFLOAT16
    rounded = cast(call("mul", x, r), DType.BFLOAT16)
    assert factored(rounded, R0) == Factored(rounded)
    constant = cast(call("mul", r, r), DType.BFLOAT16, when_stored=True)
    assert factored(constant, R0) == Factored(constant)
    difference = cast(call("mul", Call("sub", (x, r), DType.FLOAT32), r), DType.BFLOAT16, when_stored=True)
    assert factored(difference, R0).factors == (r,)
