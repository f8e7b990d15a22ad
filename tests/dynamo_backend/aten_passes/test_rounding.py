"""Values of half types of which whole numbers are made, or that are compared, are rounded first, as eager's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Cast, Load, Select, call, const
from torch_mlc.ir.graph.graph import Compute, Graph, TensorType
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.facts.fusion_nodes import simplify_value
from torch_mlc.scheduler.passes import widen

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "round": lambda x, s: (x / s).round(),
    "decimals": lambda x, s: (x / s).float().round(decimals=1),
    "floor": lambda x, s: (x * s).floor(),
    "fraction": lambda x, s: (x / s).frac(),
    "remainder": lambda x, s: (x * s) % 3,
    "floored quotient": lambda x, s: (x * s) // 2,
    "truncated quotient": lambda x, s: torch.div(x * s, 3, rounding_mode="trunc"),
    "integers": lambda x, s: (x / s).long(),
    "bytes": lambda x, s: torch.round(x / s).clamp(-128, 127).to(torch.int8),
    "buckets": lambda x, s: torch.bucketize(x / s, torch.arange(-50, 50, dtype=x.dtype)),
    "comparison": lambda x, s: (x / s).t() > 1,
    "place": lambda x, s: (x / s).argmax(0),
    "place of the least": lambda x, s: (x / s).min(1).indices,
    "running places": lambda x, s: (x / s).cummax(0).indices,
    "places of windows": lambda x, s: F.max_pool2d((x / s)[None], 5, return_indices=True)[1],
    "order": lambda x, s: torch.sort(x / s, dim=0, stable=True).indices,
    "signs": lambda x, s: (x * 1e-9).sign(),
    "too large": lambda x, s: torch.isinf(x * 1e3),
    "nothing": lambda x, s: torch.logical_not(x * 1e-9),
    "both": lambda x, s: torch.logical_and(x * 1e-9, s * 1e-7),
    "some": lambda x, s: (x * 1e-11).any(0),
    "every": lambda x, s: (x * 1e-9).all(1),
    "how many": lambda x, s: torch.linalg.vector_norm(x * 1e-9, 0, 1),
    "exponents": lambda x, s: torch.frexp(x * s)[1],
    "in a wider type": lambda x, s: (x.float() * s.float()).to(x.dtype).double().ceil(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_steps(step: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, s = torch.randn(60, 70).to(dtype) * 40, torch.rand(70).to(dtype) + 0.3
    torch._dynamo.reset()
    assert torch.equal(torch.compile(step, backend="mlc")(x, s), step(x, s))


SENT: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "and back": lambda x, d: x.to(d).float(),
    "computed with": lambda x, d: x.to(d) * 0.5,
    "normed": lambda x, d: F.layer_norm(x.to(d), (13,)),
    "summed": lambda x, d: torch.cat([x.to(d), x.to(d)]).sum(),
    "copied into": lambda x, d: torch.zeros(13, dtype=d).copy_(x) / 4,
    "place in a row": lambda x, d: torch.arange(4000, dtype=d)[2040:2053].float() + x.clamp(0, 1),
    "running": lambda x, d: x.to(d).float().cumsum(0),
    "chosen": lambda x, d: torch.where(x > 5, x.to(d), 1).float(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.int64, torch.int32, torch.int16, torch.float64], ids=str)
@pytest.mark.parametrize("send", SENT.values(), ids=SENT.keys())
def test_what_is_sent_to_a_half_type(
    send: Callable[[Tensor, torch.dtype], Tensor], source: torch.dtype, dtype: torch.dtype
) -> None:
    """Whole numbers, and what is of double precision, are rounded there, or infinite."""
    x = torch.tensor([-(1 << 40), 70000, 65519, 65520, 2049, 2051, 4097, -70001, 3, 257, 16777217, 100000, 0]).to(
        source
    )
    torch._dynamo.reset()
    expected = send(x, dtype)
    result = torch.compile(lambda x: send(x, dtype), backend="mlc")(x)
    rounding = 0 if expected.dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=max(rounding, 1e-6), atol=rounding, equal_nan=True)


def test_what_every_half_type_holds_is_not_rounded() -> None:
    """Bytes, truth values, and bits of a word are converted at once, whatever they are rounded to on the way."""
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        words, shift = Load("x", (), DType.INT32), const(4, DType.INT32)
        low = call("bit_and", call("shr", words, shift), const(15, DType.INT32))
        held = [low, call("sub", low, const(8, DType.INT32)), Load("x", (), DType.INT8), Load("x", (), DType.UINT8)]
        held += [call("lt", words, shift), Select(call("lt", words, shift), low, shift), Cast(low, DType.INT64)]
        lost = [words, call("shr", words, shift), call("mul", low, call("mul", low, low)), Load("x", (), DType.INT16)]
        for e in (*held, *lost):
            wide = Cast(e, DType.FLOAT32)
            node = Compute("y", TensorType((), (), DType.FLOAT32), (), Cast(Cast(wide, dtype), DType.FLOAT32))
            for numerics in ("fast", "eager"):
                (made,) = widen(Graph("main", (), (node,), ("y",)), PassContext(numerics)).nodes
                assert isinstance(made, Compute)
                assert (simplify_value(made.value) == wide) == (e in held), e


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "bounded": lambda x: F.hardtanh(x, -4.0, 3.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "threshold": lambda x: F.threshold(x, 3.0, 20.0),
    "softshrink": lambda x: F.softshrink(x, 3.0),
}


@pytest.mark.parametrize("fn", KINKS.values(), ids=KINKS.keys())
def test_sides_of_a_kink(fn: Callable[[Tensor], Tensor]) -> None:
    """Products that are rounded to three are three, for the gradient too."""
    torch.manual_seed(0)
    a, b = (3 * torch.rand(60, 40) + 1).bfloat16(), (torch.rand(60, 40) + 0.9).bfloat16()
    torch._dynamo.reset()
    gradients = []
    for run in (lambda x: fn(x * b), torch.compile(lambda x: fn(x * b), backend="mlc")):
        x = a.clone().requires_grad_()
        gradients += torch.autograd.grad(run(x).sum(), x)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.02, atol=0.02)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda x: F.group_norm(x, 3, eps=0.1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "mantissas": lambda x: torch.frexp(x * 0.7)[0],
    "parts": lambda x: (x * 0.7).split(2, 1)[1],
    "rows": lambda x: (x * 0.7).unbind(2)[1],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_one_of_several_results(norm: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """The maxima are some of the values that they are compared with: their gradients are no NaN."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: norm(x).amax(1), backend="mlc")
    for shape in ((2, 6, 5, 7), (1, 6, 2, 1)):
        x = torch.randn(shape).to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        assert gradient.isfinite().all()
        exact = x.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(norm(exact).amax(1).sum(), exact)
        assert (gradient - expected).norm() <= 0.1 * expected.norm() + 0.1


