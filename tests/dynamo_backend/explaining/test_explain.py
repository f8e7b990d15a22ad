"""What explain tells of a model, for this machine and for GPUs that are not here."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_mlc
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.reports.report import LibraryReport
from torch_mlc.runtime.settings.options import OptionError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.topk(self.norm(F.gelu(self.linear(x))), 64).values


def test_a_report_tells_what_became_of_each_op() -> None:
    report = torch_mlc.explain(Model().eval(), torch.randn(8, 16))
    (graph,) = report.graphs
    (kernel,) = graph.kernels
    assert kernel.calls == 1 and kernel.rule.startswith("cpu_") and kernel.language == "llvm"
    assert kernel.ops == ("aten.gelu.default", "aten.native_layer_norm.default")
    assert any("self.norm(F.gelu(self.linear(x)))" in line for line in kernel.lines)
    assert "define void" in kernel.source and "s.vectorize" in kernel.schedule and "def fused" in kernel.loops
    assert kernel.traffic is not None
    # In: 8 x 64 values and two rows of 64; out: 8 x 64 values. Nothing is read twice.
    assert kernel.traffic.least == (8 * 64 + 64 + 64 + 8 * 64) * 4
    assert kernel.traffic.moved == kernel.traffic.least
    assert kernel.traffic.operations > 8 * 64 * 10
    libraries = {c.op: c for c in graph.libraries}
    assert libraries["aten::addmm.default"].reason.startswith("matrix product")
    assert libraries["aten::topk.default"].reason.startswith("sort")
    assert graph.fallbacks == ()
    assert graph.typical_peak == graph.peak_bytes == (4 + 4 + 8) * 8 * 64  # operand, values, positions
    text = str(report)
    assert kernel.name in text and "aten::topk.default" in text and len(text.splitlines()) < 20
    assert kernel.source.splitlines()[-1] in report.show(details=True)


def test_what_was_not_fused_and_why() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return (y / y.sum(1, keepdim=True)), (y / y.sum(0, keepdim=True))

    report = torch_mlc.explain(f, torch.randn(64, 32))
    assert any("other dimensions" in m.reason and m.bytes >= 64 * 32 * 4 for m in report.graphs[0].not_fused)


def test_forward_and_backward_with_sizes_that_are_symbols() -> None:
    report = torch_mlc.explain(Model(), torch.randn(8, 16), training=True, dynamic=True)
    assert [g.name for g in report.graphs] == ["forward", "backward"]
    assert all(g.peak_bytes.free_symbols for g in report.graphs)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(nest: object, target: object) -> None:
        raise ValueError("no code for this")

    monkeypatch.setattr(kernels, "emit", failing)
    with pytest.warns(UserWarning, match="no code for this"):
        report = torch_mlc.explain(torch.sin, torch.randn(4))
    (kernel,) = report.fallbacks
    assert kernel.ops == ("aten.sin.default",) and "no code for this" in str(report)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("target", ["cuda:sm_90", "hip:gfx942"])
def test_kernels_compile_for_a_gpu_that_is_not_here(target: str, training: bool) -> None:
    report = torch_mlc.explain(Model(), torch.randn(8, 16), training=training, target=target)
    assert report.kernels and not report.fallbacks
    for kernel in report.kernels:
        assert kernel.language == "triton" and "@triton.jit" in kernel.source
        taken = kernel.resources
        assert taken is not None and taken.registers > 0 and 0 < taken.occupancy <= 1 and taken.spills == 0
    assert "occupancy" in str(report)
    assert all(g.target == target for g in report.graphs)


def test_a_wrong_target_names_the_nearest_one() -> None:
    with pytest.raises(OptionError, match="cuda:sm_90"):
        torch_mlc.explain(torch.sin, torch.randn(4), target="cuda:sm90")


class Offloads(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x @ x
        return a.cpu(), a @ a, a


def test_what_a_model_has_on_the_host_stays_there_and_copies_run_beside_calls() -> None:
    shown = [
        torch_mlc.explain(Offloads(), torch.empty(2048, 2048), target="cuda:sm_90", options={"copy_streams": on})
        for on in (True, False)
    ]
    (graph,), (before,) = (report.graphs for report in shown)
    program = graph.program
    assert program.index("mlc_begin_copy_default_(mm") < program.index("aten_mm_default_(mm, mm)")
    assert program.index("aten_mm_default_(mm, mm)") < program.index("mlc_wait_copies_default_(")
    assert 'device="cpu"' in program and "overlap_begun" in {s.name for s in graph.steps if s.changed}
    assert "aten__to_copy_default_(mm" in before.program and "begin" not in before.program
    assert graph.peak_bytes == before.peak_bytes, "no memory is counted twice"
    (copy,) = (c for c in before.libraries if "_to_copy" in c.op)
    assert copy.seconds == pytest.approx((8e3 + 2048 * 2048 * 4 / 64) * 1e-9)


def test_what_only_torchs_modules_run_is_told_by_its_layer() -> None:
    """There is no line of the user's: a chain of layers has none."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Tanh(), torch.nn.LayerNorm(8)))
    report = torch_mlc.explain(net, torch.randn(300, 8))
    lines = {line for k in report.kernels for line in k.lines} | {
        line for g in report.graphs for c in g.libraries for line in c.lines
    }
    assert {"layer 1.0 (Tanh)", "layer 1.1 (LayerNorm)"} <= lines and "layer 0 (Linear)" in lines
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Embedding(4, 8)), backend="mlc")
    with pytest.raises(IndexError) as raised:
        compiled(torch.tensor([9]))
    assert raised.value.__notes__ == ["In the model: layer 0 (Embedding)"]


def test_a_reason_tells_nothing_of_the_form_of_operands_unless_it_is_asked_for() -> None:
    stop = "; nothing to read in packed form (b: a view (of rows) is read as it stands)"
    call = LibraryReport("aten::mm.default", 1, f"matrix product: BLAS{stop}")
    (graph,) = torch_mlc.explain(lambda x: x.sin(), torch.randn(300)).graphs
    assert call.plain_reason == "matrix product: BLAS"
    assert replace(call, reason="BLAS; nothing to read in packed form; by halves").plain_reason == "BLAS; by halves"
    text = str(replace(graph, libraries=(call,)))
    assert "  left to a library: aten::mm.default: matrix product: BLAS\n" in text and "packed form" not in text


def test_a_legend_is_told_once() -> None:
    """After the last graph that has it; each graph by itself has it too."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.exp(y)

    report = torch_mlc.explain(broken, torch.randn(300))
    first, second = map(str, report.graphs)
    assert first.count("ops: operations") == second.count("ops: operations") == 1
    text = str(report)
    assert text.count("ops: operations") == text.count("share: of the") == 1
    assert text.index("fused_exp") < text.index("ops: operations")
