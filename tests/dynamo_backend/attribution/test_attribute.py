"""torch_mlc.attribute: planted causes are found where they are, and what is found adds up."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_mlc
from benchmarks.models.registry import get_model
from torch_mlc.dynamo_backend.aten_passes import merge_products
from torch_mlc.dynamo_backend.attribution.attribution import Attribution
from torch_mlc.runtime.settings.options import OptionError


def compiled(function: Callable[..., Any], *args: Any, numerics: object) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="mlc", options={"numerics": numerics})(*args)


def three_roundings(x: Tensor) -> Tensor:
    y = x * 1.7
    z = y + 0.3
    return z * x


def attention(x: Tensor, w: Tensor) -> Tensor:
    scores = F.gelu(x @ w)
    return torch.softmax(scores, -1) * x.sum(-1, keepdim=True)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def w() -> Tensor:
    return torch.randn(48, 40, generator=torch.Generator().manual_seed(2)).bfloat16()


def checked(made: Attribution, against: Tensor, got: Tensor) -> None:
    """What is told of the whole is the difference, and the rows add up to it."""
    assert made.whole.absolute == (got.double() - against.double()).abs().max().item()
    assert sum(r.share for r in made.rows) == pytest.approx(1.0, abs=1e-9)


def test_a_single_removed_rounding_is_found_at_its_place(x: Tensor) -> None:
    rows = torch_mlc.attribute(three_roundings, x, options={"numerics": "fast"}).rows
    (key,) = next(r for r in rows if r.is_one and "aten.add.Tensor" in r.places[0]).entries
    planted = {"default": "eager", key: "fast"}
    made = torch_mlc.attribute(three_roundings, x, options={"numerics": planted})
    first = made.rows[0]
    assert first.share >= 0.95 and first.is_one and first.kind == "conversion left out"
    assert "z = y + 0.3" in first.places[0] and dict(first.entries) == {key: "eager"}
    assert made.explained == pytest.approx(1.0) and made.rest == 0
    checked(made, three_roundings(x), compiled(three_roundings, x, numerics=planted))
    assert torch.equal(compiled(three_roundings, x, numerics=made.numerics()), three_roundings(x))


def test_a_sum_in_another_order_is_found() -> None:
    x = torch.randn(16, 3000, generator=torch.Generator().manual_seed(0)) + 10

    def total(x: Tensor) -> Tensor:
        y = x.neg()
        return y.sum(-1) * 0.5

    made = torch_mlc.attribute(total, x)
    first = made.rows[0]
    assert first.share >= 0.95 and first.kind == "order of a sum" and "y.sum(-1)" in first.places[0]
    assert made.explained == pytest.approx(1.0, abs=1e-6) and made.rest == 0
    checked(made, total(x), compiled(total, x, numerics="fast"))
    assert made.kept == 0


def test_a_function_that_is_approximated_badly_is_found(x: Tensor) -> None:
    with torch_mlc.register_converter("aten.exp.default", lambda v: v.exp() * (1 + 1e-3), pointwise=True, replace=True):

        def f(x: Tensor) -> Tensor:
            y = torch.exp(x) + 1
            return y / (x.abs() + 2)

        made = torch_mlc.attribute(f, x.float())
    first = made.rows[0]
    assert first.share >= 0.95 and first.kind == "arithmetic of a function" and "torch.exp(x)" in first.places[0]
    assert first.size.relative == pytest.approx(1e-3, rel=0.2)
    assert math.isclose(sum(r.share for r in made.rows), 1.0, abs_tol=1e-9)


def test_an_approximate_function_is_told_from_a_conversion() -> None:
    x = (torch.rand(512, 64, generator=torch.Generator().manual_seed(0)) * 6 - 3).bfloat16()

    def f(x: Tensor) -> Tensor:
        return torch.tanh(x * 0.5) + 1.0

    made = torch_mlc.attribute(f, x, options={"numerics": {"aten.mul": "eager"}})
    kinds = {r.kind for r in made.rows}
    assert kinds <= {"approximate function", "conversion left out", "arithmetic of a function"}
    assert any("torch.tanh" in r.places[0] for r in made.rows)
    assert made.rest == 0 and sum(r.share for r in made.rows) == pytest.approx(1.0)


def test_all_places_kept_are_eager_numerics(x: Tensor, w: Tensor) -> None:
    eager = compiled(attention, x, w, numerics="eager")
    assert torch.equal(compiled(attention, x, w, numerics={"default": "eager"}), eager)
    fast = compiled(attention, x, w, numerics="fast")
    assert torch.equal(compiled(attention, x, w, numerics={}), fast)
    assert not torch.equal(fast, eager)


def test_all_places_kept_are_eager_numerics_in_training_too(x: Tensor) -> None:
    torch.manual_seed(0)
    model = Model().bfloat16().eval()
    grads = []
    for numerics in ("eager", {"default": "eager"}, "fast"):
        torch._dynamo.reset()
        given = x.clone().requires_grad_()
        out = torch.compile(model, backend="mlc", options={"numerics": numerics})(given, x * 0.5)
        out["h"].float().square().sum().backward()
        grads.append(given.grad)
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])


def test_what_numerics_gives_keeps_eager_and_may_be_smaller(x: Tensor, w: Tensor) -> None:
    made = torch_mlc.attribute(attention, x, w)
    want = attention(x, w)
    checked(made, want, compiled(attention, x, w, numerics="fast"))
    assert torch.equal(compiled(attention, x, w, numerics=made.numerics(1.0)), want)
    assert len(made.numerics(0.3)) <= len(made.numerics(1.0))
    some = compiled(attention, x, w, numerics=made.numerics(0.95))
    before = (compiled(attention, x, w, numerics="fast").double() - want.double()).norm()
    assert made.kept == pytest.approx(((some.double() - want.double()).norm() / before).item(), abs=1e-6)


def test_every_way_of_naming_a_place_is_the_same(x: Tensor) -> None:
    line = next(k for k, t in enumerate(Path(__file__).read_text().splitlines(), 1) if "z = y + 0.3" in t)
    by_line = compiled(three_roundings, x, numerics={f"test_attribute.py:{line}": "eager"})
    assert torch.equal(by_line, compiled(three_roundings, x, numerics={"aten.add": "eager"}))
    assert torch.equal(by_line, compiled(three_roundings, x, numerics={"aten.add.Tensor": "eager"}))
    assert not torch.equal(by_line, compiled(three_roundings, x, numerics="fast"))


def test_no_difference_is_said(x: Tensor) -> None:
    made = torch_mlc.attribute(lambda x: x + 1, x)
    assert made.is_zero and made.rows == () and made.explained == 1.0
    assert (
        str(made) == f"No difference: all {x.numel()} elements of the compiled model's results equal eager's "
        "bit for bit.\n"
    )
    assert made.numerics() == {"default": "fast"}


class Model(nn.Module):
    """With a buffer that it writes, a dropout, and results of several kinds."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(48), nn.Linear(48, 48)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.seen += 1
        h = F.dropout(F.gelu(self.linear(self.norm(x))), 0.1, self.training) + y
        return {"h": h, "pair": (h.argmax(-1), (h * 1.1).sum(-1))}


