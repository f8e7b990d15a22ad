"""Every model: builds, equals itself in float64, and takes every dynamic size it names."""

import pytest
import torch

from benchmarks.accuracy import normalised_errors
from benchmarks.models.registry import MODELS, get_model
from benchmarks.models.spec import SIZES
from benchmarks.peers import Peer
from benchmarks.run_models import INFERENCE, MODES, TRAINING, Runner, meant, reference_of
from benchmarks.schema import PeerResult

NAMES = list(MODELS)
TRAINED = [name for name, spec in MODELS.items() if spec.trains]


@pytest.mark.parametrize("name", TRAINED)
def test_training_step_equals_float64(name: str) -> None:
    spec = MODELS[name]
    model, inputs = spec.build("tiny"), spec.inputs("tiny")
    values = Runner(Peer("eager"), spec, model, inputs, TRAINING, False).first(PeerResult())
    expected = reference_of(spec, model, inputs, TRAINING)
    assert {f"grad {n}" for n, _ in model.named_parameters()} <= values.keys()
    assert expected["output"].dtype == torch.float64
    errors = normalised_errors(values, expected)
    assert max(errors.values()) < 1e-3, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", NAMES)
def test_variants_are_three_and_each_has_a_finite_loss(name: str) -> None:
    spec = MODELS[name]
    model = spec.build("tiny")
    assert len(spec.variants) == 3
    shapes = set()
    for dims in spec.variants:
        inputs = spec.inputs("tiny", **dims)
        for dim in spec.dynamic:
            assert inputs.args[dim.arg].shape[dim.dim] == dims[dim.name]
        assert torch.isfinite(spec.loss(model(*inputs.args), inputs))
        shapes.add(tuple(a.shape for a in inputs.args))
    assert len(shapes) == 3


def test_what_a_step_of_generation_writes_is_compared() -> None:
    spec = MODELS["gpt2_d128_decode"]
    model, inputs = spec.build("tiny"), spec.inputs("tiny")
    given = [a.clone() for a in inputs.args]
    values = Runner(Peer("eager"), spec, model, inputs, INFERENCE, False).first(PeerResult())
    expected = reference_of(spec, model, inputs, INFERENCE)
    assert {f"argument {k}" for k in range(2, 6)} | {"output"} == values.keys() == expected.keys()
    assert max(normalised_errors(values, expected).values()) < 1e-5
    at = int(inputs.args[1])
    for k in range(2, 6):
        assert not torch.equal(values[f"argument {k}"][:, :, at], given[k][:, :, at])
        assert torch.equal(inputs.args[k], given[k])  # the caller's own are as they were
    assert meant(spec, MODES) == [INFERENCE] and meant(MODELS["lstm"], MODES) == list(MODES)


@pytest.mark.parametrize("name", ["gpt2_d128", "gpt2_d128_decode", "lstm"])
def test_one_graph_serves_every_dynamic_size(name: str) -> None:
    spec = MODELS[name]
    model = spec.build("tiny")
    graphs = []

    def backend(gm: torch.fx.GraphModule, _: list[object]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    compiled = torch.compile(lambda m, i: m(*i.args), backend=backend, dynamic=True, fullgraph=True)
    for dims in spec.variants:
        inputs = spec.inputs("tiny", **dims)
        torch.testing.assert_close(compiled(model, inputs), model(*inputs.args))
    assert len(graphs) == 1


def test_same_seed_gives_the_same_model_and_batch() -> None:
    spec = MODELS["bert"]
    for a, b in zip(spec.build("tiny").parameters(), spec.build("tiny").parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(spec.inputs("tiny", seed=3).args[0], spec.inputs("tiny", seed=3).args[0])
    assert not torch.equal(spec.inputs("tiny", seed=3).args[0], spec.inputs("tiny", seed=4).args[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_size_has_a_configuration_and_dims(name: str) -> None:
    assert set(MODELS[name].configs) == set(MODELS[name].dims) == set(SIZES)


def test_wrong_names_are_refused_with_the_right_ones() -> None:
    with pytest.raises(ValueError, match="did you mean 'resnet18'"):
        get_model("resnet19")
    with pytest.raises(ValueError, match=r"no such dimension \['sequence'\].*'seq'"):
        MODELS["bert"].inputs("tiny", sequence=4)
    with pytest.raises(ValueError, match=r"no such field \['depth'\]"):
        MODELS["bert"].build("tiny", depth=4)


def test_layers_can_be_overridden() -> None:
    assert len(MODELS["gpt2_d128"].build("tiny", layers=5).blocks) == 5
