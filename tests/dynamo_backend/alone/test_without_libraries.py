"""``libraries="none"``: kernels compute what libraries do elsewhere, in every type and layout, and call none."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.cpu import compile_kernels
from torch_mlc.runtime.targets import cpu_target

ALONE = {"libraries": "none", "cache": False}
Function = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for t in found if t is not None]


def _near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Within what rounding to a type and sums of it allow."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, dtype, want.stride())
    if not dtype.is_floating_point:
        assert torch.equal(got, want.to(dtype))
        return
    allowed = {torch.float64: 1e-13, torch.float32: 2e-5}.get(dtype, 2e-2)
    size = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), rtol=allowed, atol=allowed * max(size, 1e-3))


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def check(f: Function, *inputs: Tensor, dynamic: bool | None = None) -> None:
    """A function against float64, and that nothing of it is a library's call."""
    floats = [x.dtype for x in inputs if x.is_floating_point()]
    called = counters["library_calls"]
    got = torch.compile(f, backend="mlc", options=ALONE, dynamic=dynamic)(*inputs)
    for g, w in zip(_tensors(got), _tensors(f(*map(_wide, inputs))), strict=True):
        _near(g, w, floats[0] if floats and w.is_floating_point() else w.dtype)
    assert counters["library_calls"] == called


def _rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(*shape).to(dtype)
    return torch.randint(-9, 9, shape, dtype=dtype)


PRODUCTS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "mm": (lambda a, b: a @ b, ((37, 53), (53, 41))),
    "transposed": (lambda a, b: a @ b.t(), ((37, 53), (41, 53))),
    "left transposed": (lambda a, b: a.t() @ b, ((53, 37), (53, 41))),
    "strided": (lambda a, b: a[:, ::2] @ b[::2, 1:], ((17, 30), (30, 20))),
    "large": (lambda a, b: a @ b, ((67, 259), (259, 515))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), ((41,), (37, 53), (53, 41))),
    "bmm": (torch.bmm, ((3, 17, 19), (3, 19, 23))),
    "baddbmm": (torch.baddbmm, ((3, 17, 23), (3, 17, 19), (3, 19, 23))),
    "one row": (lambda a, b: a @ b, ((1, 300), (300, 41))),
    "mv": (torch.mv, ((37, 53), (53,))),
    "dot": (torch.dot, ((531,), (531,))),
    "no terms": (lambda a, b: a @ b, ((5, 0), (0, 7))),
    "no rows": (lambda a, b: a @ b, ((0, 5), (5, 7))),
    "then": (lambda a, b: torch.relu(a @ b).sum(1), ((37, 53), (53, 41))),
}  # fmt: skip
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, dtype: torch.dtype) -> None:
    f, shapes = PRODUCTS[name]
    check(f, *(_rand(*s, dtype=dtype) for s in shapes))


@pytest.mark.parametrize("name", ["mm", "transposed", "addmm", "bmm", "large"])
def test_products_of_sizes_that_vary(name: str) -> None:
    f, shapes = PRODUCTS[name]
    check(f, *(_rand(*s) for s in shapes), dynamic=True)


