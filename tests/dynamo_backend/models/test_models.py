"""Every benchmark model through torch.compile(backend="mlc") against float64, static and dynamic.

A model is judged as the benchmarks judge it: at most twice eager's own error in the same dtype, plus a floor of a few
ulp (``benchmarks.accuracy`` says why, and how a gradient that is zero in exact arithmetic is measured). What runs by
default has each model in float32 training, but for two that are much like another one, and some in bfloat16 and at
three sizes with one compilation; the other combinations are marked slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.accuracy import judge
from benchmarks.models.registry import MODELS
from benchmarks.models.spec import Inputs, ModelSpec
from benchmarks.peers import Peer
from benchmarks.run_models import INFERENCE, TRAINING, Runner, infer, reference_of, trainer
from benchmarks.schema import PeerResult
from torch_mlc.dynamo_backend.entry import backend
from torch_mlc.runtime.counters import counters

# What a compiled model may leave to a library.
ALLOWED = {
    *("mm.default", "addmm.default", "bmm.default", "baddbmm.default"),
    *("convolution.default", "convolution_backward.default", "embedding_dense_backward.default"),
    *(
        f"_scaled_dot_product_{kind}.default"
        for kind in ("flash_attention_for_cpu", "flash_attention_for_cpu_backward", "fused_attention_overrideable")
    ),
}
SEEDS = "mlc::seeds"

# Small models that have between them attention, convolution, both norms, embedding, a scan and sizes in two dimensions.
QUICK_DYNAMIC_TRAINING = ("dlrm",)
# As resnet18 and gpt2_d128 are.
ALIKE = ("resnet50", "gpt2_d768")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def library_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every library op of the graphs that are compiled from now on."""
    calls: Counter[str] = Counter()
    compile_graph = backend.compile_graph

    def recorded(*args: Any, **settings: Any) -> Any:
        compiled = compile_graph(*args, **settings)
        calls.update(compiled.text.called.values())
        return compiled

    monkeypatch.setattr(backend, "compile_graph", recorded)
    return calls


def check(name: str, mode: str, dtype: torch.dtype, calls: Counter[str], dynamic: bool = False) -> None:
    """Compile one model once, run it at its sizes, and compare output, loss, gradients and buffers with float64."""
    spec = MODELS[name]
    model = spec.build("tiny").to(dtype)
    before, frames = counters.snapshot(), CompileCounterWithBackend("mlc")
    ours = Runner(Peer("eager"), spec, model, spec.inputs("tiny"), mode, dynamic)
    ours.function = compiled(mode, spec, frames, dynamic)
    for dims in spec.variants if dynamic else ({},):
        inputs = spec.inputs("tiny", dtype=dtype, **dims)
        exact = reference_of(spec, model, inputs, mode)
        eager = Runner(Peer("eager"), spec, model, inputs, mode, False).first(PeerResult())
        values = rewound(ours, model, inputs).first(PeerResult())
        accuracy = judge(values, eager, exact, dtype)
        assert accuracy.ok, (dims, accuracy)
    unexpected = {op for op in calls if op != SEEDS and op.removeprefix("aten::") not in ALLOWED}
    assert not unexpected, unexpected
    assert counters.since(before).get("kernel_fallbacks", 0) == 0
    if dynamic:
        assert frames.frame_count == frames_of_tracing(spec, mode, dtype)


def compiled(mode: str, spec: ModelSpec, backend: CompileCounterWithBackend, dynamic: bool) -> Callable[..., Any]:
    return torch.compile(
        infer if mode == INFERENCE else trainer(spec), backend=backend, dynamic=dynamic, fullgraph=True
    )


def rewound(runner: Runner, model: nn.Module, inputs: Inputs) -> Runner:
    """The runner before its first step, with other inputs: running statistics as they were, no gradients."""
    runner.model.load_state_dict(model.state_dict())
    runner.model.zero_grad(set_to_none=True)
    runner.inputs = inputs
    return runner


def frames_of_tracing(spec: ModelSpec, mode: str, dtype: torch.dtype) -> int:
    """How many graphs TorchDynamo makes of all sizes when the backend only traces."""
    torch._dynamo.reset()
    frames = CompileCounterWithBackend("aot_eager")
    model = spec.build("tiny").to(dtype).train(mode == TRAINING)
    run = compiled(mode, spec, frames, dynamic=True)
    for dims in spec.variants:
        with torch.set_grad_enabled(mode == TRAINING):
            run(model, spec.inputs("tiny", dtype=dtype, **dims))
    return frames.frame_count


def names(*default: str, training: bool = False, rare: Sequence[str] = ()) -> list[Any]:
    """Every model (that trains) as a parameter, slow unless named (all but the rare ones are quick if none is)."""
    return [
        pytest.param(n, marks=[pytest.mark.slow] if n in rare or (default and n not in default) else [])
        for n, spec in MODELS.items()
        if spec.trains or not training
    ]


@pytest.mark.parametrize("name", names(training=True, rare=ALIKE))
def test_training_in_float32(name: str, library_calls: Counter[str]) -> None:
    check(name, TRAINING, torch.float32, library_calls)


@pytest.mark.parametrize("name", names("gpt2_d128", "gpt2_d128_decode", "mixer", "dlrm"))
def test_inference_in_bfloat16_at_three_sizes(name: str, library_calls: Counter[str]) -> None:
    check(name, INFERENCE, torch.bfloat16, library_calls, dynamic=True)


@pytest.mark.parametrize("name", names(*QUICK_DYNAMIC_TRAINING, training=True))
def test_training_in_float32_at_three_sizes(name: str, library_calls: Counter[str]) -> None:
    check(name, TRAINING, torch.float32, library_calls, dynamic=True)


@pytest.mark.parametrize("name", names("gpt2_d128", "mixer", "dlrm", training=True))
def test_training_in_bfloat16(name: str, library_calls: Counter[str]) -> None:
    check(name, TRAINING, torch.bfloat16, library_calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(training=True))
def test_training_in_bfloat16_at_three_sizes(name: str, library_calls: Counter[str]) -> None:
    check(name, TRAINING, torch.bfloat16, library_calls, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", names())
def test_inference(name: str, dtype: torch.dtype, library_calls: Counter[str]) -> None:
    check(name, INFERENCE, dtype, library_calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_inference_in_float32_at_three_sizes(name: str, library_calls: Counter[str]) -> None:
    check(name, INFERENCE, torch.float32, library_calls, dynamic=True)
