"""What explain shows is what runs, text for text; and explaining changes nothing: neither tensors, nor random states,
nor what torch.compile has made."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import pgo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import torch_mlc
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.compiling.compiled import CompiledGraph
from torch_mlc.dynamo_backend.entry import backend
from torch_mlc.runtime.settings.options import OptionError


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, steps, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Language(nn.Module):
    """Layers that repeat, with a loss, between which calls are counted."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(layers))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(F.layer_norm(x, (8,)))
        logits = x @ self.table.weight.t()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Broken(nn.Module):
    """A model of two graphs, the second of which writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("largest", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        torch._dynamo.graph_break()
        self.largest.copy_(torch.maximum(self.largest, y.detach().amax(0)))
        return self.second(y) * self.largest


def written(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x.mul_(scale)
    return x[1:].softmax(-1) + scale.cumsum(-1)


def drawn(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x @ x.t(), 0.3) + torch.rand_like(x @ x.t())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.LogSoftmax(-1),
    )  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 6))


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    args: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], dict[str, Any]] = dict
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None


def points(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(shape),)


CASES = {
    "perceptron": Case(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)), points(4, 8)),
    "batch norm": Case(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()), points(4, 8)),
    "convolutions": Case(convolutions, points(2, 3, 8, 8)),
    "one block": Case(lambda: Block(16, 2), points(2, 5, 16)),
    "layers that repeat": Case(lambda: Language(8), lambda: (tokens(),), lambda: {"targets": tokens()}),
    "dynamic": Case(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)), points(4, 8), dynamic=True),
    "eager's rounding": Case(lambda: nn.LayerNorm(16).bfloat16(), lambda: (torch.randn(4, 16).bfloat16().exp(),),
                             options={"numerics": "eager"}),
    "graph break": Case(Broken, points(4, 8)),
    "written argument": Case(lambda: written, lambda: (torch.randn(5, 7), torch.randn(7))),
    "random numbers": Case(lambda: drawn, points(6, 6)),
    "recurrent": Case(lambda: nn.GRUCell(6, 6), lambda: (torch.randn(3, 6), torch.randn(3, 6))),
    "gather and scatter": Case(
        lambda: lambda x, at: torch.zeros(9, 4).index_add(0, at, x) + x.sort(0).values[at].sum(),
        lambda: (torch.randn(5, 4), torch.arange(5) % 3),
    ),
    "nested arguments": Case(lambda: lambda pair, *, k: (pair["a"] * k[0]).sum(0) - k[1],
                             lambda: ({"a": torch.randn(4, 3)},), lambda: {"k": [torch.randn(3), 2.5]}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclass
class Seen:
    """What the backend compiled: the text of each graph, without its name, how many kernels it runs, and the sources
    of the kernels."""

    programs: list[str] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    launches: list[int] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What torch.compile makes from here on."""
    found = Seen()
    compile_graph, emit = backend.compile_graph, kernels.emit

    def compile(*args: Any, **kwargs: Any) -> CompiledGraph:
        compiled = compile_graph(*args, **kwargs)
        if not kwargs.get("fresh"):
            found.programs.append(nameless(compiled.text.text))
            found.launches.append(compiled.kept.record["launches"] if compiled.kept is not None else -1)
        return compiled

    @wraps(emit)
    def emitted(*args: Any) -> KernelSource:
        source = emit(*args)
        found.sources.add(source.text)
        return source

    monkeypatch.setattr(backend, "compile_graph", compile)
    monkeypatch.setattr(kernels, "emit", emitted)
    return found


def nameless(program: str) -> str:
    """A host program without its first line, which has the number that torch gave to the graph."""
    return program.split("\n", 1)[1]


def unnamed(source: str) -> str:
    """A kernel's source without what it is called."""
    return re.sub(r"fused_\w+", "fused", source)