# Groups, stride, dilation, padding.
CONVOLUTIONS = {"plain": (1, 1, 1, 1), "stride": (1, 2, 1, 0), "groups": (2, 1, 2, 2), "all": (4, 2, 2, 1),
                "depthwise": (8, 1, 1, 1), "depthwise, stride": (8, 2, 1, 1)}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, transposed: bool, dtype: torch.dtype) -> None:
    g, s, d, p = CONVOLUTIONS[name]
    x, bias = _rand(2, 8, 13, 11, dtype=dtype), _rand(16, dtype=dtype)
    if transposed:
        check(
            lambda x, w, b: F.conv_transpose2d(x, w, b, s, p, s - 1, g, d),
            x,
            _rand(8, 16 // g, 3, 3, dtype=dtype),
            bias,
        )
    else:
        check(lambda x, w, b: F.conv2d(x, w, b, s, p, d, g), x, _rand(16, 8 // g, 3, 3, dtype=dtype), bias)


@pytest.mark.parametrize(
    "f, shapes",
    [
        (lambda x, w: F.conv1d(x, w, None, 2, 1), ((2, 5, 31), (7, 5, 4))),
        (lambda x, w: F.conv3d(x, w, None, 2, 1), ((2, 5, 9, 8, 7), (7, 5, 3, 3, 3))),
        (lambda x, w: F.conv_transpose1d(x, w, None, 2, 1), ((2, 5, 31), (5, 7, 4))),
        (lambda x, w: F.conv_transpose3d(x, w, None, 2, 1), ((2, 5, 5, 4, 6), (5, 7, 3, 3, 3))),
        (lambda x, w: F.conv2d(x, w), ((2, 40, 9, 8), (33, 40, 1, 1))),
        (lambda x, w: F.conv2d(x, w), ((0, 5, 9, 8), (7, 5, 3, 3))),
    ],
    ids=["1d", "3d", "transposed 1d", "transposed 3d", "points", "no images"],
)  # fmt: skip
def test_convolutions_of_other_ranks(f: Function, shapes: tuple[tuple[int, ...], ...]) -> None:
    check(f, *(_rand(*s) for s in shapes))


def test_convolutions_of_a_batch_that_varies_and_of_other_layouts() -> None:
    x, w = _rand(3, 16, 12, 10), _rand(24, 16, 3, 3)
    # Sizes of parameters do not vary.
    filters = torch.nn.Parameter(w), torch.nn.Parameter(w.double())
    with torch.no_grad():
        check(lambda x: F.conv2d(x, filters[x.dtype is torch.float64], None, 1, 1), x, dynamic=True)
    check(lambda x, w: F.conv2d(x, w, None, 1, 1), x.to(memory_format=torch.channels_last), w)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_convolutions(name: str, transposed: bool) -> None:
    g, s, d, p = CONVOLUTIONS[name]

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, b, s, p, s - 1, g, d) if transposed else F.conv2d(x, w, b, s, p, d, g)

    _check_gradients(f, _rand(2, 8, 9, 7), _rand(*((8, 16 // g) if transposed else (16, 8 // g)), 3, 3), _rand(16))


def _check_gradients(f: Function, *inputs: Tensor) -> None:
    found = []
    for run, kind in ((f, torch.float64), (torch.compile(f, backend="mlc", options=ALONE), torch.float32)):
        given = [x.detach().to(kind).requires_grad_() for x in inputs]
        out = run(*given)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator).to(kind))
        found.append([x.grad for x in given])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


HEADS = {"plain": {}, "causal": {"is_causal": True}}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_attention(name: str, dtype: torch.dtype) -> None:
    q, k, v = (_rand(2, 4, 37, 16, dtype=dtype) for _ in range(3))
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **HEADS[name]), q, k, v)


def test_attention_of_grouped_heads_masks_and_long_sequences() -> None:
    q, k, v = _rand(2, 4, 37, 16), _rand(2, 2, 50, 16), _rand(2, 2, 50, 16)
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)
    mask = _rand(37, 37)
    check(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m > 0), q, mask)
    check(F.scaled_dot_product_attention, *(_rand(1, 2, 800, 64) for _ in range(3)))


@pytest.mark.parametrize("name", HEADS)
def test_gradients_of_attention(name: str) -> None:
    q, k, v = (_rand(2, 3, 21, 16) for _ in range(3))
    _check_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **HEADS[name]), q, k, v)


def _awkward(*shape: int) -> Tensor:
    """Numbers of which some are equal, infinite, or none."""
    x = torch.randn(*shape)
    x[..., ::3] = x[..., :1]
    x[0, 3], x[0, 6], x[-1, 5] = torch.inf, -torch.inf, torch.nan
    return x


@pytest.mark.parametrize("length", [7, 512, 513, 1500])
@pytest.mark.parametrize("descending", [False, True])
def test_sorts_are_stable(length: int, descending: bool) -> None:
    x = _awkward(3, length)
    got = torch.compile(torch.sort, backend="mlc", options=ALONE)(x, dim=-1, descending=descending, stable=True)
    want = torch.sort(x, dim=-1, descending=descending, stable=True)
    assert torch.equal(got.indices, want.indices)
    assert torch.equal(got.values.nan_to_num(9), want.values.nan_to_num(9))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bfloat16, torch.float64, torch.bool], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_sorts_along_other_dimensions(dtype: torch.dtype, dynamic: bool) -> None:
    x = torch.randint(-50, 50, (3, 600, 2)).to(dtype)
    got = torch.compile(torch.sort, backend="mlc", options=ALONE, dynamic=dynamic)(x, dim=1, stable=True)
    want = torch.sort(x, dim=1, stable=True)
    assert torch.equal(got.indices, want.indices) and torch.equal(got.values, want.values)


