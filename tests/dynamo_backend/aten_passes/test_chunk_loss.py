"""Linear + cross-entropy by chunks: numbers of float64 eager, no logits in full, and reasons where they stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc import explain
from torch_mlc.codegen.host.steps.step import Allocate, CallLibrary
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.runtime.settings.options import Options

CLASSES, FEATURES, CHUNK = 37, 16, 8
Loss = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def mean(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), t.view(-1)) * 3


def without_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(wide(F.linear(x, w)).view(-1, CLASSES), t.view(-1), ignore_index=5, reduction="sum")
    return loss / 7 + b.sum()


def shifted(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = wide(F.linear(x, w, b))
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1))


def operands(dtype: torch.dtype = torch.float32, batch: int = 3) -> list[torch.Tensor]:
    x, w, b = torch.randn(batch, 7, FEATURES), torch.randn(CLASSES, FEATURES), torch.randn(CLASSES)
    t = torch.randint(0, CLASSES, (batch, 7))
    t[0, 2] = t[-1, :3] = -100
    return [x.to(dtype), w.to(dtype), b.to(dtype), t]


def gradients(fn: Loss, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in inputs]
    loss = fn(*given)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(a.grad for a in given if a.grad is not None)]


def report(fn: Any, inputs: list[torch.Tensor], training: bool = True, **options: object) -> str:
    given = [a.detach().clone().requires_grad_(training and a.is_floating_point()) for a in inputs]
    return str(explain(fn, *given, training=training, options={"loss_chunk": CHUNK, **options}))


@pytest.mark.parametrize("fn", [mean, without_bias, shifted])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_those_of_eager(fn: Loss, dtype: torch.dtype) -> None:
    inputs = operands(dtype)
    inputs[3][inputs[3] == -100] = 5 if fn is without_bias else -100
    compiled = torch.compile(fn, backend="mlc", options={"loss_chunk": CHUNK})
    got, eager = gradients(compiled, inputs), gradients(fn, inputs)
    exact = gradients(fn, [a.double() if a.is_floating_point() else a for a in inputs])
    for ours, theirs, right in zip(got, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
        assert (ours.double() - right).abs().max() <= tolerance * right.abs().max()
    if dtype == torch.float32:
        assert "loss in 3 chunks" in report(fn, inputs)


def test_gradients_keep_the_range_of_half_types() -> None:
    x, w, b, t = operands(torch.float16)
    scale = 2.0**14

    def scaled(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return mean(x, w, b, t).float() * scale

    got = gradients(torch.compile(scaled, backend="mlc", options={"loss_chunk": CHUNK}), [x, w, b, t])
    exact = gradients(scaled, [x.double(), w.double(), b.double(), t])
    for ours, right in zip(got[1:], exact[1:], strict=True):
        assert (ours.double() - right).abs().max() <= 2e-2 * right.abs().max()


class Head(torch.nn.Module):
    def __init__(self, classes: int = CLASSES, features: int = FEATURES) -> None:
        super().__init__()
        self.head = torch.nn.Linear(features, classes)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).view(-1, self.head.out_features).float(), t.view(-1))


def test_sizes_that_vary_keep_the_bound_of_a_chunk() -> None:
    model = Head()
    compiled = torch.compile(model, backend="mlc", dynamic=True, options={"loss_chunk": CHUNK, "cache": False})
    for batch in (3, 4, 2, 9):
        x, _, _, t = operands(batch=batch)
        got, want = (gradients(lambda x, t, m=m: m(x, t), [x, t]) for m in (compiled, model))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    text = str(explain(model, *(a for a in operands() if a.dim() == 3 or not a.is_floating_point()),
                       training=True, dynamic=True, options={"loss_chunk": CHUNK}))  # fmt: skip
    # 21 rows now, and so many chunks that 32 rows still fit.
    assert "loss in 4 chunks of 6 rows" in text


def test_no_row_that_counts_gives_nan_and_no_gradient() -> None:
    inputs = operands()
    inputs[3].fill_(-100)
    got = gradients(torch.compile(mean, backend="mlc", options={"loss_chunk": CHUNK}), inputs)
    torch.testing.assert_close(got, gradients(mean, inputs), equal_nan=True)
    assert got[0].isnan() and not any(g.any() for g in got[1:])


@pytest.mark.parametrize("fn", [mean, shifted])
def test_inference_makes_the_loss_alone(fn: Loss) -> None:
    inputs = operands()
    with torch.no_grad():
        got = torch.compile(fn, backend="mlc", options={"loss_chunk": CHUNK})(*inputs)
        torch.testing.assert_close(got, fn(*inputs))
    assert "loss in 3 chunks" in report(fn, inputs, training=False)


def with_logits(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> Any:
    logits = F.linear(x, w, b).view(-1, CLASSES)
    return F.cross_entropy(logits, t.view(-1)), logits


def with_entropy(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logp = F.log_softmax(F.linear(x, w, b).view(-1, CLASSES), 1)
    return F.nll_loss(logp, t.view(-1)) - (logp.exp() * logp).sum(1).mean()


def each_row(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), t.view(-1), reduction="none")
    return (loss * torch.arange(21)).mean()


def weighted(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), t.view(-1), weight=b.detach().abs())


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (with_logits, "also read by"),
        (with_entropy, "log-probabilities are also read by"),
        (each_row, "losses of single rows"),
        (weighted, "classes have weights"),
    ],
)
def test_logits_that_something_else_needs_stay_whole(fn: Any, reason: str) -> None:
    inputs = operands()
    text = report(fn, inputs)
    assert "loss in" not in text and "logits of a loss stay whole" in text and reason in text
    one = (lambda *a: with_logits(*a)[0] + with_logits(*a)[1].sum()) if fn is with_logits else fn
    got = gradients(torch.compile(one, backend="mlc", options={"loss_chunk": CHUNK}), inputs)
    torch.testing.assert_close(got, gradients(one, inputs), rtol=1e-4, atol=1e-5)


def test_options_and_sizes_decide() -> None:
    inputs = operands()
    assert "loss in" not in report(mean, inputs, loss_chunk=0)
    assert "loss in" not in report(mean, inputs, loss_chunk="auto"), "logits of a few KiB"
    assert "loss in" not in report(mean, inputs, loss_chunk=21), "one chunk"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_chunk(dtype: torch.dtype) -> None:
    rows, classes, features, chunk = 512, 50001, 16, 128
    model = Head(classes, features).to(dtype)
    x = torch.randn(rows, features, dtype=dtype, requires_grad=True)
    settings = Options(loss_chunk=chunk)
    forward, _ = capture(model, (x, torch.randint(0, classes, (rows,))), training=True, options=settings)
    stages = compile_graph(forward, (), options=settings, load=False, fresh=True).stages
    assert stages is not None
    types = [s.type for s in stages.program.steps if isinstance(s, Allocate)]
    calls = [s.node for s in stages.program.steps if isinstance(s, CallLibrary) and not s.over]
    types += [t for node in calls for t in node.types if t is not None]
    assert max(int(t.numel) for t in types) == classes * max(chunk, features)
    # Logits and their gradient; for half types also that in float32, for sums. Besides, results that leave.
    tile = chunk * classes * (4 + 4 if dtype == torch.float32 else 2 + 2 + 4)
    results = classes * features * 4 + 2 * rows * features * 4
    peak = max(map(int, stages.program.peaks))
    assert peak <= 1.2 * (tile + results)
    # In full, the logits and their gradient would be there together.
    assert peak < 2 * rows * classes * dtype.itemsize


def test_sums_of_products_are_made_in_place() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(33, 5), torch.randn(5, 29)

    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        first = a @ b
        return torch.addmm(first, a, b), torch.addmm(torch.addmm(a @ b.clone(), a + 1, b), a + 2, b)

    compiled = torch.compile(fn, backend="mlc")
    torch.testing.assert_close(compiled(a, b), fn(a, b))
    torch.testing.assert_close(compiled(a, b), fn(a, b))


@pytest.mark.parametrize(("rows", "chunks"), [(8192, 1), (16384, 7)])
def test_gpus_have_more_memory_and_need_more_rows(rows: int, chunks: int) -> None:
    classes, features = 50257, 64
    with FakeTensorMode():
        x = torch.empty(rows, features, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(classes, features, dtype=torch.bfloat16, requires_grad=True)
        t = torch.empty(rows, dtype=torch.int64)
    settings = Options.resolve(None, {"target": "cuda:sm_90"}, {})
    forward, _ = capture(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), [x, w, t], training=True, options=settings)
    logits = [
        n for n in forward.graph.nodes if n.target is torch.ops.aten.mm.default and n.meta["val"].shape[1] == classes
    ]
    assert len(logits) == chunks
