"""Copies between devices beside kernels, on streams that the CPU plays: in Python and in machine code they give what
eager gives, take less time by the clock, and leave alone what is still read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.dynamo_backend.played_programs import Both, load, rand
from tests.runtime.played_driver import FAILED, Launched, PlayedLibrary, played_code
from tests.runtime.played_streams import COPY, KERNEL, PlayedStreams, streams  # noqa: F401
from torch_mlc.codegen.host.steps.lines import Lines
from torch_mlc.codegen.host.steps.step import CallLibrary
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.compiling.compiled import Stages
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table
from torch_mlc.dynamo_backend.tracing.origins import lines_of
from torch_mlc.ir.graph.begun import BEGIN_COPY, is_begun_copy, is_copy_wait
from torch_mlc.runtime.gpu.driver import GpuDriverError
from torch_mlc.runtime.host import begun_copies
from torch_mlc.runtime.settings.options import Options

pytest.importorskip("triton")

Tensor = torch.Tensor
Function = Callable[..., tuple[Tensor, ...]]
SHAPE = (32, 24)
FORMS = ("python", "machine")


@pytest.fixture(autouse=True)
def small_copies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch_mlc.scheduler.calls.overlap_begun"], "WORTH_BEGINNING", 1.0)


@cache
def compiled(fn: Function, devices: tuple[str, ...], copy_streams: bool) -> tuple[Stages, Lines]:
    """A function of tensors on devices, of ``SHAPE``."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        gm = make_fx(fn, decomposition_table(), "fake")(*(torch.empty(SHAPE, device=d) for d in devices))
    options = Options.resolve(None, {"target": "cuda:sm_90", "copy_streams": copy_streams}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_source", played_code)
        stages = compile_graph(gm, (), options=options, load=False, fresh=True).stages
    assert stages is not None
    return stages, lines_of(gm)


@pytest.fixture
def mixed(played: PlayedLibrary, streams: PlayedStreams) -> Iterator[Callable[..., Both]]:  # noqa: F811
    """``mixed(fn, *devices, copy_streams=True)``: both forms, whose launches the clock of the streams sees."""

    class Timed(list[Launched]):
        def append(self, one: Launched) -> None:
            super().append(one)
            streams.launch(one.kernel)

    played.launches = Timed()

    def make(fn: Function, *devices: str, copy_streams: bool = True, machine_code: bool = True) -> Both:
        stages, lines = compiled(fn, devices, copy_streams)
        ops = {"aten::_to_copy.default": streams.in_order}
        return load(played, stages, lines, constants=ops, machine_code=machine_code)

    yield make
    assert begun_copies._CALLS.now is None


def begun(b: Both) -> tuple[int, int]:
    """Copies that a program begins, and its waits."""
    nodes = [s.node for s in b.program.steps if isinstance(s, CallLibrary)]
    return sum(map(is_begun_copy, nodes)), sum(map(is_copy_wait, nodes))


def run(b: Both, form: str, *args: Tensor) -> list[Any]:
    return b.run(getattr(b, form), *args)[0]


def rows(x: Tensor, turns: int = 2) -> Tensor:
    """Kernels that cannot be one."""
    for _ in range(turns):
        x = x.softmax(0).softmax(1)
    return x


def down(x: Tensor) -> tuple[Tensor, ...]:
    """What is copied to the host is read on by kernels that do not wait for it."""
    a = rows(x)
    return a.to("cpu"), rows(a), a


def on_cpu(fn: Function) -> Function:
    """The same on one device."""

    def moved(*args: Tensor) -> tuple[Tensor, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "to", lambda t, *_, **__: t.clone())
            return fn(*args)

    return moved


@pytest.mark.parametrize("form", FORMS)
def test_a_result_comes_to_the_host_while_kernels_run(mixed, streams, form):  # noqa: F811
    x = rand(*SHAPE)
    b = mixed(down, "cuda:0")
    assert begun(b) == (1, 1)
    torch.testing.assert_close(run(b, form, x), list(on_cpu(down)(x)))
    kinds = [e[0] for e in streams.log]
    assert kinds.index("mark") < len(kinds) - 1 - kinds[::-1].index("launch") < kinds.index("send")
    assert kinds.count("finish") == 1 and kinds[-1] == "finish", "the host waits once, at the end"
    overlapped = streams.time
    streams.__init__()
    serial = mixed(down, "cuda:0", copy_streams=False)
    assert begun(serial) == (0, 0)
    torch.testing.assert_close(run(serial, "python", x), list(on_cpu(down)(x)))
    assert overlapped <= streams.time - min(COPY, 3 * KERNEL)


def several(x: Tensor) -> tuple[Tensor, ...]:
    a = rows(x)
    first, b = a.to("cpu"), rows(a)
    second, c = b.to("cpu"), rows(b)
    return first, second, c.to("cpu", torch.float64), a, b, c


@pytest.mark.parametrize("form", FORMS)
def test_several_copies_share_one_wait_of_the_host(mixed, streams, form):  # noqa: F811
    x = rand(*SHAPE)
    b = mixed(several, "cuda:0")
    assert begun(b)[0] == 3
    got = run(b, form, x)
    torch.testing.assert_close(got, [t.double() if k == 2 else t for k, t in enumerate(on_cpu(several)(x))])
    assert len(streams.events("finish")) == 1 and len(streams.events("send")) == 3
    assert streams.time == 12 * KERNEL + COPY, "only the last is not hidden"


def up(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What a late kernel reads comes from the host."""
    return (rows(x, 3) + w.to("cuda:0"),)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pinned", [False, True])
def test_weights_come_while_kernels_run(mixed, streams, form, pinned):  # noqa: F811
    """From pinned memory as soon as the program begins, else when its kernels are launched."""
    x, w = rand(*SHAPE), rand(*SHAPE)
    streams.on_host(w, pinned=pinned)
    b = mixed(up, "cuda:0", "cpu")
    assert begun(b) == (1, 1)
    torch.testing.assert_close(run(b, form, x, w), list(on_cpu(up)(x, w)))
    kinds = [e[0] for e in streams.log if e[0] in ("send", "launch", "wait")]
    before = kinds[: kinds.index("send")].count("launch")
    assert (before == 0) if pinned else (before >= 3)
    assert kinds[-2:] == ["wait", "launch"]
    assert streams.log[-1] == ("finish",), "the caller may write to its tensor"


def up_early(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (rows(x, 3) + w.to("cuda:0", non_blocking=True),)


def test_who_does_not_block_is_not_waited_for(mixed, streams):  # noqa: F811
    x, w = rand(*SHAPE), rand(*SHAPE)
    streams.on_host(w, pinned=True)
    torch.testing.assert_close(run(mixed(up_early, "cuda:0", "cpu"), "python", x, w), list(on_cpu(up)(x, w)))
    assert not streams.events("finish") and len(streams.events("wait")) == 1


def down_early(x: Tensor) -> tuple[Tensor, ...]:
    a = rows(x)
    return a.to("cpu", non_blocking=True), rows(a), a


def test_a_result_that_nobody_waits_for_is_pinned_and_ordered(mixed, streams):  # noqa: F811
    """As eager: whoever waits for the current stream has it."""
    x = rand(*SHAPE)
    got = run(mixed(down_early, "cuda:0"), "python", x)
    torch.testing.assert_close(got, list(on_cpu(down)(x)))
    assert streams.is_pinned(got[0]) and not streams.events("finish")
    kinds = [e[0] for e in streams.log]
    assert kinds.index("send") < len(kinds) - 1 - kinds[::-1].index("launch"), "begun before the last kernel"
    assert "wait" in kinds[kinds.index("send") :]


def across(x: Tensor) -> tuple[Tensor, ...]:
    a = rows(x)
    there = a.to("cuda:1")
    return rows(a), there


def test_between_gpus_both_wait_for_the_copy(mixed, streams):  # noqa: F811
    x = rand(*SHAPE)
    b = mixed(across, "cuda:0", machine_code=False)
    assert begun(b) == (1, 1)
    torch.testing.assert_close(run(b, "python", x), list(on_cpu(across)(x)))
    gpus = {torch.device("cuda", 0), torch.device("cuda", 1)}
    assert {e[1] for e in streams.events("wait")} == {e[1] for e in streams.events("mark")} == gpus


def at_once(x: Tensor) -> tuple[Tensor, ...]:
    return (rows(rows(x).to("cpu")),)


def test_a_copy_whose_reader_follows_has_no_stream(mixed):
    assert begun(mixed(at_once, "cuda:0")) == (0, 0)


def read_on_host(x: Tensor) -> tuple[Tensor, ...]:
    a = rows(x)
    h = a.to("cpu")
    b = rows(a)
    return h.exp() + 1, b


@pytest.mark.parametrize("form", FORMS)
def test_kernels_of_the_host_wait_for_what_they_read(mixed, streams, form):  # noqa: F811
    x = rand(*SHAPE)
    b = mixed(read_on_host, "cuda:0")
    assert begun(b)[0] == 1
    torch.testing.assert_close(run(b, form, x), list(on_cpu(read_on_host)(x)))
    assert len(streams.events("finish")) == 1


def written(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = rows(x, 3) + w.to("cuda:0")
    torch.ops.aten.copy_.default(w, w * 2)
    return (y,)


def test_what_is_written_over_is_copied_before(mixed, streams):  # noqa: F811
    """The host waits in the program, before it writes to the caller's pinned tensor."""
    x, w = rand(*SHAPE), rand(*SHAPE)
    streams.on_host(w, pinned=True)
    expected = rows(x, 3) + w
    b, doubled = mixed(written, "cuda:0", "cpu"), w * 2
    assert begun(b) == (1, 1)
    torch.testing.assert_close(run(b, "python", x, w), [expected])
    torch.testing.assert_close(w, doubled)
    assert len(streams.events("finish")) == 1
    waits = [s.node for s in b.program.steps if isinstance(s, CallLibrary) and is_copy_wait(s.node)]
    assert [w.args[1] for w in waits] == [True], "the host waits there, and not when the program has run"


@pytest.mark.parametrize("form", FORMS)
def test_an_error_in_the_middle_waits_for_what_was_begun(mixed, streams, played, form):  # noqa: F811
    x, w = rand(*SHAPE), rand(*SHAPE)
    streams.on_host(w, pinned=True)
    b = mixed(up, "cuda:0", "cpu")
    played.forever = FAILED
    with pytest.raises(GpuDriverError):
        getattr(b, form)([x, w])
    kinds = [e[0] for e in streams.log]
    assert kinds.index("send") < kinds.index("wait") < kinds.index("finish")
    assert begun_copies._CALLS.now is None
    played.forever = 0
    torch.testing.assert_close(run(b, form, x, w), list(on_cpu(up)(x, w)))


def test_in_somebody_elses_capture_copies_keep_their_place(mixed, streams):  # noqa: F811
    x = rand(*SHAPE)
    streams.captures = True
    torch.testing.assert_close(run(mixed(down, "cuda:0"), "python", x), list(on_cpu(down)(x)))
    assert not streams.events("mark", "send", "wait", "finish") and len(streams.events("copy")) == 1


@pytest.mark.parametrize("form", FORMS)
def test_threads_wait_for_their_own(mixed, form):
    b = mixed(down, "cuda:0")
    xs = [rand(*SHAPE) for _ in range(3)]
    expected = [on_cpu(down)(x) for x in xs]
    barrier = threading.Barrier(3)

    def work(k: int) -> None:
        barrier.wait()
        for _ in range(4):
            torch.testing.assert_close(list(getattr(b, form)([xs[k]])), list(expected[k]))
        assert begun_copies._CALLS.now is None

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


def test_programs_of_one_device_are_as_before():
    def alone(x: Tensor) -> tuple[Tensor, ...]:
        return rows(x), x.to("cpu", torch.float64)

    texts = []
    for on in (True, False):
        stages, _ = compiled(alone, ("cpu",), on)
        texts.append([s.node.target for s in stages.program.steps if isinstance(s, CallLibrary)])
        assert not any(s.name == "overlap_begun" and s.changed for s in stages.steps if hasattr(s, "changed"))
    assert texts[0] == texts[1] and not any("begin" in t for t in texts[0])


# --- alone ------------------------------------------------------------------------------------------------------------


def test_the_host_waits_for_the_copy_that_was_made_last(streams):  # noqa: F811
    """Whatever the order of the waits."""
    one, two = streams.on_host(rand(3), rand(3), pinned=True)

    def program(args: list[Any]) -> tuple[Tensor, ...]:
        a, b = (begun_copies.begin_copy(t, device="cuda:0") for t in (one, two))
        begun_copies.wait_copies([b], False)
        begun_copies.wait_copies([a], False)
        assert streams.host == 0
        return a, b

    got = begun_copies.waited_for(program, [BEGIN_COPY])([])
    torch.testing.assert_close(list(got), [one, two])
    assert streams.host == 2 * COPY and len(streams.events("finish")) == 1


def test_as_ops_they_have_fakes():
    with FakeTensorMode():
        x = torch.empty(3, 4, 5, device="cuda:0").transpose(0, 1)
        h = torch.ops.mlc.begin_copy(x, device=torch.device("cpu"), dtype=torch.float64)
        (w,) = torch.ops.mlc.wait_copies([h], True)
    assert (w.device.type, w.dtype, w.stride()) == ("cpu", torch.float64, x.stride())


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("form", ["python", "native"])
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_on_a_gpu(form, pinned):
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = rows(x)
        h = a.to("cpu")
        b = rows(a) + w.to("cuda")
        return h, b, b.to("cpu"), rows(b)

    fn = torch.compile(step, backend="mlc", options={"host_program": form})
    for turn in range(20):
        x, w = rand(2048, 2048).cuda(), rand(2048, 2048)
        w = w.pin_memory() if pinned else w
        expected = [t.clone() for t in step(x, w)]
        got = fn(x, w)
        w.fill_(turn)  # the call has read it
        for t in got:
            assert t.device.type == "cuda" or not t.is_pinned()
        torch.testing.assert_close(list(got), expected, rtol=1e-4, atol=1e-5)
