"""Graphs with several programs: saved ahead of time, captured, for a GPU over a driver that the CPU plays, and random
ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from tests import warm_processes
from tests.dynamo_backend import played_programs
from tests.dynamo_backend.host.test_cuda_graphs import device  # noqa: F401
from tests.dynamo_backend.played_programs import load, rand
from tests.fuzz.check import check
from tests.fuzz.generate import make_program
from tests.runtime.played_driver import PlayedLibrary, played_code
from tests.runtime.recording_device import RecordingDevice
from tests.versions import needs_aot_compile
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.dynamo_backend.tracing.origins import lines_of
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import Options

SAVED = """
import sys, torch
def layer(x, w):
    return torch.softmax(x @ w, -1) * torch.arange(5.0)
how = dict(backend="mlc", fullgraph=True, options={"regions": "4,16,%8"})
x, w = torch.randn(9, 3), torch.randn(3, 5)
torch._dynamo.mark_dynamic(x, 0)
"""
SAVE = (
    SAVED
    + """
torch.compile(layer, **how).aot_compile(((x, w), {})).save_compiled_function(sys.argv[1])
"""
)
LOAD = (
    SAVED
    + """
from torch_mlc.runtime.counters import counters
with open(sys.argv[1], "rb") as file:
    loaded = torch.compiler.load_compiled_function(file)
for n in (2, 3, 4, 5, 15, 16, 17, 24, 33, 200):
    x = torch.randn(n, 3)
    for _ in range(2):
        torch.testing.assert_close(loaded(x, w), layer(x, w))
print(counters["graphs_compiled"], counters["kernels_generated"], counters["native_programs"])
"""
)


@needs_aot_compile
def test_all_programs_are_saved_ahead_of_time(tmp_path: Path) -> None:
    for script, caches in ((SAVE, "first"), (LOAD, "second")):
        env = {"MLC_CACHE_DIR": str(tmp_path / caches), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"{caches}_torch")}
        printed = warm_processes.start(script, str(tmp_path / "saved"), env=env).output()
    assert printed.split() == ["0", "0", "4"], "nothing is compiled, and all four programs are machine code"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:torch-mlc. a kernel does not compile")
def test_each_size_has_a_capture_whichever_program_runs(device: RecordingDevice) -> None:  # noqa: F811
    def fn(x: Tensor) -> Tensor:
        return torch.relu(x * 2).sum(0)

    compiled = torch.compile(fn, backend="mlc", dynamic=True, options={"cuda_graphs": True, "regions": "4,16"})
    for n in (3, 8, 20):
        for turn in range(4):
            x = torch.full((n, 6), 1.0 + turn)
            torch.testing.assert_close(compiled(x), fn(x))
    assert device.captures == 3 and device.replays >= 3


@pytest.mark.parametrize("regions", ["4,16", "8,%8"])
def test_programs_for_a_gpu_run_in_both_forms(
    played: PlayedLibrary, monkeypatch: pytest.MonkeyPatch, regions: str
) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x) * w, x.sum(0)

    gm = make_fx(fn, decomposition_table(), "symbolic")(rand(9, 6), rand(6))
    retarget([gm], "cuda")
    monkeypatch.setattr(kernels, "compile_source", played_code)
    options = replace(played_programs.OPTIONS, regions=Options.resolve(None, {"regions": regions}, {}).regions)
    graph = compile_graph(gm, (), options=options, load=False, fresh=True)
    assert graph.stages is not None and len(graph.stages.variants) == 3
    loaded = [
        (v.condition, v.compiled.stages, load(played, v.compiled.stages, lines_of(gm)))
        for v in graph.stages.variants if v.compiled.stages is not None
    ]  # fmt: skip
    names = [s.name for s in graph.stages.imported.symbols.symbols]
    for n in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 33):  # each border from both sides
        ((stages, both),) = [(s, b) for c, s, b in loaded if eval(c, dict.fromkeys(names, n))]
        x, w = rand(n, 6), rand(6)
        given = [n if i.name not in ("x_1", "w_1") else {"x_1": x, "w_1": w}[i.name] for i in stages.imported.inputs]
        for call in (both.python, both.machine):
            results, launched = both.run(call, *given)
            assert launched
            for got, want in zip(results, fn(x, w), strict=True):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


class Attended(torch.nn.Module):
    """Any number of tokens after those in caches: prefill and decoding in one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = (torch.nn.Linear(512, 512, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(512, 4096, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(torch.nn.functional.rms_norm(x, (512,))).view(1, -1, 8, 64).transpose(1, 2)
        seen = torch.arange(keys.shape[2], device=x.device)[None] <= position[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        x = x + torch.relu(self.out(torch.cat(y.unbind(1), -1)))
        return x, self.head(x[:, -1:])


def test_a_model_for_an_absent_gpu_gets_programs_by_predicted_times() -> None:
    """Few tokens are attended in pieces of the keys, many in tiles of their own; the last one's logits are alike."""
    x, keys, values = torch.randn(1, 64, 512), torch.randn(1, 8, 4096, 64), torch.randn(1, 8, 4096, 64)
    position = torch.arange(64)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(position, 0)
    with torch.no_grad():
        report = torch_mlc.explain(Attended(), x, keys, values, position, options={"target": "cuda:sm_90"})
    graph, text = report.graphs[0], str(report)
    assert len(graph.variants) >= 2 and graph.shared_kernels >= 1
    assert graph.proof in text and all(v.condition in text for v in graph.variants)
    assert "each of" in graph.proof and "is in exactly one region" in graph.proof
    launches = [len(v.graph.kernels) for v in graph.variants]
    assert launches[0] > launches[-1], "the pieces of a row become one in a kernel of their own"


@cache
def dynamic_seeds(count: int) -> list[int]:
    """Seeds of random programs with sizes that vary. To find them takes seconds."""
    found: list[int] = []
    seed = 1000
    while len(found) < count:
        if make_program(seed).dynamic is not False:
            found.append(seed)
        seed += 1
    return found


@pytest.mark.parametrize("number", range(10))
def test_random_programs_by_regions_equal_eager(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = dynamic_seeds(10)[number]
    monkeypatch.setenv("MLC_REGIONS", "=1,3,5,9,33,%4")
    outcome = check(make_program(seed))
    assert outcome.status in ("equal", "torch"), f"{outcome}\n{make_program(seed).snippet(str(seed))}"


def test_random_programs_have_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those above are no programs without sizes that vary."""
    monkeypatch.setenv("MLC_REGIONS", "=1,3,5,9,33,%4")
    before = counters["variants_compiled"]
    for seed in dynamic_seeds(10)[:4]:
        torch._dynamo.reset()
        check(make_program(seed))
    assert counters["variants_compiled"] > before