@pytest.mark.parametrize("length", [9, 700, 3000])
@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("largest", [False, True])
def test_the_greatest_few(length: int, count: int, largest: bool) -> None:
    x = _awkward(3, length)
    got = torch.compile(torch.topk, backend="mlc", options=ALONE)(x, count, largest=largest)
    assert torch.equal(got.values.nan_to_num(9), torch.topk(x, count, largest=largest).values.nan_to_num(9))
    assert torch.equal(x.gather(1, got.indices).nan_to_num(9), got.values.nan_to_num(9))
    assert all(len(set(row)) == count for row in got.indices.tolist())


@pytest.mark.parametrize("length", [9, 700])
def test_medians(length: int) -> None:
    x = _awkward(3, length)
    for f in (torch.median, torch.nanmedian):
        got = torch.compile(f, backend="mlc", options=ALONE)(x, 1)
        assert torch.equal(got.values.nan_to_num(9), f(x, 1).values.nan_to_num(9))
        assert torch.equal(x.gather(1, got.indices[:, None])[:, 0].nan_to_num(9), got.values.nan_to_num(9))
        check(f, x[:2])
    check(lambda x: torch.kthvalue(x, 3).values, x)


OTHERS: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "embedding bag": (
        lambda w, i: F.embedding_bag(i, w, mode="mean"),
        (torch.randn(900, 20), torch.randint(0, 900, (6, 5))),
    ),
    "pooling": (lambda x: F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1), (torch.randn(2, 5, 13, 11),)),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 3), (torch.randn(2, 5, 13, 11),)),
    "cumulative sum": (lambda x: x.cumsum(1), (torch.randn(3, 2000),)),
    "norms": (lambda x: F.layer_norm(F.group_norm(x, 3), (11,)), (torch.randn(4, 9, 11),)),
    "scatter": (lambda x, i: x.scatter_add(1, i, x), (torch.randn(5, 40), torch.randint(0, 40, (5, 40)))),
    "put": (lambda x, i: x.index_put((i,), x[:7], accumulate=True), (torch.randn(50, 4), torch.randint(0, 50, (7,)))),
    "distances": (torch.cdist, (torch.randn(40, 9), torch.randn(37, 9))),
    "functions": (lambda x: x.sin() * x.cos() + x.abs().pow(x) - torch.atan2(x, x + 1), (torch.randn(3, 333),)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(name: str) -> None:
    f, inputs = OTHERS[name]
    check(f, *inputs)


def _undefined(data: bytes) -> Iterator[str]:
    """The names that an ELF object of 64 bits asks of others."""
    offset, size, count = struct.unpack_from("<Q10xHH", data, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + k * size) for k in range(count)]
    for kind, *_, start, length, link, _, _, entry in ((s[1], *s[2:]) for s in sections):
        if kind != 2:
            continue
        names = sections[link][4]
        for at in range(start, start + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", data, at)
            if section == 0 and name:
                yield data[names + name : data.index(b"\0", names + name)].decode()


# Of libm, of libc, and of a team.
ALLOWED = re.compile(
    r"(sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|asinh|acosh|atanh|exp|exp2|expm1|log|log2|log10|log1p|erf|erfc|lgamma|pow"
    r"|atan2|hypot|fmod|nextafter|fma|floor|ceil|trunc|roundeven)f?|malloc|free|mem(cpy|set|move)|GOMP_parallel"
    r"|omp_get_(thread_num|num_threads)"
)


def test_objects_ask_for_nothing_but_the_c_library_and_a_team() -> None:
    def f(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        y = F.gelu(x @ w) * x.sin().cumsum(1)[:, :1] + x.double().exp().lgamma().float().sum()
        return (
            y,
            F.scaled_dot_product_attention(q, q, q),
            torch.sort(x, stable=True).indices,
            torch.pow(x.abs(), 1.7).tan(),
        )

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        inputs = _rand(300, 600), _rand(600, 700), _rand(2, 4, 100, 32)
        report = torch_mlc.explain(f, *inputs, options={"libraries": "none"})
    finally:
        torch.set_num_threads(threads)
    target = cpu_target(2, libraries="none")
    asked: set[str] = set()
    for kernel in report.kernels:
        source = KernelSource(kernel.name, "llvm", kernel.source, (), ())
        asked |= set(_undefined(compile_kernels([source], target)))
    assert "GOMP_parallel" in asked
    assert not [name for name in asked if not ALLOWED.fullmatch(name)]


def test_what_is_no_work_for_loops_stays_a_call_by_name() -> None:
    x = torch.eye(5) + 0.1 * _rand(5, 5)
    report = torch_mlc.explain(lambda x: torch.linalg.inv_ex(x).inverse, x, options={"libraries": "none"})
    assert [call.op for graph in report.graphs for call in graph.libraries] == ["aten::linalg_inv_ex.default"]