def test_gradients_dicts_and_integers_and_nothing_is_changed(x: Tensor) -> None:
    torch.manual_seed(0)
    model = Model().bfloat16()
    x, y = x.requires_grad_(), x.detach() * 0.5
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    kept = x.detach().clone()
    made = torch_mlc.attribute(model, x, y, backward=lambda r: r["h"].float().square().sum(), budget=40)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(kept, x) and x.grad is None
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert model.linear.weight.grad is None
    assert sum(r.share for r in made.rows) == pytest.approx(1.0) and made.rest == 0
    assert any(r.kind == "traced as other ops" for r in made.rows), "eager's dropout on a CPU is another op"
    assert any("(backward)" in p for r in made.rows for p in r.places)
    assert made.noise.norm == 0
    data = json.loads(made.to_json())
    assert data["whole"]["norm"] == made.whole.norm and len(data["rows"]) == len(made.rows)
    assert made._repr_html_().startswith("<pre style=")


def test_whole_numbers_are_counted() -> None:
    x = (torch.randn(400, 7, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()

    def steps(x: Tensor) -> Tensor:
        return ((x * 1.7 + 0.3) * 1.3 > 1.0).sum(-1)

    planted = {"default": "fast"}
    made = torch_mlc.attribute(steps, x, options={"numerics": planted})
    got, want = compiled(steps, x, numerics=planted), steps(x)
    assert made.whole.norm == 0 and made.whole.elements == int((got != want).sum()) > 0
    assert sum(r.share for r in made.rows) == pytest.approx(1.0)
    assert sum(r.size.elements for r in made.rows) >= made.whole.elements
    assert "elements" in str(made)


def test_what_is_no_number_is_counted_and_does_not_hide_the_rest(x: Tensor) -> None:
    x = x.clone()
    x[0, 0], x[1, 1], x[2, 2] = math.nan, math.inf, -math.inf
    made = torch_mlc.attribute(three_roundings, x)
    assert made.whole.norm > 0 and math.isfinite(made.whole.norm) and made.whole.elements == 0
    assert sum(r.share for r in made.rows) == pytest.approx(1.0)


def test_against_float64_tells_who_is_better(x: Tensor) -> None:
    made = torch_mlc.attribute(three_roundings, x, against="float64")
    exact = three_roundings(x.double())
    fast, eager = compiled(three_roundings, x, numerics="fast"), three_roundings(x)
    assert made.whole.absolute == pytest.approx((fast.double() - exact).abs().max().item())
    errors = [(t.double() - exact).norm() for t in (fast, eager)]
    own = next(r for r in made.rows if r.kind == "roundings of eager")
    changes = sum(r.error for r in made.rows if r is not own)
    assert changes == pytest.approx(((errors[1] - errors[0]) / errors[0]).item(), abs=1e-9)
    assert changes > 0, "float32 in between is better than eager"
    assert own.error == pytest.approx(-(errors[1] / errors[0]).item())
    assert sum(r.share for r in made.rows) == pytest.approx(1.0)
    assert made.numerics() == {"default": "fast"} or made.kept < 1


def test_float64_of_a_model_converts_what_the_model_makes_narrow(x: Tensor) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(48, 48)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).float() * 1.1
            return (y.to(torch.bfloat16) + torch.ones(48, dtype=torch.bfloat16)).to(x.dtype) * 1.3

    torch.manual_seed(0)
    model = Narrow().bfloat16()
    made = torch_mlc.attribute(model, x, against="float64")
    w, b = model.linear.weight.double(), model.linear.bias.double()
    exact = ((x.double() @ w.T + b) * 1.1 + 1) * 1.3
    fast = compiled(model, x, numerics="fast")
    assert made.whole.absolute == pytest.approx((fast.double() - exact).abs().max().item())


def test_several_graphs_are_one_model(x: Tensor, w: Tensor) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x * 1.7 + 0.3
        torch._dynamo.graph_break()
        return F.gelu((y * 0.3 + 1) @ w)

    made = torch_mlc.attribute(f, x, w)
    torch._dynamo.reset()
    assert sum(r.share for r in made.rows) == pytest.approx(1.0) and made.rest == 0
    checked(made, f(x, w), compiled(f, x, w, numerics="fast"))


def test_few_programs_group_places(x: Tensor, w: Tensor) -> None:
    made = torch_mlc.attribute(attention, x, w, budget=4)
    assert made.programs <= 6 and any(not r.is_one for r in made.rows)
    assert sum(r.share for r in made.rows) == pytest.approx(1.0)
    assert "places together" in str(made)


def test_what_cannot_be_is_said(x: Tensor) -> None:
    with pytest.raises(OptionError, match=r"against='float32' is none of 'eager', 'float64'"):
        torch_mlc.attribute(three_roundings, x, against="float32")
    with pytest.raises(OptionError, match="budget=1 is no number of programs"):
        torch_mlc.attribute(three_roundings, x, budget=1)
    with pytest.raises(OptionError, match=r"'aten.adds' of numerics is for no place.*Did you mean 'aten.add'"):
        torch_mlc.attribute(three_roundings, x, options={"numerics": {"aten.adds": "eager"}})


def test_rewrites_of_the_graph_are_told_by_pass_and_line() -> None:
    torch.manual_seed(0)
    x, a, b = torch.randn(64, 256), torch.randn(256, 8), torch.randn(8, 256)

    def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(x) @ (a @ b)

    made = torch_mlc.attribute(low_rank, x, a, b)
    row = next(r for r in made.rows if r.places == ("pass substitute",))
    assert row.kind == "rewrite of the graph" and any("(a @ b)" in line for line in row.lines)
    assert dict(row.entries) == {"rewrite:substitute": "eager"} and row.share > 0.2
    kept = torch_mlc.attribute(low_rank, x, a, b, options={"numerics": {"rewrite:substitute": "eager"}})
    assert not any("pass substitute" in p for r in kept.rows for p in r.places)


def test_bodies_of_control_flow_have_places(x: Tensor) -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 1e9, lambda x: x.cos(), lambda x: (x * 1.7 + 0.3) * x, (x,))
        return y * 1.3

    made = torch_mlc.attribute(f, x)
    assert made.rest == 0 and made.explained == pytest.approx(1.0)
    assert sum(r.share for r in made.rows) == pytest.approx(1.0)


