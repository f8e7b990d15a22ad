"""Rows of matrices that products read and make begin at multiples of 16 bytes where nobody outside can tell; values are
those of double precision, and strides outside those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.model_report import Report
from torch_mlc.scheduler.passes.products import pad_products as padding

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("fresh_compiler")

H90 = "cuda:sm_90"


def explained(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Report:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
    return torch_mlc.explain(fn, *inputs, target=H90)


def program(report: Report) -> str:
    return str(report.graphs[0].program)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(F.linear(x, up)) @ down


def test_what_the_graph_makes_for_itself_has_longer_rows() -> None:
    """The first product writes them, the second reads them, and no kernel copies."""
    report = explained(mlp, (8192, 4096), (3001, 4096), (3001, 4096))
    assert "(8192, 3001), (3008, 1)" in program(report) and "out=" in program(report)
    assert [k.rule for k in report.kernels] == ["gpu_pointwise"] and len(report.graphs[0].libraries) == 2


def test_rows_that_are_even_are_left_alone() -> None:
    report = explained(mlp, (8192, 4096), (3008, 4096), (3008, 4096))
    assert "out=" not in program(report)


def twice(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.mark.parametrize(("rows", "copied"), [(8192, True), (16, False)])
def test_an_argument_is_copied_where_a_product_takes_longer(rows: int, copied: bool) -> None:
    """A weight of odd rows: many rows of the other operand multiply for longer than the copy takes, few read it once
    anyway."""
    report = explained(twice, (rows, 4096), (4096, 4098))
    assert any("copied to begin evenly" in c.reason for c in report.graphs[0].libraries) is copied


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """All that may be padded is, also on a CPU; how many tensors were."""
    found: list[bool] = []
    real = padding._Rows.changed

    def changed(self: Any, name: str, views: Any) -> Any:
        result = real(self, name, views)
        found.append(len(result) > 0)
        return result

    monkeypatch.setattr(padding, "wants_aligned", lambda target, dtype: dtype.is_float)
    monkeypatch.setattr(padding._Rows, "pays", lambda self, *args: True)
    monkeypatch.setattr(padding._Rows, "changed", changed)
    return found


def chain(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """What is seen from outside (``h``) beside what is not, read as it is, across, and by fewer dimensions."""
    h = x @ a
    inner = torch.tanh(h * 2) @ b
    flat = inner.flatten(0, 1)
    return h, torch.bmm(inner, inner.transpose(1, 2)), torch.addmm(a[0, 0], flat.t(), flat)[:, 1:]


@pytest.mark.parametrize(("rows", "dynamic"), [(43, False), pytest.param(43, True, marks=pytest.mark.slow), (0, False)])
def test_values_and_strides_are_those_of_eager(padded: list[bool], rows: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, rows, 65), torch.randn(65, 97) / 8, torch.randn(97, 129) / 10]
    if dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 1)
    given = [t.clone().requires_grad_() for t in inputs]
    wanted = [t.double().requires_grad_() for t in inputs]
    compiled = torch.compile(chain, backend="mlc", fullgraph=True)
    for fn, own in ((compiled, given), (chain, wanted)):
        own.append(fn(*own[:3]))  # type: ignore[arg-type]
        sum(r.square().sum() for r in own[3]).backward()  # type: ignore[union-attr]
    assert any(padded)
    for got, right, eager in zip(given[3], wanted[3], chain(*inputs), strict=True):
        assert got.stride() == eager.stride()
        is_near(got, right)
    for one, other in zip(given[:3], wanted[:3], strict=True):
        is_near(one.grad, other.grad)


def is_near(got: Any, right: Any) -> None:
    """Within 1e-5 of the largest element: terms of both signs are added."""
    torch.testing.assert_close(
        got.double(), right, rtol=0, atol=1e-5 * float(right.detach().abs().amax()) if right.numel() else 0
    )
