"""Quantized modules in eager mode: what is rounded, what the layout holds, and what is refused."""

import copy

import pytest
import torch
from torch import nn

import torch_mlc
from torch_mlc.dynamo_backend.quantize.panels import from_panels, scales_from_panels, to_panels
from torch_mlc.dynamo_backend.quantize.rounding import quantize_rows, quantize_weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.inner = nn.ModuleList([nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 64, bias=False)])
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, indices):
        x = self.table(indices)
        for layer in self.inner:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("bits", "low", "high"), [(4, -8, 7), (8, -128, 127)])
@pytest.mark.parametrize("outputs", [1, 63, 64, 130])
def test_the_layout_holds_every_code(bits, low, high, outputs):
    codes = torch.randint(low, high + 1, (outputs, 64), dtype=torch.int8)
    panels = to_panels(codes, bits)
    assert panels.shape == (-(-outputs // 64), 64 * bits // 32, 64, 4)
    assert torch.equal(from_panels(panels, outputs, bits), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_the_nearest(bits):
    weight = torch.randn(8, 96, dtype=torch.float64)
    codes, scales = quantize_weight(weight, bits, 32)
    step = scales.double().repeat_interleave(32, 1)
    rest = (weight - codes.double() * step).abs()
    # Half a step, one for what would round to 8 (the range of four bits ends at 7), and what float16 rounds of a scale.
    assert bool((rest <= step.abs() * (1.0 if bits == 4 else 0.5) * 1.1).all())
    assert scales.dtype is torch.float16
    if bits == 4:
        assert bool((codes.unflatten(1, (-1, 32)).amin(-1) == -8).all())


def test_tiny_and_huge_scales_are_float32():
    for factor in (1e-8, 1e12):
        weight = torch.randn(4, 32) * factor
        codes, scales = quantize_weight(weight, 8, 32)
        assert scales.dtype is torch.float32
        made = codes.float() * scales.repeat_interleave(32, 1)
        torch.testing.assert_close(made, weight, atol=float(scales.max()) * 0.51, rtol=0)


def test_rows_that_are_no_numbers():
    rows = torch.randn(4, 64)
    rows[1, 3], rows[2, 40], rows[3, :32] = torch.nan, torch.inf, 0.0
    codes, scales = quantize_rows(rows, 32)
    assert scales[1, 0].isnan().all() and scales[2, 1].isnan().all() and not codes[1, 0].any()
    assert scales[3, 0] == 0 and not codes[3, 0].any()
    assert torch.isfinite(scales[0]).all() and torch.isfinite(scales[1, 1]).all()


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(64, 48, 32), (70, 17, 32), (40, 16, None), (24, 5, 8)])
def test_a_layer_is_near_the_one_it_was(weights, activations, inputs, outputs, group):
    model = nn.Sequential(nn.Linear(inputs, outputs))
    before = copy.deepcopy(model).double()
    assert torch_mlc.quantize_(model, weights, group, activations) is model
    x = torch.randn(3, 5, inputs)
    found, wanted = model(x), before(x.double())
    assert found.shape == (3, 5, outputs) and found.dtype is torch.float32
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < (0.15 if weights == "int4" else 0.02)
    exact = x.double() @ model[0].weight.dequantized().double()[:, :inputs].t() + before[0].bias
    if activations is None:
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    assert model(torch.empty(0, inputs)).shape == (0, outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_have_the_type_of_the_input(dtype):
    model = nn.Sequential(nn.Linear(64, 32)).to(dtype)
    torch_mlc.quantize_(model, "int8")
    assert model(torch.randn(2, 64, dtype=dtype)).dtype is dtype
    before = model[0].weight.scales.clone()
    model.to(torch.float32)
    assert model[0].weight.scales.dtype is before.dtype and model[0].bias.dtype is torch.float32


def test_tied_weights_are_rounded_once():
    model = Tied()
    torch_mlc.quantize_(model, "int4", embeddings=True)
    assert model.head.weight is model.table.weight
    indices = torch.tensor([[0, 49, 7]])
    torch.testing.assert_close(model.table(indices), model.head.weight.dequantized()[indices])
    other = torch_mlc.quantize_(Tied(), "int4", embeddings=True)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(indices), model(indices))


def test_a_filter_leaves_modules_out():
    model = torch_mlc.quantize_(Tied(), "int8", filter=lambda name, module: name != "head")
    assert isinstance(model.head, nn.Linear) and isinstance(model.inner[0], torch_mlc.QuantizedLinear)
    assert isinstance(model.table, nn.Embedding)


def test_a_module_in_two_places_stays_one():
    shared = nn.Linear(32, 32)
    model = torch_mlc.quantize_(nn.Sequential(shared, nn.ReLU(), shared))
    assert model[0] is model[2]


def test_gradients_reach_inputs():
    model = torch_mlc.quantize_(nn.Sequential(nn.Linear(32, 16)), "int8")
    x = torch.randn(2, 32, requires_grad=True)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.dequantized().sum(0).expand(2, -1))


def test_codes_that_are_there_already():
    codes = torch.randint(-8, 8, (20, 64), dtype=torch.int8)
    scales = torch.rand(20, 2, dtype=torch.float16)
    weight = torch_mlc.pack_weight(codes, scales, "int4")
    assert torch.equal(weight.dequantized(), codes.float() * scales.float().repeat_interleave(32, 1))
    assert torch.equal(scales_from_panels(weight.scales, 20), scales)
    layer = torch_mlc.QuantizedLinear(weight, None, "int8")
    assert layer(torch.randn(2, 64)).shape == (2, 20)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"weights": "int5"}, "it is 'int4' or 'int8'"),
        ({"weights": "int4", "group": 12}, "multiple of 8 for int4"),
        ({"weights": "int8", "group": 0}, "multiple of 4"),
        ({"activations": "int4"}, "None or 'int8'"),
        ({"filter": lambda name, module: False}, "no nn.Linear"),
    ],
)
def test_wrong_arguments_are_told(arguments, told):
    with pytest.raises(torch_mlc.QuantizeError, match=told):
        torch_mlc.quantize_(nn.Sequential(nn.Linear(32, 8)), **arguments)


def test_wrong_models_are_told():
    with pytest.raises(torch_mlc.QuantizeError, match="wrap it"):
        torch_mlc.quantize_(nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(32, 8))
    model[0].weight.data[3, 4] = torch.nan
    with pytest.raises(torch_mlc.QuantizeError, match="0: a weight has NaN"):
        torch_mlc.quantize_(model)
    with pytest.raises(torch_mlc.QuantizeError, match="int4 has -8 to 7"):
        torch_mlc.pack_weight(torch.full((4, 8), 9, dtype=torch.int8), torch.ones(4, 1), "int4")
    with pytest.raises(torch_mlc.QuantizeError, match="pad the codes"):
        torch_mlc.pack_weight(torch.zeros(4, 12, dtype=torch.int8), torch.ones(4, 1), "int4")
