"""Factors that are the same along the sum of a product are applied to its result, where that loses nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.scheduler.passes.products.test_decompose_contractions import answer, imported, opened
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Call, Expr, Load, call, cast, const, free_symbols, symbol, walk
from torch_mlc.ir.graph.graph import Graph, Reduction
from torch_mlc.scheduler.facts.row_factors import factored
from torch_mlc.scheduler.passes import widen

F32, BF16, F16, I8 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT8
ROWS, COLUMNS, K = symbol("i0"), symbol("i1"), symbol("r0")


def wide(name: str, *indices, dtype: DType = BF16) -> Expr:
    return cast(Load(name, indices, dtype), F32)


def stored(e: Expr, half: DType) -> Expr:
    return cast(e, half, when_stored=True)


ROW = call("rsqrt", wide("sums", ROWS, dtype=F32))


@pytest.mark.parametrize("half", [BF16, F16])
def test_a_factor_of_a_row_leaves_memory_as_it_is(half):
    x = Load("x", (ROWS, K), half)
    found = factored(stored(call("mul", cast(x, F32), ROW), half), K)
    assert (found.rest, found.factors, found.divisors) == (x, (ROW,), ())


def test_factors_on_both_sides_of_roundings_that_may_be_left_out():
    x, w, s = wide("x", ROWS, K), wide("w", K), wide("s", ROWS)
    inner = cast(stored(call("mul", x, ROW), BF16), F32)
    found = factored(stored(call("div", call("mul", inner, w), s), BF16), K)
    assert found.rest == stored(call("mul", x, w), BF16)
    assert (found.factors, found.divisors) == ((ROW,), (s,))
    total = found.applied(Load("total", (ROWS, COLUMNS), F32))
    assert total == call("div", call("mul", Load("total", (ROWS, COLUMNS), F32), ROW), s)


def test_whole_numbers_lose_their_scale():
    q = cast(Load("q", (COLUMNS, K), I8), F32)
    for half in (BF16, F16):
        found = factored(stored(call("mul", q, wide("s", COLUMNS)), half), K)
        assert found.rest == stored(q, half) and len(found.factors) == 1


STAYS: dict[str, Expr] = {
    "a rounding that is asked for": cast(call("add", call("mul", wide("x", ROWS, K), ROW), const(1.0, F32)), BF16),
    "a rounding in front of more": cast(cast(call("mul", wide("x", ROWS, K), ROW), BF16), F32),
    "a rounding of all": cast(call("mul", wide("x", ROWS, K), ROW), BF16),
    "a scale of a group": stored(call("mul", wide("x", ROWS, K), wide("s", ROWS, K // 4)), BF16),
    "nothing along the sum": stored(call("mul", wide("x", ROWS), ROW), BF16),
    "float32": call("mul", wide("x", ROWS, K), ROW),
    "what float16 may not hold": stored(
        call("mul", call("mul", wide("x", ROWS, K, dtype=F16), ROW), wide("w", K)), F16
    ),
    "float32 in memory": stored(call("mul", Load("x", (ROWS, K), F32), ROW), F16),
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay_where_they_are(what):
    found = factored(STAYS[what], K)
    assert (found.rest, found.factors, found.divisors) == (STAYS[what], (), ())


def test_what_a_graph_has_in_float16_is_within_its_range():
    x, w = wide("x", ROWS, K, dtype=F16), wide("w", K, dtype=F16)
    made = stored(call("mul", x, w), F16)
    found = factored(stored(call("mul", cast(made, F32), ROW), F16), K)
    assert (found.rest, found.factors) == (made, (ROW,))


def rms(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(w.dtype) @ m


def unweighted(x: Tensor, m: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) @ m


def both(x: Tensor, s: Tensor, m: Tensor, t: Tensor) -> Tensor:
    return torch.addmm(t, x * s[:, None], m / t, beta=2, alpha=3)


def opened_fast(fn: Callable[..., Tensor], *inputs: Tensor, pieces: int = 1) -> Graph:
    return opened(widen(imported(fn, *inputs)), inlined=True, pieces=pieces)


def halves(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [(torch.rand(s) + 0.5).to(dtype) * torch.sign(torch.randn(s)).to(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (rms, ((5, 9), (9,), (9, 7))),
        (unweighted, ((5, 9), (9, 7))),
        (both, ((5, 9), (5,), (9, 7), (7,))),
        (both, ((0, 9), (0,), (9, 7), (7,))),
        (both, ((5, 0), (5,), (0, 7), (7,))),
        (both, ((5, 1), (5,), (1, 7), (7,))),
    ],
)
def test_products_are_those_of_float64(fn, shapes, dtype, pieces):
    inputs = halves(*shapes, dtype=dtype)
    found = answer(opened_fast(fn, *inputs, pieces=pieces), inputs)
    wanted = fn(*(t.double() for t in inputs))
    exact = rms_double(*inputs) if fn is rms else unweighted_double(*inputs) if fn is unweighted else wanted
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=6e-2)


def rms_double(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    x, w, m = x.double(), w.double(), m.double()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w) @ m


def unweighted_double(x: Tensor, m: Tensor) -> Tensor:
    return rms_double(x, torch.ones(x.shape[-1]), m)


def test_numbers_that_only_a_factor_brings_into_range_are_those_of_float64():
    """Of float16: sums are float32, so that only an operand that is made could be infinite, and none is."""
    x, m = torch.full((3, 8), 6e4).half(), torch.full((8, 4), 2.0).half()
    found = answer(opened_fast(unweighted, x, m), [x, m])
    torch.testing.assert_close(found.double(), unweighted_double(x, m), rtol=1e-3, atol=0)
    w = torch.full((8,), 3.0).half()
    found = answer(opened_fast(rms, x, w, m), [x, w, m])
    torch.testing.assert_close(found.double(), rms_double(x, w, m), rtol=1e-3, atol=0)


def sums_of(graph: Graph) -> list[Expr]:
    return [v for n in graph.nodes if isinstance(n, Reduction) for v in n.values]


def test_a_norm_leaves_the_sum_and_eager_keeps_it():
    inputs = halves((5, 9), (9,), (9, 7), dtype=torch.bfloat16)
    has_root = [
        any(isinstance(e, Call) and e.fn == "rsqrt" for e in walk(v)) for v in sums_of(opened_fast(rms, *inputs))
    ]
    assert not any(has_root)
    eager = opened(imported(rms, *inputs), inlined=True)
    assert any(isinstance(e, Call) and e.fn == "rsqrt" for v in sums_of(eager) for e in walk(v))


def test_what_is_taken_out_does_not_vary_along_the_sum():
    inputs = halves((5, 9), (5,), (9, 7), (7,), dtype=torch.bfloat16)
    (value,) = sums_of(opened_fast(both, *inputs))
    assert {e.buffer for e in walk(value) if isinstance(e, Load)} == {
        e.buffer for e in walk(value) if isinstance(e, Load) and len(free_symbols(e)) == 2
    }