def test_a_model_that_draws_random_numbers_is_told_so(x: Tensor) -> None:
    made = torch_mlc.attribute(lambda x: F.dropout(x * 1.3 + 0.1, 0.3) * x, x)
    assert made.notes and "random numbers" in str(made)
    assert made.rest == 0 and sum(r.share for r in made.rows) == pytest.approx(1.0)


@pytest.mark.parametrize("dropped", [0.0, 0.25])
def test_an_attention_draws_random_numbers_where_it_drops_some(dropped: float) -> None:
    q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = torch_mlc.attribute(lambda q: F.scaled_dot_product_attention(q, q, q * 1.1, dropout_p=dropped), q, budget=8)
    assert not made.is_zero and bool(made.notes) == bool(dropped)


def test_what_is_compiled_already_is_measured_with_its_options(x: Tensor) -> None:
    def cube(x: Tensor) -> Tensor:
        return x * x * x

    compiled_with = torch.compile(cube, backend="mlc", options={"numerics": "eager"})
    assert torch_mlc.attribute(compiled_with, x).is_zero
    assert not torch_mlc.attribute(compiled_with, x, options={"numerics": "fast"}).is_zero


def test_more_places_are_named_where_few_leave_more_than_was_thought(x: Tensor, w: Tensor) -> None:
    """``numerics()`` names what keeps all but a twentieth, whatever the rows promise in the order of the model."""
    made = torch_mlc.attribute(attention, x, w)
    named = [row.entries for row in made.rows if row.entries]
    assert made.kept is not None and made.kept <= 0.05 and made.named < len(named)
    more = replace(made, least=made.named + 1)
    assert more.named == made.named + 1 and more.numerics().items() > made.numerics().items()
    assert replace(made, least=made.nameable + 5).named == made.nameable == len(named) + len(made.idle)


