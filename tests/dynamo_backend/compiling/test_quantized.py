"""Products with quantised weights, as users write them: the packed weight is read by one kernel, and the answer is that
of a float64 product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_mlc
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.rules.cpu.contraction import CPU_CONTRACTION

Form = Callable[..., Tensor]


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def uint8(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def scaled_rows(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x @ (w.to(x.dtype) * s).t()


def scaled_result(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s


def with_epilogue(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, w.to(x.dtype) * s[:, None], b))


def columns(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x @ (w.to(x.dtype) * s)


def groups(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    n, k = w.shape
    return F.linear(x, (w.to(x.dtype).view(n, s.shape[1], -1) * s[:, :, None]).view(n, k))


def nibbles(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    n, k = w.shape[0], w.shape[1] * 2
    q = torch.stack([w & 0xF, w >> 4], dim=-1).reshape(n, k)
    return F.linear(x, ((q.to(x.dtype).view(n, s.shape[1], -1) - z[:, :, None]) * s[:, :, None]).view(n, k))


def gpt_fast(x: Tensor, w: Tensor, scales_and_zeros: Tensor) -> Tensor:
    n, k = w.shape[0], w.shape[1] * 2
    size = k // scales_and_zeros.shape[0]
    q = torch.stack((w >> 4, w & 0xF), dim=-1).reshape(n, k).to(torch.int32)
    s, z = (scales_and_zeros[:, :, p].t().reshape(-1, 1) for p in (0, 1))
    return x @ q.reshape(-1, size).sub(8).mul(s).add(z).reshape(n, k).to(x.dtype).t()


def words(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    n, k = w.shape[0], w.shape[1] * 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    q = ((w[:, :, None] >> shifts) & 0xF).reshape(n, k)
    return x @ ((q.to(x.dtype) - 8).view(n, s.shape[1], -1) * s[:, :, None]).reshape(n, k).t()


def halves(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    q = torch.cat([w & 0xF, w >> 4], dim=1).to(x.dtype) - 8
    return F.linear(x, q * s)


def cast_only(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * s)


def operands(name: str, n: int, g: int, parts: int) -> tuple[Form, tuple[Tensor, ...]]:
    """A form and its operands but x: n columns, ``parts`` groups of g."""
    k, r = g * parts, torch.randn
    table: dict[str, tuple[Form, tuple[Tensor, ...]]] = {
        "scaled rows": (scaled_rows, (int8(n, k), r(n, 1))),
        "scaled result": (scaled_result, (int8(n, k), r(n))),
        "epilogue": (with_epilogue, (int8(n, k), r(n) / 64, r(n))),
        "columns": (columns, (int8(k, n), r(n))),
        "groups": (groups, (int8(n, k), r(n, parts))),
        "nibbles": (nibbles, (uint8(n, k // 2), r(n, parts), r(n, parts))),
        "gpt-fast": (gpt_fast, (uint8(n, k // 2), r(parts, n, 2))),
        "words": (words, (torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32), r(n, parts))),
        "halves": (halves, (uint8(n, k // 2), r(n, 1))),
        "float8_e4m3fn": (cast_only, (r(n, k).to(torch.float8_e4m3fn), r(n, 1))),
        "float8_e5m2": (cast_only, (r(n, k).to(torch.float8_e5m2), r(n, 1))),
    }
    return table[name]


FORMS = (
    "scaled rows", "scaled result", "epilogue", "columns", "groups", "nibbles", "gpt-fast", "words", "halves",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


def wide(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a.double() if a.is_floating_point() and a.element_size() > 1 else a for a in args)


def check(compiled: Callable[..., Any], form: Form, x: Tensor, rest: tuple[Tensor, ...], tolerance: float) -> None:
    result, wanted = compiled(x, *rest), form(*wide((x, *rest)))
    assert result.dtype is x.dtype and result.shape == wanted.shape
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=tolerance * max(float(wanted.abs().max()), 1.0))


@pytest.mark.parametrize("name", FORMS)
def test_odd_sizes(name: str) -> None:
    """Neither columns, rows nor groups fill vectors or blocks."""
    torch.manual_seed(0)
    form, rest = operands(name, 37, 40, 3)
    compiled = torch.compile(form, backend="mlc", dynamic=False)
    check(compiled, form, torch.randn(5, 120), rest, 2e-6)


@pytest.mark.parametrize("name", FORMS)
def test_half_activations(name: str) -> None:
    torch.manual_seed(1)
    form, rest = operands(name, 24, 32, 4)
    half = tuple(a.bfloat16() if a.dtype is torch.float32 else a for a in rest)
    compiled = torch.compile(form, backend="mlc", dynamic=False)
    check(compiled, form, torch.randn(1, 128).bfloat16(), half, 1e-2)


@pytest.mark.parametrize("name", FORMS)
def test_one_kernel_reads_the_packed_weight(name: str) -> None:
    torch.manual_seed(2)
    form, rest = operands(name, 256, 64, 4)
    x = torch.randn(1, 256)
    (graph,) = torch_mlc.explain(form, x, *rest).graphs
    (kernel,) = graph.kernels
    assert graph.libraries == () and kernel.calls == 1 and kernel.rule == "cpu_contraction"
    assert kernel.traffic is not None and any("in its loops" in note for note in kernel.notes)
    read = sum(t.numel() * t.element_size() for t in (x, *rest))
    # The model counts both branches of "halves" as moved, and not the gaps between the scales of "gpt-fast" as needed.
    assert read + 256 * 4 in (kernel.traffic.moved, kernel.traffic.least)
    assert kernel.notes[0] in str(graph)


@pytest.mark.parametrize("name", ["epilogue", "columns", "nibbles"])
def test_any_number_of_rows(name: str) -> None:
    torch.manual_seed(3)
    form, rest = operands(name, 40, 32, 2)
    compiled = torch.compile(form, backend="mlc", dynamic=True)
    for m in (5, 2, 9, 17):
        x = torch.randn(m, 64)
        torch._dynamo.mark_dynamic(x, 0)
        check(compiled, form, x, rest, 2e-6)


def test_a_gated_pair_is_one_kernel() -> None:
    def gated(x: Tensor, a: Tensor, s: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return F.silu(F.linear(x, a.to(x.dtype) * s)) * F.linear(x, b.to(x.dtype) * t)

    torch.manual_seed(4)
    rest = (int8(72, 64), torch.randn(72, 1) / 256, int8(72, 64), torch.randn(72, 1) / 256)
    x = torch.randn(3, 64)
    (graph,) = torch_mlc.explain(gated, x, *rest).graphs
    assert [k.rule for k in graph.kernels] == ["cpu_contraction"] and graph.libraries == ()
    check(torch.compile(gated, backend="mlc"), gated, x, rest, 2e-6)


def test_special_values_go_through() -> None:
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [1.0, 1.0]])
    w, s = torch.tensor([[1, 2], [3, 0]], dtype=torch.int8), torch.tensor([[1.0], [0.5]])
    compiled = torch.compile(scaled_rows, backend="mlc")
    torch.testing.assert_close(compiled(x, w, s), scaled_rows(x, w, s), equal_nan=True)


def test_no_terms_and_no_columns() -> None:
    compiled = torch.compile(scaled_rows, backend="mlc", dynamic=False)
    assert compiled(torch.zeros(3, 0), int8(4, 0), torch.ones(4, 1)).equal(torch.zeros(3, 4))
    assert compiled(torch.zeros(3, 4), int8(0, 4), torch.ones(0, 1)).shape == (3, 0)


@pytest.mark.parametrize(("rows", "wide", "narrow"), [(1, 4, 4), (4, 6, 5), (6, 6, 5), (17, 6, 5)])
def test_columns_share_rows_that_are_loaded_again(rows: int, wide: int, narrow: int) -> None:
    """As many columns as there are registers for the sums of them with a block of rows."""
    x, w, s = torch.zeros(rows, 64), int8(48, 64), torch.zeros(48, 1)
    (kernel,) = torch_mlc.explain(scaled_rows, x, w, s).kernels
    for width, columns in ((64, wide), (32, narrow)):
        values = CPU_CONTRACTION.parameters(kernel.nest, replace(cpu_target(1), vector_bytes=width))
        assert values["columns"][0] == columns


@pytest.mark.parametrize("rows", [7, 12, 16, 25])
def test_several_blocks_of_rows(rows: int) -> None:
    torch.manual_seed(5)
    compiled = torch.compile(scaled_rows, backend="mlc", dynamic=False)
    for n, k in ((33, 61), (4, 128), (3, 1), (130, 257)):
        check(compiled, scaled_rows, torch.randn(rows, k), (int8(n, k), torch.randn(n, 1) / 256), 2e-6)
