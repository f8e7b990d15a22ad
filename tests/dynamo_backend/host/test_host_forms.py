"""The forms of a host program: Python, machine code once it is called often, and with ranges for a profiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from torch_mlc.codegen.host.python.ranges import with_ranges
from torch_mlc.codegen.host.python.text import HostText
from torch_mlc.runtime.compile.kernels import kernel_store
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.host.switch import OFTEN

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ w).cumsum(0)
    return y.cumsum(1) * 2


def compiled(folder: Path, host: str = "auto") -> Any:
    torch._dynamo.reset()
    kernel_store.cache_clear()
    return torch.compile(step, backend="mlc", options={"host_program": host, "cache_dir": str(folder)})


def args() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 40), torch.randn(40, 60)


# Some of what str.splitlines ends lines at, and neither Python nor files do.
ENDS = "\x0b\x0c\x1c\x85\u2028"
ODD = f"""
import torch

def odd(x, w):
    y = torch.relu(x @ w)  # one{ENDS}two
    return torch.linalg.inv(y @ y.T + len("{ENDS}") * torch.eye(5)) * 2  # {ENDS}three
"""


@pytest.mark.parametrize("host", ["python", "native"])
def test_model_lines_with_odd_characters(tmp_path, host):
    source = tmp_path / "odd_lines.py"
    source.write_text(ODD, encoding="utf-8")
    spec = spec_from_file_location("odd_lines", source)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    run, given = torch.compile(module.odd, backend="mlc", options={"host_program": host}), args()
    for _ in range(2):
        torch.testing.assert_close(run(*given), module.odd(*given))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            torch.testing.assert_close(run(*given), module.odd(*given))
        assert any("odd_lines.py:6 in odd: return torch.linalg.inv" in e.key for e in seen.key_averages())


def test_a_program_that_is_called_often_becomes_machine_code_and_stays_it(tmp_path):
    before, fn = counters.snapshot(), compiled(tmp_path)
    for _ in range(OFTEN):
        given = args()
        torch.testing.assert_close(fn(*given), step(*given))
    assert "native_programs" not in counters.since(before)
    for _ in range(3):
        given = args()
        torch.testing.assert_close(fn(*given), step(*given))
    assert counters.since(before)["native_programs"] == 1
    # What the cache has of the graph is the machine code now.
    before, fn = counters.snapshot(), compiled(tmp_path)
    torch.testing.assert_close(fn(*given), step(*given))
    found = counters.since(before)
    assert (found["native_programs"], found["graph_cache_hits"]) == (1, 1) and "graphs_compiled" not in found


def test_a_process_that_finds_a_program_uncompiled_compiles_it_when_that_pays(tmp_path):
    given, first = args(), compiled(tmp_path)
    for _ in range(2):
        first(*given)
    before, fn = counters.snapshot(), compiled(tmp_path)
    for _ in range(OFTEN + 1):
        torch.testing.assert_close(fn(*given), step(*given))
    assert counters.since(before)["native_programs"] == 1 and counters.since(before)["graph_cache_hits"] == 1


def test_a_program_that_cannot_be_compiled_stays_python(tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("torch_mlc.dynamo_backend.compiling.host_programs.program_code", refuse)
    fn = compiled(tmp_path)
    for _ in range(OFTEN + 3):
        given = args()
        torch.testing.assert_close(fn(*given), step(*given))


def test_threads_change_over_once(tmp_path):
    before, fn, wrong = counters.snapshot(), compiled(tmp_path), []
    fn(*args())

    def work(_: int) -> None:
        for _ in range(OFTEN):
            given = args()
            if not torch.allclose(fn(*given), step(*given), atol=1e-5):
                wrong.append(given)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong and counters.since(before)["native_programs"] == 1


@pytest.mark.parametrize("host", ["python", "native"])
def test_a_profiler_sees_kernels_and_ops_by_their_lines(tmp_path, host):
    fn, given = compiled(tmp_path, host), args()
    fn(*given)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        result = fn(*given)
    torch.testing.assert_close(result, step(*given))
    named = [e for e in seen.events() if "test_host_forms.py" in e.name]
    texts = [e.name for e in named]
    assert [t.partition(" | ")[0] for t in texts] == ["aten::mm.default", "fused_relu_cumsum_0", "fused_cumsum_mul_1"]
    assert texts[1].endswith("in step: y = torch.relu(x @ w).cumsum(0)")
    assert texts[2].endswith("in step: return y.cumsum(1) * 2")
    (product,) = [e for e in seen.events() if e.name == "aten::mm"]
    assert named[0].time_range.start <= product.time_range.start <= product.time_range.end <= named[0].time_range.end
    with profile(activities=[ProfilerActivity.CPU]) as later:
        step(*given)
    assert not [e for e in later.events() if "fused" in e.name]


def test_ranges_are_around_calls_alone():
    text = """# main: 2 kernels, 1 library call; made by torch-mlc
def call(args):
    a, = args
    args.clear()
    b = empty_cpu_((4,), (1,), torch.float32)
    # m.py:3 in f: return g(x)
    k0_(a.data_ptr(), b.data_ptr())
    c, d = flat_(aten_split_(b, 2))
    return (c,)
"""
    host = HostText(text, {"aten_split_": "aten::split.Tensor"}, {})
    assert (
        with_ranges(host, {"k0_": "fused_add_0"}).text
        == """# main: 2 kernels, 1 library call; made by torch-mlc
def call(args):
    a, = args
    args.clear()
    b = empty_cpu_((4,), (1,), torch.float32)
    # m.py:3 in f: return g(x)
    with range_('fused_add_0 | m.py:3 in f: return g(x)'):
        k0_(a.data_ptr(), b.data_ptr())
    with range_('aten::split.Tensor | m.py:3 in f: return g(x)'):
        c, d = flat_(aten_split_(b, 2))
    return (c,)
"""
    )
