"""Products of a library with the kernels around them, block by block of rows."""

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torch_mlc
from torch_mlc.runtime.targets import cpu_target

Tensors = tuple[torch.Tensor, ...]
cost_module = importlib.import_module("torch_mlc.scheduler.cost.products.contraction_cpu")
pass_module = importlib.import_module("torch_mlc.scheduler.calls.block_rows")

pytestmark = pytest.mark.skipif(not cpu_target().gemm, reason="torch's BLAS may not be called by threads of a team")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups run in blocks whatever that costs, and larger groups sooner."""
    torch._dynamo.reset()
    gained = iter(range(1, 1 << 20))
    monkeypatch.setattr(pass_module, "gain_of_blocks", lambda *a: float(next(gained)))
    monkeypatch.setattr(cost_module, "_small_times", lambda *a: None)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def layer_norm(x, w, b, residual):
    return F.layer_norm(F.linear(x, w, b) + residual, (w.shape[0],))


def mlp(x, w, b, v):
    return F.gelu(F.linear(x, w, b)) @ v


def gated(x, w, v, z):
    return (F.silu(x @ w) * (x @ v)) @ z


def prologue(x, w, v):
    return torch.relu(F.rms_norm(x, (x.shape[-1],)) @ w) @ v


def entropies(x, w, target):
    return F.cross_entropy(x @ w, target, reduction="none")


def batched(x, w, b):
    return x + F.gelu(F.linear(x, w, b))


def kept(x, w, v):
    hidden = x @ w
    return hidden, torch.softmax(hidden, -1), torch.tanh(hidden) @ v


def positions(x, w):
    return x @ w + torch.arange(x.shape[0])[:, None]


CASES: dict[str, tuple[Callable[..., object], Callable[[int], Tensors]]] = {
    "layer_norm": (layer_norm, lambda n: (rand(n, 37), rand(50, 37), rand(50), rand(n, 50))),
    "mlp": (mlp, lambda n: (rand(n, 24), rand(70, 24), rand(70), rand(70, 33))),
    "turned": (mlp, lambda n: (rand(24, n).t(), rand(24, 70).t(), rand(70), rand(33, 70).t())),
    "apart": (mlp, lambda n: (rand(n, 40)[:, 3:27], rand(70, 24), rand(70), rand(70, 33))),
    "gated": (gated, lambda n: (rand(n, 20), rand(20, 45), rand(20, 45), rand(45, 19))),
    "prologue": (prologue, lambda n: (rand(n, 31), rand(31, 18), rand(18, 9))),
    "entropies": (entropies, lambda n: (rand(n, 12), rand(12, 77), torch.randint(0, 77, (n,)))),
    "batched": (batched, lambda n: (rand(3, n, 48), rand(48, 48), rand(48))),
    "kept": (kept, lambda n: (rand(n, 21), rand(21, 30), rand(30, 13))),
    "positions": (positions, lambda n: (rand(n, 21), rand(21, 30))),
}


def compare(results: object, expected: object) -> None:
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (results, expected)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3, equal_nan=True)


def exact(function: Callable[..., object], inputs: Tensors) -> object:
    return function(*(x.double() if x.is_floating_point() else x for x in inputs))


@pytest.mark.parametrize("rows", (2, 64, 1111))
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_whole_products(name: str, rows: int) -> None:
    function, inputs = CASES[name][0], CASES[name][1](rows)
    report = torch_mlc.explain(function, *inputs)
    assert "cpu_row_blocks" in [k.rule for k in report.kernels]
    compiled = torch.compile(function, backend="mlc", fullgraph=True, options={"cache": False})
    compare(compiled(*inputs), exact(function, inputs))


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_vary(name: str) -> None:
    function, make = CASES[name]
    compiled = torch.compile(function, backend="mlc", fullgraph=True, dynamic=True, options={"cache": False})
    for rows in (100, 3, 513):
        inputs = make(rows)
        compare(compiled(*inputs), exact(function, inputs))


def test_no_rows() -> None:
    compiled = torch.compile(mlp, backend="mlc", fullgraph=True, dynamic=True, options={"cache": False})
    for rows in (100, 0):
        assert compiled(rand(rows, 24), rand(70, 24), rand(70), rand(70, 33)).shape == (rows, 33)


def test_one_kernel_and_no_whole_intermediate() -> None:
    report = torch_mlc.explain(mlp, *CASES["mlp"][1](512))
    assert [k.rule for k in report.kernels] == ["cpu_row_blocks"]
    assert not report.graphs[0].libraries
    assert "512, 70" not in report.graphs[0].program


def test_sums_over_rows_stay_apart() -> None:
    def columns(x, w):
        return torch.relu(x @ w).sum(0)

    inputs = rand(300, 20), rand(20, 40)
    report = torch_mlc.explain(columns, *inputs)
    assert "cpu_row_blocks" not in [k.rule for k in report.kernels]


def test_special_values() -> None:
    x, w, b, v = CASES["mlp"][1](200)
    x[3, 5], x[150, 0] = float("nan"), float("inf")
    compiled = torch.compile(mlp, backend="mlc", options={"cache": False})
    result, expected = compiled(x, w, b, v), mlp(x, w, b, v)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_training() -> None:
    inputs = [t.requires_grad_() for t in CASES["layer_norm"][1](300)]
    compiled = torch.compile(layer_norm, backend="mlc", options={"cache": False})
    weight = rand(300, 50)
    grads = torch.autograd.grad((compiled(*inputs) * weight).sum(), inputs)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    expected = torch.autograd.grad((layer_norm(*doubles) * weight.double()).sum(), doubles)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ("python", "native"))
def test_both_forms_of_programs_and_teams(form: str) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch._dynamo.reset()
            inputs = CASES["gated"][1](1500)
            compiled = torch.compile(gated, backend="mlc", options={"cache": False, "host_program": form})
            first = compiled(*inputs)
            compare(first, exact(gated, inputs))
            assert torch.equal(first, compiled(*inputs))
    finally:
        torch.set_num_threads(threads)


def test_by_cost_small_results_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    report = torch_mlc.explain(mlp, *CASES["mlp"][1](512))
    assert "cpu_row_blocks" not in [k.rule for k in report.kernels]
