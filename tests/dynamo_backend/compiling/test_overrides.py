"""Schedules by hand in the place of the compiler's: found by hash, checked, part of cache keys, missed aloud."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_mlc
from tests import warm_processes
from torch_mlc.dynamo_backend.reports.override_uses import OverrideUses, OverrideWarning
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import OptionError
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.schedule.overrides import OverrideError, load_overrides


def rows(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).relu().sum(1)


X, Y = torch.randn(37, 50), torch.randn(50)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def workload() -> str:
    return torch_mlc.explain(rows, X, Y).kernels[0].workload


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "schedules.py"
        path.write_text("import torch_mlc\n" + text)
        return path

    return write


def body(workload: str, *steps: str, target: str = "") -> str:
    on = f', target="{target}"' if target else ""
    return f'@torch_mlc.schedule("{workload}"{on})\ndef _(s):\n' + "".join(f"    {s}\n" for s in steps)


def test_a_script_schedules_a_kernel(workload: str, script: Callable[[str], Path]) -> None:
    path = script(body(workload[:8], 's.vectorize(s.split("b0_r0", [None, 8])[1])', 's.unroll(s.split("b0_i0", 3)[1])'))
    with pytest.raises(torch_mlc.ScheduleError, match=r"schedules\.py:5\): it raised TypeError"):
        torch_mlc.explain(rows, X, Y, options={"schedules": path})
    path = script(body(workload[:8], 's.vectorize(s.split("b0_r0", [None, 8])[1])'))
    (kernel,) = torch_mlc.explain(rows, X, Y, options={"schedules": str(path)}).kernels
    assert kernel.rule == "override" and kernel.trace is not None and len(kernel.trace.steps) == 2
    assert "vectorized(8)" in torch_mlc.show(kernel.scheduled)
    model = torch.compile(rows, backend="mlc", options={"schedules": path})
    torch.testing.assert_close(model(X, Y), rows(X, Y))


def test_the_hash_is_the_same_in_another_process_and_under_other_names(workload: str) -> None:
    text = (
        "import torch, torch_mlc\n"
        "def other_name(p, q):\n    return torch.relu(p * q).sum(dim=1)\n"
        "print(torch_mlc.explain(other_name, torch.randn(37, 50), torch.randn(50)).kernels[0].workload)\n"
    )
    assert warm_processes.start(text).output().strip() == workload


def test_an_illegal_schedule_names_hash_file_and_line(workload: str, script: Callable[[str], Path]) -> None:
    path = script(body(workload, 's.split("b0_r0", [None, 8])', 's.parallel("b0_r0_0")'))
    with pytest.raises(torch_mlc.ScheduleError) as caught:
        torch_mlc.explain(rows, X, Y, options={"schedules": path})
    text = str(caught.value)
    assert workload[:12] in text and f"{path}:5" in text and "parallel(b0_r0_0): b0 reduces over it" in text
    assert "for b0_r0_0 in serial" in text
    # The graph does not run in eager in its place.
    with pytest.raises(Exception, match="ScheduleError"):
        torch.compile(rows, backend="mlc", options={"schedules": path, "strict": False})(X, Y)


def test_code_that_does_not_compile_is_an_error_without_strict_too(workload: str) -> None:
    options = {"schedules": {workload: lambda s: s.bind("b0_i0", "blockIdx.x")}, "strict": False}
    with pytest.raises(Exception, match="makes a kernel that does not compile for cpu"):
        torch.compile(rows, backend="mlc", options=options)(X, Y)


def test_an_edit_is_seen_and_an_equal_schedule_is_found_in_the_cache(
    workload: str, script: Callable[[str], Path]
) -> None:
    def compiled(text: str) -> dict[str, int]:
        torch._dynamo.reset()
        before = counters.snapshot()
        model = torch.compile(rows, backend="mlc", options={"schedules": script(text)})
        torch.testing.assert_close(model(X, Y), rows(X, Y))
        after = counters.snapshot()
        return {k: after.get(k, 0) - before.get(k, 0) for k in ("graph_cache_hits", "kernels_generated")}

    first = body(workload, 's.split("b0_i0", [None, 4])', target="cpu")
    assert compiled(first) == {"graph_cache_hits": 0, "kernels_generated": 1}
    assert compiled(first) == {"graph_cache_hits": 1, "kernels_generated": 0}
    assert compiled("# a comment\n" + first) == {"graph_cache_hits": 0, "kernels_generated": 0}
    assert compiled(first.replace("None, 4", "None, 5")) == {"graph_cache_hits": 0, "kernels_generated": 1}


def test_a_function_of_a_mapping_is_asked_each_time(workload: str) -> None:
    asked = []

    def by_hand(s: torch_mlc.Schedule) -> None:
        asked.append(s)
        s.split("b0_i0", [None, 6])

    for k in (1, 2):
        torch._dynamo.reset()
        torch.compile(rows, backend="mlc", options={"schedules": {workload: by_hand}})(X, Y)
        assert len(asked) == k


def test_traces_from_json(workload: str, tmp_path: Path) -> None:
    s = torch_mlc.Schedule(torch_mlc.explain(rows, X, Y).kernels[0].nest)
    s.split("b0_i0", [None, 6])
    path = tmp_path / "traces.json"
    path.write_text(json.dumps({workload: json.loads(s.trace.to_json())}))
    (kernel,) = torch_mlc.explain(rows, X, Y, options={"schedules": path}).kernels
    assert kernel.scheduled == s.nest and kernel.rule == "override"


def test_the_script_of_a_report_makes_the_same_schedules(tmp_path: Path) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, 1), (x * 2).sum(0)

    for dynamic in (False, True):
        report = torch_mlc.explain(f, torch.randn(64, 129), dynamic=dynamic)
        path = tmp_path / "script.py"
        path.write_text(report.script)
        again = torch_mlc.explain(f, torch.randn(64, 129), dynamic=dynamic, options={"schedules": path})
        assert not again.unmatched and all(k.rule == "override" for k in again.kernels)
        assert [k.scheduled for k in again.kernels] == [k.scheduled for k in report.kernels]
        assert all(k.workload[:12] in str(again) for k in again.kernels)


def test_the_schedule_for_a_target_goes_before_one_for_all(workload: str, script: Callable[[str], Path]) -> None:
    kinds = ("", "cuda", "cuda:sm_90")
    found = load_overrides(script("".join(body(workload, "pass", target=t) for t in kinds)))
    for name, wanted in (("cpu", None), ("cuda:sm_80", "cuda"), ("cuda:sm_90", "cuda:sm_90")):
        override = found.find(workload, cpu_target() if name == "cpu" else gpu_target(name))
        assert override is not None and override.target == wanted
    twice = load_overrides(script(body(workload, "pass") + body(workload[:10], "pass")))
    with pytest.raises(OverrideError, match=r"schedules\.py:2.*schedules\.py:5.*both"):
        twice.find(workload, cpu_target())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('@torch_mlc.schedule("xyz")\ndef _(s): pass\n', r"schedules\.py:2: .*'xyz' is no workload's hash"),
        ("x = 1 +\n", r"schedules\.py:2: the script raised SyntaxError"),
        ("\n\nmissing\n", r"schedules\.py:4: the script raised NameError"),
        ("\n", "no schedule in it"),
    ],
)
def test_a_script_that_cannot_be_read(text: str, told: str, script: Callable[[str], Path]) -> None:
    with pytest.raises(OptionError, match=told):
        torch_mlc.explain(rows, X, Y, options={"schedules": script(text)})


@pytest.mark.parametrize("source", [3, "nowhere.py", "schedules.txt", {"abcdef12": 3}, {"x": print}])
def test_what_is_no_source_of_schedules(source: object) -> None:
    with pytest.raises(OptionError, match="schedules"):
        torch_mlc.explain(rows, X, Y, options={"schedules": source})


def test_a_schedule_for_no_kernel_is_warned_of_once(workload: str, script: Callable[[str], Path]) -> None:
    path = script(body("abcdef123456", "pass"))
    report = torch_mlc.explain(rows, X, Y, options={"schedules": path})
    assert len(report.unmatched) == 1 and f"abcdef123456 ({path}:2) is for no kernel" in str(report)
    with pytest.warns(OverrideWarning, match=r"abcdef123456 .*schedules\.py:2.* is for none of the kernels"):
        torch.compile(rows, backend="mlc", options={"schedules": path})(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(lambda x: x.sin(), backend="mlc", options={"schedules": path})(X)


def test_a_forward_graph_does_not_warn_of_what_may_be_for_its_backward() -> None:
    uses = OverrideUses()
    given = load_overrides({"abcdef": print, "fedcba": print})
    first, second = map(str, given.items)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uses.tell(given, [first], "forward", complete=False)
        uses.tell(given, [second], "backward", complete=True)