SEVERAL: dict[str, Callable[..., torch.Tensor]] = {
    "xlogy": lambda x, y: torch.xlogy(x, y),
    "xlogy of a number": lambda x, y: torch.xlogy(0.3, y),
    "xlogy by a number": lambda x, y: torch.xlogy(x, 0.3),
    "xlogy of a scalar": lambda x, y: torch.xlogy(torch.tensor(0.3), y),
    "xlogy by a scalar": lambda x, y: torch.xlogy(x, torch.tensor(0.3)),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y),
    "xlog1py of a number": lambda x, y: torch.special.xlog1py(0.3, y),
    "xlog1py by a number": lambda x, y: torch.special.xlog1py(x, 0.3),
    "entr": lambda x, y: torch.special.entr(x),
    "logit": lambda x, y: torch.logit(x),
    "logit of a range": lambda x, y: torch.logit(x, 0.1),
    "addcdiv": lambda x, y: torch.ops.aten.addcdiv(x, y, x, value=0.1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_ops_of_several_steps_round_as_eagers_kernels_do(name: str, dtype: torch.dtype) -> None:
    """Signed zeros, infinities and NaN too, and operands that lie otherwise in memory."""
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5, 1e-3, 0.99])
    x, y = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    x, y = (torch.cat([v, w]).to(dtype) for v, w in ((x, special.repeat(10)), (y.abs(), special.repeat_interleave(10))))
    f = SEVERAL[name]
    compiled = torch.compile(f, backend="mlc", options={"numerics": "eager"})
    for a, b in ((x, y), (x[:2048].view(64, 32).t(), y[::2][:2048].view(32, 64)), (x[:0], y[:0])):
        torch.testing.assert_close(compiled(a, b), f(a, b), rtol=0, atol=0, equal_nan=True)


def test_steps_are_rounded_at_a_place_that_is_named() -> None:
    x, y = torch.rand(2, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.xlogy(x, y)

    for numerics, equal in (({"xlogy": "eager"}, True), ("fast", False)):
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="mlc", options={"numerics": numerics})
        assert torch.equal(compiled(x, y), f(x, y)) is equal
