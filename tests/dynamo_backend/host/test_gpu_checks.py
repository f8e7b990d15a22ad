"""A kernel that reads what it must not is told under its own name where launches are waited for, and where they are not
the error says so, over a driver that the CPU plays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dynamo_backend.played_programs import alternate, momentum, rand, same
from tests.runtime.played_driver import PlayedLibrary
from torch_mlc.codegen.host.capture import CapturePlan
from torch_mlc.dynamo_backend.compiling.compiled import with_captures
from torch_mlc.runtime.gpu.checks import launches_checked
from torch_mlc.runtime.gpu.driver import GpuDriverError
from torch_mlc.runtime.host.cuda_graphs import warn_once
from torch_mlc.runtime.settings.options import Options

pytest.importorskip("triton")
FORMS = pytest.mark.parametrize("form", ["python", "machine"])


def steps(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Three kernels of different names, in the middle the one that fails."""
    y = x.softmax(0)
    z = y.cumsum(1)
    return (z.sum(0),)


def kernels_of(b: Any) -> list[str]:
    """The names of a program's kernels in the order of their launches."""
    _, launched = b.run(b.python, rand(30, 20))
    return [x.kernel for x in launched]


@FORMS
def test_the_kernel_that_failed_is_named_with_what_it_was_given(both: Any, played: PlayedLibrary, form: str) -> None:
    b = both(steps, (30, 20), checked=True)
    names = kernels_of(b)
    assert len(set(names)) == len(names) >= 3
    for at, culprit in enumerate(names):
        played.illegal, played.broken = {culprit}, 0
        before = len(played.launches)
        with pytest.raises(GpuDriverError, match=rf"^{culprit}: failed while it ran: an illegal memory access") as told:
            getattr(b, form)([rand(30, 20)])
        text = str(told.value)
        assert "(cuda status 700) over a grid of (" in text and "launched before" not in text
        assert "float32[30, 20] at 0x" in text and "played_programs.py" not in text
        assert "test_gpu_checks.py" in text and "in steps: " in text
        assert len(played.launches) == before + at


@FORMS
def test_sizes_are_told_too(both: Any, played: PlayedLibrary, form: str) -> None:
    b = both(alternate, (30, 20), dynamic=True, checked=True)
    played.illegal = {kernels_of(b)[0]}
    with pytest.raises(GpuDriverError, match=r"float32\[s\d+, s\d+\] at 0x.*s\d+ = 7, s\d+ = 5"):
        getattr(b, form)([rand(7, 5)])


@FORMS
def test_each_launch_is_waited_for_on_its_stream(both: Any, played: PlayedLibrary, form: str) -> None:
    b = both(alternate, (30, 20), checked=True)
    x = rand(30, 20)
    for stream in (0, 9):
        played.stream = stream
        played.waits.clear()
        (result,), launched = b.run(getattr(b, form), x)
        torch.testing.assert_close(result, alternate(x)[0])
        assert played.waits == [stream] * len(launched)


@FORMS
def test_tables_are_checked(both: Any, played: PlayedLibrary, form: str) -> None:
    shapes = [(k + 2, 3) for k in range(6)]
    b = both(momentum, *shapes, *shapes, checked=True)
    args = [rand(*s) for s in (*shapes, *shapes)]
    _, launched = b.run(getattr(b, form), *args)
    assert len(played.waits) == len(launched)
    played.illegal = {launched[0].kernel}
    with pytest.raises(GpuDriverError, match=rf"^{launched[0].kernel}: failed while it ran.* a table of addresses"):
        getattr(b, form)(args)


@FORMS
def test_nothing_is_waited_for_in_a_capture(both: Any, played: PlayedLibrary, form: str) -> None:
    b = both(alternate, (30, 20), checked=True)
    kernels_of(b)
    played.waits.clear()
    played.capturing = True
    _, launched = b.run(getattr(b, form), rand(30, 20))
    assert launched and not played.waits


@FORMS
def test_otherwise_the_error_says_that_it_may_be_another_kernels(both: Any, played: PlayedLibrary, form: str) -> None:
    b = both(steps, (30, 20))
    names = kernels_of(b)
    same(b, lambda: (rand(30, 20),), steps, calls=1)
    assert not played.waits
    played.illegal = {names[0]}
    with pytest.raises(GpuDriverError, match=rf"^{names[1]}: could not launch .*illegal memory access") as told:
        getattr(b, form)([rand(30, 20)])
    assert "a kernel that was launched before may be the cause" in str(told.value)
    assert "MLC_VERIFY=1 or CUDA_LAUNCH_BLOCKING=1 waits for each launch" in str(told.value)


@FORMS
def test_loading_tells_of_kernels_launched_before_as_well(both: Any, played: PlayedLibrary, form: str) -> None:
    b = both(steps, (30, 20))
    played.context = 100
    played.broken = 700
    with pytest.raises(GpuDriverError, match=r"^fused_\w+: could not load .*launched before.*; from test_gpu_checks"):
        getattr(b, form)([rand(30, 20)])


@pytest.mark.parametrize(("environ", "verify", "checked"), [
    ({}, 0, False), ({}, 1, True), ({}, 2, True), ({"CUDA_LAUNCH_BLOCKING": "1"}, 0, True),
    ({"CUDA_LAUNCH_BLOCKING": "0"}, 0, False), ({"CUDA_LAUNCH_BLOCKING": ""}, 0, False),
    ({"HIP_LAUNCH_BLOCKING": "1"}, 0, True),
])  # fmt: skip
def test_what_asks_for_it(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], verify: int, checked: bool) -> None:
    for name in ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launches_checked(verify) == checked


def test_the_environment_is_enough(both: Any, played: PlayedLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    b = both(alternate, (30, 20))
    assert len(kernels_of(b)) == len(played.waits)


def test_launches_that_are_waited_for_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    def call(args: list[Any]) -> list[Any]:
        return args

    plan = CapturePlan("", "cuda:0", (0,))
    warn_once.cache_clear()
    assert with_captures(call, plan, Options(verify=1, cuda_graphs=True), False, "main", (), ()) is call
    (record,) = caplog.records
    assert "runs a graph without CUDA graphs: each launch is waited for (MLC_VERIFY" in record.getMessage()
