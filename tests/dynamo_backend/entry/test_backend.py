"""torch.compile(backend="mlc") from the outside: equal to eager, static and dynamic, in inference and training."""

import copy
import gc
import inspect
import logging
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.log import KernelFallbackWarning


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    """Norm, activation, matrix products, softmax, and a buffer that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 7)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = F.gelu(self.first(self.norm(x)))
        return F.log_softmax(self.second(h) + h[..., :7].sin(), -1)


def compiled(model: nn.Module, **how: object) -> nn.Module:
    return torch.compile(model, backend="mlc", fullgraph=True, **how)  # type: ignore[return-value,call-overload]


def close(ours: torch.Tensor, eager: torch.Tensor) -> None:
    """Small elements of a sum that large ones cancel in are no nearer than those are."""
    scale = max(1.0, eager.abs().max().item()) if eager.numel() else 1.0
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_trains_as_in_eager(dynamic: bool) -> None:
    eager = Mlp()
    ours = copy.deepcopy(eager)
    run = compiled(ours, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 24)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        close(run(a), eager(b))
        run(a).square().sum().backward()
        eager(b).square().sum().backward()
        close(a.grad, b.grad)
    for p, q in zip(ours.parameters(), eager.parameters()):
        close(p.grad, q.grad)
    assert ours.calls == eager.calls == 4


def test_inference_matches_eager_and_leaves_inputs_alone() -> None:
    model, x = Mlp().eval(), torch.randn(4, 24)
    before = x.clone()
    with torch.no_grad():
        close(compiled(copy.deepcopy(model))(x), model(x))
    assert torch.equal(x, before)


def test_one_graph_serves_every_size_as_in_aot_eager() -> None:
    sizes, model = (2, 3, 8, 17), Mlp().eval()
    graphs = {}
    for backend in ("mlc", "aot_eager"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        run = torch.compile(model, backend=counter, dynamic=True)
        with torch.no_grad():
            for n in sizes:
                close(run(torch.randn(n, 24) * 0 + n), model(torch.zeros(n, 24) + n))
        graphs[backend] = counter.frame_count
    assert graphs["mlc"] == graphs["aot_eager"], graphs
    assert graphs["mlc"] < len(sizes)


def test_views_of_views_and_outputs_that_alias() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.transpose(0, 1)[1:].relu()
        return y, y.reshape(-1)[::2], x, x[0], (y.t() + 1).unsqueeze(0).expand(3, -1, -1)

    x = torch.randn(6, 5)
    for ours, eager in zip(torch.compile(f, backend="mlc", fullgraph=True)(x), f(x)):
        close(ours, eager)
        assert ours.stride() == eager.stride()


def test_a_size_as_output_and_in_arithmetic() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x / x.shape[0] + x.shape[1] ** 2, x.shape[0] * 2

    run = torch.compile(f, backend="mlc", fullgraph=True, dynamic=True)
    for shape in ((3, 4), (9, 2)):
        x = torch.randn(shape)
        (ours, size), (eager, known) = run(x), f(x)
        close(ours, eager)
        assert size == known


def test_a_size_decided_by_data() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        kept = x.nonzero().squeeze(1)
        return (kept * 2 + 1).float().exp2()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0])
        close(torch.compile(f, backend="mlc", fullgraph=True)(x), f(x))


def test_constants_of_the_module(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([2, 0, 2])] * torch.tensor(3.5)

    x = torch.randn(3, 4)
    for again in (False, True):  # the second time the program comes from the cache
        torch._dynamo.reset()
        before = counters.snapshot()
        run = torch.compile(f, backend="mlc", fullgraph=True, options={"cache_dir": str(tmp_path)})
        close(run(x), f(x))
        assert ("graph_cache_hits" in counters.since(before)) == again


def test_empty_tensors() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp() + 1, x.sum(0)

    x = torch.empty(0, 5)
    for ours, eager in zip(torch.compile(f, backend="mlc", fullgraph=True)(x), f(x)):
        close(ours, eager)


def test_random_numbers_follow_the_seed_and_forward_agrees_with_backward() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, training=True)

    run = torch.compile(f, backend="mlc", fullgraph=True)
    x = torch.ones(4000, requires_grad=True)
    torch.manual_seed(7)
    first = run(x)
    first.sum().backward()
    torch.manual_seed(7)
    second = run(x.detach())
    assert torch.equal(first > 0, second > 0)
    assert torch.equal(first.detach(), x.grad)
    assert 0.4 < (first > 0).float().mean() < 0.6
    assert not torch.equal(run(x), first)


def test_eager_random_numbers_on_request() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) + x

    x = torch.zeros(100)
    torch.manual_seed(3)
    ours = torch.compile(f, backend="mlc", options={"fallback_random": True})(x)
    torch.manual_seed(3)
    assert torch.equal(ours, f(x))


def test_inputs_of_the_graph_die_when_they_are_last_read() -> None:
    from torch_mlc.dynamo_backend.entry.capture import capture
    from torch_mlc.dynamo_backend.entry.compile import compile_graph
    from torch_mlc.runtime.settings.options import Options

    (gm,) = capture(lambda x, w: ((x + 1).exp() @ w).sin(), [torch.randn(40, 40), torch.randn(40, 40)])
    seen: list[bool] = []
    graph = compile_graph(gm, (), options=Options.resolve(None, {"host_program": "python"}, {}), fresh=True)
    assert graph.call is not None
    x, w = torch.randn(40, 40), torch.randn(40, 40)
    died = weakref.ref(x)
    scope = inspect.getclosurevars(graph.call).nonlocals["run"].__globals__
    mm = scope["aten_mm_default_"]
    scope["aten_mm_default_"] = lambda *a: (gc.collect(), seen.append(died() is None), mm(*a))[-1]
    args = [x, w]
    del x
    graph.call(args)
    assert args == [] and seen == [True]


@pytest.mark.parametrize("where", ["tracing", "compiling"])
def test_a_model_that_does_not_compile_dies(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it was called with, however far its graph came."""
    from torch_mlc.dynamo_backend.compiling import plans

    def refuse(*_: object, **__: object) -> object:
        raise ValueError("on purpose")

    # pytest keeps what is logged, and with it the frames of an error.
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    if where == "compiling":
        monkeypatch.setattr(plans, "import_graph", refuse)

    def attempt() -> list[weakref.ref[Any]]:
        model, x = nn.Linear(7, 5), torch.randn(3, 7)
        shape = (4, 4) if where == "tracing" else (5, 4)
        f = torch.compile(lambda x: model(x).mm(torch.ones(shape)), backend="mlc", options={"cache": False})
        with pytest.raises(Exception, match="reduction dim" if where == "tracing" else "on purpose"):
            f(x)
        return [weakref.ref(model), weakref.ref(model.weight), weakref.ref(x)]

    left = attempt()
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in left] == [None, None, None]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"options": {"tunee": True}}, "Did you mean 'tune'"),
        ({"options": {"numerics": "eagr"}}, "Did you mean 'eager'"),
        ({"mode": "max-autotun"}, "max-autotune"),
    ],
)
def test_a_wrong_setting_names_the_nearest_right_one(how: dict[str, object], wanted: str) -> None:
    with pytest.raises((BackendCompilerFailed, RuntimeError), match=wanted):
        torch.compile(torch.sin, backend="mlc", **how)(torch.ones(2))  # type: ignore[call-overload]