def recurrent(x: Tensor, w: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(1, 4):
        h = (x[:, t] - h) @ w
    return h


@pytest.mark.parametrize("respects", [True, False], ids=["the pass leaves what is kept", "the pass takes it away"])
def test_what_a_pass_takes_away_is_named(respects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a weight are summed in one product, so that sums with a rounding are not there. To leave out
    that pass makes no difference by itself: a mapping of what made one alone would leave all of it."""
    if not respects:
        monkeypatch.setattr(merge_products, "rounding_kept", lambda options: lambda node: False)
    gen = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 4, 16, generator=gen).bfloat16(), (torch.randn(16, 16, generator=gen) / 4).bfloat16()
    made = torch_mlc.attribute(recurrent, x, w.requires_grad_(), backward=lambda out: out.float().square().sum())
    assert any("add.Tensor (backward)" in p for r in made.rows for p in r.places)
    assert made.rest == 0 and made.kept is not None and made.kept <= 0.05
    assert ("rewrite:merge_products" in made.numerics()) is not respects
    assert ("without a row" in str(made)) is not respects
    assert json.loads(made.to_json())["numerics"] == made.numerics()
    if not respects:
        few = replace(made, least=0)
        assert few.named < made.named <= made.nameable
        assert {**few.numerics(), "rewrite:merge_products": "eager"} == made.numerics()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_d128", "llama", "llama_decode", "bert", "vit", "mixer", "resnet18"])
def test_named_places_explain_models_of_bfloat16(name: str) -> None:
    spec = get_model(name)
    model, inputs = spec.build("tiny").bfloat16().eval(), spec.inputs("tiny", dtype=torch.bfloat16)
    with torch.no_grad():
        made = torch_mlc.attribute(model, *inputs.args)
    assert made.explained >= 0.95 and made.rest == 0 and made.kept is not None and made.kept <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "lstm", "mixer"])
def test_named_places_explain_gradients_of_bfloat16(name: str) -> None:
    spec = get_model(name)
    model, inputs = spec.build("tiny").bfloat16().train(), spec.inputs("tiny", dtype=torch.bfloat16)
    made = torch_mlc.attribute(model, *inputs.args, backward=lambda result: spec.loss(result, inputs))
    assert made.explained >= 0.95 and made.rest == 0 and made.kept is not None and made.kept <= 0.05
