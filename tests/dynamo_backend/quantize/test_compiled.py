"""Quantized layers compiled: the same numbers as eager's, by integer instructions where the processor has them."""

import pytest
import torch
from torch import nn

import torch_mlc
from torch_mlc.ir.expr.dots import dots_of
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.rules.cpu.dot_products import features_of

TARGET = cpu_target()
WHOLE = [d.name for d in dots_of(features_of(TARGET), TARGET.vector_bytes) if d.is_whole]
needs_integers = pytest.mark.skipif(not WHOLE, reason="the processor has no instruction that adds products of bytes")


def _layer(inputs, outputs, weights, activations, group=32, bias=True, dtype=torch.float32):
    torch.manual_seed(inputs * outputs)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias)).to(dtype)
    return torch_mlc.quantize_(model, weights, group, activations)


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group"),
    [
        (1, 64, 48, 32), (1, 256, 16, 64), (1, 64, 17, 32), (3, 64, 33, 32), (5, 96, 64, 32), (7, 72, 40, 24),
        (13, 64, 130, 32), (16, 70, 19, 32), (2, 64, 48, None), (1, 520, 32, None), (33, 128, 96, 32), (0, 64, 48, 32),
    ],
)  # fmt: skip
def test_compiled_is_eager(weights, activations, rows, inputs, outputs, group):
    model = _layer(inputs, outputs, weights, activations, group)
    x = torch.randn(rows, inputs)
    with torch.no_grad():
        found, wanted = torch.compile(model, backend="mlc")(x), model(x)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("rows", [1, 6])
def test_half_types(weights, activations, dtype, rows):
    model = _layer(128, 80, weights, activations, dtype=dtype)
    x = torch.randn(rows, 128, dtype=dtype)
    with torch.no_grad():
        found, wanted = torch.compile(model, backend="mlc")(x), model(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), wanted.float(), atol=1e-2, rtol=1e-2)


@needs_integers
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_sums_of_integers_are_exact(weights, rows):
    """Scales that are powers of two, and whole numbers as rows: all sums are exact, in eager mode too."""
    low, high = (-8, 8) if weights == "int4" else (-128, 128)
    codes = torch.randint(low, high, (70, 128), dtype=torch.int8)
    scales = (2.0 ** torch.randint(-3, 4, (70, 4))).half()
    layer = torch_mlc.QuantizedLinear(torch_mlc.pack_weight(codes, scales, weights), None, "int8")
    x = torch.randint(-127, 128, (rows, 128)).float()
    x[:, ::32] = 127.0  # so that codes are the numbers themselves
    dequantized = codes.double() * scales.double().repeat_interleave(32, 1)
    wanted = (x.double() @ dequantized.t()).float()
    with torch.no_grad():
        found, eager = torch.compile(layer, backend="mlc")(x), layer(x)
    assert torch.equal(eager, wanted) and torch.equal(found, wanted)


@needs_integers
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("rows", [1, 16])
def test_explain_shows_the_instruction(weights, rows):
    model = _layer(256, 128, weights, "int8")
    with torch.no_grad():
        report = torch_mlc.explain(model, torch.randn(rows, 256))
    rounding, product = report.kernels
    assert product.rule == "cpu_dot_products" and not report.graphs[0].libraries
    assert f"'tensorize': '{WHOLE[0]}'" in torch_mlc.show(product.scheduled)
    assert "int8" in rounding.definition.split("out0")[1]


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_weights_alone_are_read_once(weights):
    model = _layer(256, 128, weights, None)
    with torch.no_grad():
        report = torch_mlc.explain(model, torch.randn(1, 256))
    (product,) = report.kernels
    assert product.rule == "cpu_dot_products" and "'tensorize': 'bytes." in torch_mlc.show(product.scheduled)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_rows_that_are_no_numbers(activations):
    model = _layer(64, 32, "int4", activations, bias=False)
    x = torch.randn(4, 64)
    x[1, 3], x[2, 40], x[3] = torch.nan, torch.inf, 0.0
    with torch.no_grad():
        found, wanted = torch.compile(model, backend="mlc")(x), model(x)
    assert found[1].isnan().all() and not torch.isfinite(found[2]).any() and not found[3].any()
    torch.testing.assert_close(found[0], wanted[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_a_number_of_rows_that_varies(activations):
    model = _layer(64, 48, "int4", activations)
    compiled = torch.compile(model, backend="mlc", dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 9, 40):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_verified_kernel_by_kernel(activations):
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
    torch_mlc.quantize_(model, "int4", 16, activations)
    x = torch.randn(3, 64)
    with torch.no_grad():
        found = torch.compile(model, backend="mlc", options={"verify": 1})(x)
        torch.testing.assert_close(found, model(x), atol=2e-5, rtol=2e-5)