def test_an_index_error_inside_does_not_escape_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_mlc.dynamo_backend.compiling import plans as path

    def broken(*_: object, **__: object) -> None:
        raise IndexError("of our own")

    monkeypatch.setattr(path, "import_graph", broken)
    with pytest.raises(BackendCompilerFailed, match="of our own"):
        torch.compile(lambda x: x.sin() + 41, backend="mlc")(torch.ones(2))


def failing(nest: object, target: object) -> None:
    raise ValueError("no code for this")


def test_a_kernel_that_does_not_compile_is_an_error_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "emit", failing)
    with pytest.raises(BackendCompilerFailed, match=r"aten\.sin.*no code for this"):
        torch.compile(lambda x: x.sin() + 42, backend="mlc")(torch.ones(2))


def test_a_kernel_that_does_not_compile_runs_as_its_aten_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "emit", failing)
    model = Mlp()
    eager = copy.deepcopy(model)
    run = compiled(model, options={"strict": False, "cache": False}, dynamic=True)
    before = counters.snapshot()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.randn(3, 24)
        close(run(x), eager(x))
        run(x).sum().backward()
    eager(x).sum().backward()
    for p, q in zip(model.parameters(), eager.parameters()):
        close(p.grad, q.grad)
    told = [str(w.message) for w in caught if issubclass(w.category, KernelFallbackWarning)]
    added = counters.since(before)
    assert added["kernel_fallbacks"] == len(told) > 2 and "kernels_generated" not in added
    assert any("aten.native_layer_norm" in t and "no code for this" in t and "h = F.gelu" in t for t in told)


def test_a_kernel_of_which_the_machine_code_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    make = kernels.compile_source

    def choosy(source: KernelSource, *rest: Any) -> Any:
        if "sin" in source.name:
            raise ValueError("no machine code")
        return make(source, *rest)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x.exp() @ w).sin() @ w).exp() * 7

    monkeypatch.setattr(kernels, "compile_source", choosy)
    given, before = (torch.rand(5, 4), torch.rand(4, 4)), counters.snapshot()
    with pytest.warns(KernelFallbackWarning, match=r"aten\.sin.*no machine code"):
        result = torch.compile(f, backend="mlc", options={"strict": False, "cache": False})(*given)
    close(result, f(*given))
    added = counters.since(before)
    assert (added["kernel_fallbacks"], added["kernels_generated"]) == (1, 2)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_search_for_garbage_goes_on_as_before(enabled: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 44

    (gc.enable if enabled else gc.disable)()
    try:
        torch.compile(f, backend="mlc", options={"cache": False})(torch.ones(3))
        assert gc.isenabled() is enabled
        with pytest.raises(BackendCompilerFailed):
            torch.compile(f, backend="mlc", options={"no such": 1})(torch.ones(4))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_reset_forgets_what_was_compiled() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 43

    for _ in range(2):
        before = counters.snapshot()
        torch.compile(f, backend="mlc", options={"cache": False})(torch.ones(3))
        assert counters.since(before)["kernels_generated"] == 1
        torch._dynamo.reset()


def test_the_logger_of_the_backend_has_its_module_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="torch_mlc"):
        torch.compile(lambda x: x.tan() + 44, backend="mlc")(torch.ones(3))
    assert any(
        r.name == "torch_mlc.dynamo_backend.entry.compile" and "def call(args)" in r.getMessage()
        for r in caplog.records
    )