def tensors_of(*things: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for thing in things:
        module = [*thing.parameters(), *thing.buffers()] if isinstance(thing, nn.Module) else [thing]
        found += [t for t in torch.utils._pytree.tree_leaves(module) if isinstance(t, torch.Tensor)]
    return found


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def loss_of(result: Any) -> torch.Tensor:
    results = [t for t in torch.utils._pytree.tree_leaves(result) if t.requires_grad]
    return torch.stack([t.float().sum() for t in results]).sum()


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_what_explain_shows_is_what_runs(name: str, training: bool, seen: Seen) -> None:
    case = CASES[name]
    model, args, kwargs = case.make(), case.args(), case.kwargs()
    if isinstance(model, nn.Module):
        model.train(training)
    elif training and name != "written argument":
        args[0]["a"].requires_grad_() if isinstance(args[0], dict) else args[0].requires_grad_()
    tensors = tensors_of(model, args, kwargs)
    before, versions, states = copy.deepcopy(tensors), [t._version for t in tensors], random_states()

    report = torch_mlc.explain(
        model, *args, kwargs=kwargs, options=case.options, dynamic=case.dynamic, training=training
    )
    assert random_states() == states
    assert [t._version for t in tensors] == versions and all(t.grad is None for t in tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert not seen.programs and not report.fallbacks
    explained = Seen(
        [nameless(g.program) for g in report.graphs],
        {k.source for k in report.kernels},
        [g.launches for g in report.graphs],
    )
    for graph in report.graphs:
        done = [s.name for s in graph.steps]
        order = ["import_graph", "partition", "lower_stages", "schedule", "emit", "build_host_program", "host_code"]
        assert [n for n in dict.fromkeys(done) if n in order] == order
        assert all(n in graph.record for n in order) and "eliminate_common" in done
    seen.sources.clear()

    with torch.set_grad_enabled(training):
        result = torch.compile(model, backend="mlc", options=case.options, dynamic=case.dynamic)(*args, **kwargs)
        if training and any(t.requires_grad for t in tensors):
            loss_of(result).backward()
    assert explained.programs == seen.programs and seen.programs
    assert explained.launches == seen.launches
    # Equal kernels of several graphs are compiled once, under the name of the first.
    assert explained.sources >= seen.sources and seen.sources
    assert set(map(unnamed, explained.sources)) == set(map(unnamed, seen.sources))
    assert len(report.breaks) == (1 if name == "graph break" else 0)


def test_a_compiled_model_is_explained_as_it_was_compiled_and_stays_so() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    count = CompileCounterWithBackend("mlc")
    compiled = torch.compile(model, backend=count)
    x = torch.randn(4, 8)
    compiled(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    sizes = copy.deepcopy(pgo._CODE_STATE)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):  # more than Dynamo compiles of one function then
            assert torch_mlc.explain(compiled, torch.randn(6, 8), training=True).kernels
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert sizes == pgo._CODE_STATE
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x)
    assert count.frame_count == 1
    compiled(torch.randn(7, 8))  # the second size that is seen, not the fourteenth: it varies from here on
    compiled(torch.randn(9, 8))
    assert count.frame_count == 2


def test_of_what_dynamo_keeps_nothing_is_of_the_explanation() -> None:
    def entries() -> list[bool]:
        return [e.code is not None for e in _debug_get_cache_entry_list(halves.__code__)]

    torch_mlc.explain(halves, torch.randn(4, 8))
    assert entries() == []
    compiled = torch.compile(halves, backend="mlc")
    compiled(torch.randn(4, 8))
    assert entries() == [True]
    torch_mlc.explain(halves, torch.randn(4, 8))
    torch_mlc.explain(compiled, torch.randn(5, 8))
    assert sum(entries()) == 1


def halves(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).softmax(-1)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halves(x)


OPTIONS = {"numerics": "eager"}


@pytest.mark.parametrize("how", ["function", "module", "in place", "decorator"])
def test_what_was_compiled_is_explained_with_its_own_options(how: str) -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    model = Halves()
    compiled: Any
    match how:
        case "function":
            compiled, plain = torch.compile(halves, backend="mlc", options=OPTIONS), halves
        case "decorator":
            plain = halves
            compiled = torch.compile(backend="mlc", options=OPTIONS)(halves)
        case "module":
            compiled, plain = torch.compile(model, backend="mlc", options=OPTIONS), model
        case _:
            plain = copy.deepcopy(model)
            model.compile(backend="mlc", options=OPTIONS)
            compiled = model
    (own,) = torch_mlc.explain(compiled, x).kernels
    (wanted,) = torch_mlc.explain(plain, x, options=OPTIONS).kernels
    (fast,) = torch_mlc.explain(plain, x).kernels
    assert own.source == wanted.source != fast.source
    assert torch_mlc.explain(compiled, x, options={"numerics": "fast"}).kernels[0].source == fast.source


def test_what_another_backend_compiled_is_explained_by_default_settings() -> None:
    compiled = torch.compile(halves, backend="inductor", options={"max_autotune": True})
    assert torch_mlc.explain(compiled, torch.randn(4, 8)).kernels


def test_modes_are_those_of_torch_compile() -> None:
    with pytest.raises(OptionError, match=r"no mode 'max-autotun'\. Did you mean 'max-autotune'"):
        torch_mlc.explain(halves, torch.randn(4), mode="max-autotun")
    with pytest.raises(OptionError, match="mode or options"):
        torch_mlc.explain(halves, torch.randn(4), mode="max-autotune", options={"tune": 1})
    assert torch_mlc.explain(halves, torch.randn(4), mode="reduce-overhead").kernels


def test_tuning_is_done_where_it_is_asked_for() -> None:
    report = torch_mlc.explain(halves, torch.randn(64, 96), options={"tune": 1, "tune_budget": "200ms"})
    assert report.graphs[0].times["tune"] > 0
    assert "tune" not in torch_mlc.explain(halves, torch.randn(64, 96)).graphs[0].times


def test_a_graph_break_is_told_with_its_reason_and_line() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    report = torch_mlc.explain(asks, torch.ones(3))
    (only,) = report.breaks
    assert "return x.sin() if x.sum() > 0 else x.cos()" in only.line and __file__ in only.line
    assert "graph break: " in str(report) and len(report.graphs) == 2


def test_tensors_that_only_graphs_write_to_are_put_back() -> None:
    """Neither buffers nor arguments: what a function finds around it."""
    total, weight = torch.zeros(4), nn.Parameter(torch.ones(4))
    momentum = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        momentum.step()
        return total * 2

    torch_mlc.explain(step, torch.ones(4))
    assert torch.equal(total, torch.zeros(4)) and torch.equal(weight, torch.ones(4))
    assert torch.equal(weight.grad, torch.ones(4))


def test_a_parameter_that_code_between_graphs_writes_to_is_named() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        @torch.compiler.disable
        def shrink(self) -> None:
            with torch.no_grad():
                self.weight.mul_(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            self.shrink()
            return y * self.weight

    with pytest.warns(UserWarning, match="weight: these parameters are changed"):
        torch_mlc.explain(Written(), torch.ones(3))


def test_graphs_that_the_caller_has_open_can_still_be_differentiated() -> None:
    norm = nn.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    y = x.exp()
    open_one = (y * norm.running_mean.clone() + norm(y)).sum()
    torch_mlc.explain(norm, y, training=True)
    open_one.backward()
    assert x.grad is not None and norm.weight.grad is not None
