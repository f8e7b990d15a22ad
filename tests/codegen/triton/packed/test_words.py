"""Products of weights packed in words of four bytes, and of eight bits with an exponent: one kernel, interpreted, gives
what a float64 product gives. Scales are powers of two, so that weights are exact in half types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import torch_mlc
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
Form = Callable[..., Tensor]
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def shifts(bits: int, count: int) -> Tensor:
    return torch.arange(0, bits * count, bits, dtype=torch.int32)


def gptq(x: Tensor, w: Tensor, z: Tensor, s: Tensor) -> Tensor:
    """Along the sum; zero points along columns."""
    g, n = s.shape
    q = ((w[:, None, :] >> shifts(4, 8)[None, :, None]) & 15).reshape(g, -1, n)
    zero = ((z[:, :, None] >> shifts(4, 8)) & 15).reshape(g, 1, n)
    return x @ ((q - zero).to(x.dtype) * s[:, None, :]).reshape(-1, n)


def gptq_bytes(x: Tensor, w: Tensor, z: Tensor, s: Tensor) -> Tensor:
    """As libraries write it that shift into bytes, one added to the zero points."""
    g, n = s.shape
    q = ((w[:, None, :] >> shifts(4, 8)[None, :, None]).to(torch.int8) & 15).reshape(g, -1, n)
    zero = ((z[:, :, None] >> shifts(4, 8)).to(torch.int8) & 15).reshape(g, 1, n) + 1
    return x @ ((q - zero).to(x.dtype) * s[:, None, :]).reshape(-1, n)


def rows(x: Tensor, w: Tensor, z: Tensor, s: Tensor) -> Tensor:
    """Along the rows of the weight; zero points are numbers of any sign."""
    n = w.shape[0]
    q = ((w[:, :, None] >> shifts(4, 8)) & 15).reshape(n, s.shape[1], -1).to(x.dtype)
    return F.linear(x, ((q - z[:, :, None]) * s[:, :, None]).reshape(n, -1))


def two_bits(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    n = w.shape[0]
    q = torch.stack([(w >> 2 * k) & 3 for k in range(4)], -1).reshape(n, s.shape[1], -1)
    return F.linear(x, ((q.to(x.dtype) - 2) * s[:, :, None]).reshape(n, -1))


def three_bits(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    n = w.shape[0]
    q = ((w[:, :, None] >> shifts(3, 10)) & 7).reshape(n, -1)
    return F.linear(x, (q.to(x.dtype) - 4) * s)


def eight_bits(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """A scale for each block of rows and terms."""
    (n, k), (a, b) = w.shape, s.shape
    wide = w.float().reshape(a, n // a, b, k // b) * s[:, None, :, None]
    return F.linear(x, wide.to(x.dtype).reshape(n, k))


def eight_bits_cast(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def powers(*shape: int) -> Tensor:
    return 2.0 ** torch.randint(-6, -2, shape)


def made(name: str, n: int, g: int, size: int, half: torch.dtype) -> tuple[Form, int, list[Tensor]]:
    """A form, the terms of its sum, and its operands but x: n columns, g groups."""
    k = g * size
    exact = [torch.randn(n, k).to(kind) for kind in (torch.float8_e4m3fn, torch.float8_e5m2)]
    table: dict[str, tuple[Form, int, list[Tensor]]] = {
        "along K": (gptq, k, [words(k // 8, n), words(g, n // 8), powers(g, n).to(half)]),
        "along K, bytes": (gptq_bytes, k, [words(k // 8, n), words(g, n // 8), powers(g, n).to(half)]),
        "rows": (rows, k, [words(n, k // 8), torch.randint(-9, 9, (n, g)).to(half), powers(n, g).to(half)]),
        "2 bits": (two_bits, k, [torch.randint(0, 256, (n, k // 4), dtype=torch.uint8), powers(n, g).to(half)]),
        "3 bits": (three_bits, k // 8 * 10, [words(n, k // 8), powers(n, 1).to(half)]),
        "e4m3": (eight_bits, k, [exact[0], powers(n // 8, g)]),
        "e5m2": (eight_bits, k, [exact[1], powers(n // 8, g)]),
        "e4m3, one scale": (eight_bits_cast, k, [exact[0], powers(1)[0].to(half)]),
    }
    return table[name]


def array(t: Tensor) -> np.ndarray:
    name = str(t.dtype).removeprefix("torch.")
    kind = getattr(ml_dtypes, name, None)
    if kind is None:
        return t.numpy()
    return t.contiguous().view(getattr(torch, f"uint{8 * t.element_size()}")).numpy().view(kind)


def run(interpreter: Any, form: Form, inputs: list[Tensor], target: Target) -> tuple[str, np.ndarray]:
    """The rule of the only kernel of a form for a target, and what it gives.

    Operands of one type and size are given to the kernel in their order, so a form has to use them in that order.
    """
    report = torch_mlc.explain(form, *inputs, target=str(target))
    (graph,) = report.graphs
    assert not graph.libraries
    (kernel,) = graph.kernels
    assert kernel.function is not None
    schedule = default_schedule(lower_to_loops(kernel.function, target), target)
    source = emit_triton(schedule.nest, target)
    left, given = [array(t) for t in inputs], {}
    for b in schedule.nest.params:
        if b.name not in schedule.nest.outputs:
            shape, dtype = tuple(map(int, b.shape)), b.dtype.numpy
            at = next(k for k, a in enumerate(left) if a.dtype == dtype and a.size == np.prod(shape))
            given[b.name] = left.pop(at).reshape(shape)
    (output,) = schedule.nest.outputs
    return str(schedule.rule), interpreter.run(source, (output,), given, {})[output].astype(np.float64)


def check(
    interpreter: Any, name: str, m: int, sizes: tuple[int, int, int], half: torch.dtype, target: Target = SM90
) -> str:
    torch.manual_seed(m)
    form, k, rest = made(name, *sizes, half)
    x = torch.randn(m, k).to(half)
    wanted = form(x.double(), *(t.double() if t.is_floating_point() and t.element_size() > 1 else t for t in rest))
    rule, found = run(interpreter, form, [x, *rest], target)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=LIMITS[half], atol=LIMITS[half] * float(wanted.abs().max()))
    return rule


# Each form with one row and with 16, each half type with both, without all pairs of them.
BF16, F16 = torch.bfloat16, torch.float16
CASES = (
    ("along K", BF16, 1), ("along K", F16, 16), ("along K, bytes", BF16, 16), ("rows", F16, 1), ("rows", BF16, 16),
    ("2 bits", F16, 1), ("2 bits", BF16, 16), ("3 bits", BF16, 16), ("e4m3", F16, 1), ("e4m3", BF16, 16),
    ("e5m2", BF16, 1), ("e4m3, one scale", BF16, 1), ("e4m3, one scale", F16, 16),
)  # fmt: skip


@pytest.mark.parametrize(("name", "half", "m"), CASES)
def test_packed_weights(interpreter: Any, name: str, half: torch.dtype, m: int) -> None:
    rule = check(interpreter, name, m, (64, 2, 128), half)
    assert rule == ("gpu_matrix_vector" if m == 1 else "gpu_contraction")


@pytest.mark.parametrize(
    ("name", "half", "m"),
    [("along K", BF16, 3), ("rows", BF16, 17), ("e4m3", BF16, 2), ("along K", F16, 1), ("rows", torch.float32, 1)],
)
def test_tails(interpreter: Any, name: str, half: torch.dtype, m: int) -> None:
    """Rows, columns and terms that fill no tile, and activations of float32."""
    check(interpreter, name, m, (40, 3, 88), half)


@pytest.mark.parametrize("sizes", [(64, 2, 128), (40, 3, 88)])
@pytest.mark.parametrize(("name", "half", "m"), [case for case in CASES if case[0].startswith("e")])
def test_floats_of_eight_bits_that_are_bytes(
    interpreter: Any, name: str, half: torch.dtype, m: int, sizes: tuple[int, int, int]
) -> None:
    """Where Triton lacks the type of the weight, and where it lacks no more than its product."""
    check(interpreter, name, m, sizes, half, gpu_target("cuda:sm_80"))


@pytest.mark.parametrize("sizes", [(64, 2, 128), (40, 3, 88)])
@pytest.mark.parametrize(("name", "half", "m"), [case for case in CASES if case[2] > 1])
def test_without_instructions_over_two_elements(
    interpreter: Any, name: str, half: torch.dtype, m: int, sizes: tuple[int, int, int]
) -> None:
    """What packed weights hold becomes operands of AMD's matrix cores by plain arithmetic."""
    assert check(interpreter, name, m, sizes, half, GFX942) == "gpu_contraction"


