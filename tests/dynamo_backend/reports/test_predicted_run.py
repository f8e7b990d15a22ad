"""What explain predicts of a whole model: kernels by the model, library calls by the data sheet, and their sum."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.library_time import product_rate
from torch_mlc.dynamo_backend.reports.model_report import Report
from torch_mlc.dynamo_backend.reports.predicted_run import PredictedRun
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.model.predict import Prediction

NAME = "cuda:sm_90"
MACHINE = gpu_target(NAME).machine


def explained(dtype: torch.dtype = torch.bfloat16, target: str = NAME, training: bool = False) -> Report:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ w, -1)

    with FakeTensorMode():
        x, w = (torch.empty(4096, 4096, dtype=dtype, requires_grad=training) for _ in range(2))
    return torch_mlc.explain(f, x, w, target=target, training=training, options={"cache": False, "compile_workers": 0})


def test_kernels_and_library_calls_add_up() -> None:
    pytest.importorskip("triton")
    report = explained()
    (graph,) = report.graphs
    run = graph.predicted
    (kernel,), (call,) = run.kernels, run.libraries
    assert kernel[2] == report.kernels[0].prediction and call[0] == "aten::mm.default"
    # The product of 4096 cubed halves takes 189 us on an H200.
    assert call[2] == pytest.approx(189e-6, rel=0.06)
    assert run.seconds == report.predicted_seconds == pytest.approx(kernel[2].seconds + call[2])
    text = str(report)
    assert "by a model that no measurement has corrected" in text and "a library, by the data sheet" in text
    # The longest stands first.
    assert text.index("us  a library, by") < text.index("us  memory")


def test_all_graphs_of_a_training_step() -> None:
    pytest.importorskip("triton")
    report = explained(training=True)
    each = [g.predicted.seconds for g in report.graphs]
    assert len(each) == 2 and None not in each
    assert report.predicted_seconds == pytest.approx(sum(s for s in each if s is not None))
    assert "All graphs are predicted to take" in str(report)
    (backward,) = (c for c in report.graphs[1].libraries if c.op == "aten::mm.default")
    assert backward.calls == 2 and backward.seconds is not None and backward.seconds > 350e-6


def test_cpus_are_told_nothing_of_times() -> None:
    with FakeTensorMode():
        x = torch.empty(64, 64)
    report = torch_mlc.explain(lambda x: torch.linalg.inv(x + 1), x, target="cpu")
    assert report.predicted_seconds is None and "predicted to take" not in str(report)
    assert all(c.seconds is None for g in report.graphs for c in g.libraries)


def test_kernels_of_which_nothing_is_predicted_are_named() -> None:
    known = ("a", 2, Prediction(1e-6, {"memory": 1e-6}))
    run = PredictedRun((known,), (("aten::mm.default", 1, 3e-6),), ("b",))
    assert run.seconds is None and "predicted to take 5.00 us without b," in run.lines[0]
    assert PredictedRun((known,)).seconds == 2e-6 and PredictedRun().lines == [] and PredictedRun().seconds is None


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        (DType.BFLOAT16, MACHINE.matmul), (DType.INT8, 2 * MACHINE.matmul), (DType.FLOAT32, MACHINE.float32),
        (DType.INT32, MACHINE.float32), (DType.FLOAT64, MACHINE.float32 / 2),
    ],
)  # fmt: skip
def test_rates_of_products(dtype: DType, rate: float) -> None:
    assert product_rate(dtype, gpu_target(NAME)) == rate
