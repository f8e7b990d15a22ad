"""Every benchmark model imports, with no library calls but those that are meant, and the graphs say what eager says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from benchmarks.models.registry import MODELS
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device, retarget
from torch_mlc.ir.graph.graph import Graph, Input, Library

MEANT = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "embedding_dense_backward",
         "copy_")  # fmt: skip


def unexpected(graph: Graph) -> set[str]:
    """Library calls that are no matrix product, convolution, attention or embedding backward, and write no argument."""
    ops = {n.target for n in graph.nodes if isinstance(n, Library)}
    names = {op: op.removeprefix("aten::").removesuffix(".default") for op in ops}
    return {op for op, name in names.items() if name not in MEANT and "_scaled_dot_product_" not in name}


def graphs_of(name: str, *, training: bool, dynamic: bool) -> list[fx.GraphModule]:
    spec = MODELS[name]
    model, inputs = spec.build("tiny"), spec.inputs("tiny")
    if not training:
        return capture(model.eval(), inputs.args, dynamic=dynamic)

    def step(batch: Any) -> torch.Tensor:
        return spec.loss(model(*batch.args), batch)

    return capture(step, (inputs,), training=True, dynamic=dynamic)


def kinds() -> Iterator[Any]:
    """Every model in inference; in training those that are traced in a moment."""
    for name, spec in MODELS.items():
        yield pytest.param(name, False, id=f"{name}-inference")
        if not spec.trains:
            continue
        slow = [] if name in ("gpt2_d128", "dlrm", "mixer", "lstm") else [pytest.mark.slow]
        yield pytest.param(name, True, id=f"{name}-training", marks=slow)


@pytest.mark.parametrize(("name", "training"), list(kinds()))
def test_library_calls_are_meant(name: str, training: bool) -> None:
    graphs = graphs_of(name, training=training, dynamic=False)
    assert len(graphs) == (2 if training else 1)
    for gm in graphs:
        assert unexpected(import_graph(gm)) == set()


@pytest.mark.parametrize("name", ["lstm", pytest.param("resnet18", marks=[pytest.mark.slow])])
def test_with_symbolic_sizes(name: str) -> None:
    for gm in graphs_of(name, training=True, dynamic=True):
        graph = import_graph(gm)
        assert unexpected(graph) == set()
        assert graph.symbols.sizes and all(s.hint is not None for s in graph.symbols.sizes)


@pytest.mark.parametrize("name", ["gpt2_d128", "resnet18", "unet", "dlrm"])
def test_inference_equals_eager(name: str, reference: Any) -> None:
    spec = MODELS[name]
    model, inputs = spec.build("tiny").eval(), spec.inputs("tiny")
    (gm,) = capture(model, inputs.args)
    kinds = [i for i in import_graph(gm).inputs if isinstance(i, Input)]
    args = arguments(gm, inputs.args)
    assert len(kinds) == len(args)
    with torch.no_grad():
        results, wanted = reference.run_fast(import_graph(gm), args), gm(*args)
    for result, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def arguments(gm: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Tensors for the placeholders: random ones of the right shape, and the model's own integer inputs."""
    generator = torch.Generator().manual_seed(0)
    whole = iter([t for t in inputs if not t.is_floating_point()])
    args = []
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            v = n.meta["val"]
            given = torch.rand(v.shape, generator=generator) * 0.1 + 0.05 if v.is_floating_point() else next(whole)
            args.append(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(given))
    return args


def test_fake_cuda_inference() -> None:
    spec = MODELS["gpt2_d128"]
    model, inputs = on_fake_device(spec.build("tiny").eval(), spec.inputs("tiny").args, "cuda")
    (gm,) = capture(model, inputs)
    graph = import_graph(gm)
    assert {i.type.device for i in graph.inputs if isinstance(i, Input)} == {"cuda:0"}
    assert unexpected(graph) == set()


def test_retargeted_training_graphs() -> None:
    graphs = graphs_of("mixer", training=True, dynamic=False)
    retarget(graphs, "cuda")
    for gm in graphs:
        kinds = import_graph(gm).types().values()
        assert {t.device for t in kinds} == {"cuda:0"}


def test_an_op_without_converter_is_a_library_call(trace: Callable[..., fx.GraphModule]) -> None:
    x = torch.randn(600, 600)  # shorter rows are ordered by a kernel
    graph = import_graph(trace(lambda x: x.median(1)[0].sort(0)[0] + 1, (x,)), (x,))
    calls = [n for n in graph.nodes if isinstance(n, Library)]
    assert [n.target for n in calls] == ["aten::median.dim", "aten::sort.default"]
    assert [n.reason for n in calls] == ["sort", "sort"]


def test_complex_functions_stay_with_the_library(trace: Callable[..., fx.GraphModule]) -> None:
    """All but arithmetic and a few more, which are written as that of their parts before a graph is imported."""
    x = torch.randn(4, dtype=torch.complex64)
    graph = import_graph(trace(lambda x: x.sqrt().tanh(), (x,)), (x,))
    assert [n.reason for n in graph.nodes if isinstance(n, Library)] == ["complex numbers"] * 2


def test_origins_name_the_line_of_the_model() -> None:
    (gm,) = graphs_of("gpt2_d128", training=False, dynamic=False)
    sources = {o.source for n in import_graph(gm).nodes for o in n.origins}
    assert any(s.startswith("gpt.py:") and " in forward: " in s for s in sources)