@pytest.mark.parametrize(("name", "slots"), [("along K", 23), ("rows", 20)])
def test_numbers_for_matrix_cores_of_amd_are_made_of_few_instructions(name: str, slots: float) -> None:
    """A digit becomes a number by a mask and a conversion, a rounding takes two instructions, and the upper halves of
    two numbers are a register: with a look at what is no number at each rounding it was 30 and 35."""
    with FakeTensorMode():
        form, k, rest = made(name, 14336, 32, 128, BF16)
        x = torch.empty(16, k, dtype=BF16)
    (kernel,) = torch_mlc.explain(form, x, *rest, target=str(GFX942)).kernels
    assert kernel.resources is not None and kernel.resources.spills == 0 < kernel.resources.warp_products
    assert kernel.slots_a_byte is not None and kernel.slots_a_byte <= slots


def test_a_zero_point_is_subtracted_with_the_power_of_two() -> None:
    form, k, rest = made("along K", 64, 2, 128, BF16)
    report = torch_mlc.explain(form, torch.randn(16, k).to(BF16), *rest, target="cuda:sm_90")
    (kernel,) = report.kernels
    assert "mlc_digit_u4_at12_of16_less_bfloat16(" in str(kernel.source)


LARGE = [
    *((name, m, "cuda:sm_90") for name in ("along K", "rows", "2 bits") for m in (1, 16)),
    *(("along K", m, target) for m, target in ((1, "cuda:sm_100"), (16, "cuda:sm_100"), (1, "cuda:sm_120"))),
]


@pytest.mark.parametrize(("name", "m", "target"), LARGE)
def test_parts_of_words_stay_in_registers(name: str, m: int, target: str) -> None:
    """From the copy of the words to the tensor cores: digits, zero points and scales have the layout of an operand from
    the start, zero points among them, which are found by positions. No warp waits for a group of others."""
    with FakeTensorMode():
        form, k, rest = made(name, 14336, 32, 128, BF16)
        x = torch.empty(m, k, dtype=BF16)
    (kernel,) = torch_mlc.explain(form, x, *rest, target=target).kernels
    assert kernel.binary is not None and kernel.resources is not None
    assert kernel.resources.spills == 0 and kernel.resources.warp_products > 0 == kernel.resources.group_products
    between = kernel.binary.assembly.split("mma.sync")[1:-1]
    assert between and not any("st.shared" in part for part in between)
    assert kernel.slots_a_byte is not None and (name == "2 bits" or kernel.slots_a_byte <= 7.8)
    assert kernel.bytes_in_flight is not None and kernel.bytes_in_flight >= 25e3
