"""Captured programs, on a device that the CPU plays (``recording_device.py``), and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sympy
import torch

from tests.runtime.played_driver import PlayedLibrary
from tests.runtime.recording_device import RecordingDevice
from torch_mlc.codegen.host.capture import CapturePlan
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu.capture import capturing, graph_device
from torch_mlc.runtime.gpu.table import GpuTableKernel
from torch_mlc.runtime.host.cuda_graphs import graphed, warn_once

Program = Callable[[list[Any]], Sequence[Any]]
TWO = CapturePlan("", "cpu", (0, 1), (1,))


class Counted:
    """A program that says how often it ran."""

    def __init__(self, run: Callable[..., Sequence[Any]]) -> None:
        self.run, self.calls = run, 0

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        self.calls += 1
        given = list(args)
        args.clear()
        return self.run(*given)


def made(run: Callable[..., Sequence[Any]], plan: CapturePlan, limit: int = 4) -> tuple[Any, Counted, RecordingDevice]:
    device, program = RecordingDevice(), Counted(run)
    return graphed(program, plan, lambda name: device, limit, "main"), program, device


def test_the_third_call_is_a_replay_over_new_arguments():
    call, program, device = made(lambda x, w: (x @ w,), TWO)
    w = torch.randn(3, 3)
    for turn in range(5):
        x = torch.randn(2, 3)
        args = [x, w]
        (result,) = call(args)
        torch.testing.assert_close(result, x @ w)
        assert args == []
        if turn == 2:
            with torch.no_grad():
                w.mul_(2)  # an optimizer's step, between replays
    assert (program.calls, device.captures, device.replays) == (2, 1, 4)


def test_results_are_copies():
    call, _, _ = made(lambda x, w: (x + w,), TWO)
    w = torch.ones(3)
    results = [call([torch.full((3,), float(n)), w])[0] for n in range(4)]
    assert [r[0].item() for r in results] == [1, 2, 3, 4]
    assert len({r.data_ptr() for r in results}) == 4


def test_results_that_share_memory_go_on_sharing_it():
    def run(x, w):
        y = x * w
        return y, y[1:], y.view(torch.int32)[2:], y.t(), (x + 1).expand(2, 3, 3)

    call, _, device = made(run, TWO)
    for _ in range(3):
        x, w = torch.randn(3, 3), torch.randn(3, 3)
        results = call([x, w]) if device.captures else call([x, w_ := w])
    w = w if device.captures else w_
    for _ in range(2):
        x = torch.randn(3, 3)
        y, tail, bits, turned, wide = call([x, w])
        torch.testing.assert_close(y, x * w)
        y.fill_(5)
        assert tail.eq(5).all() and turned.eq(5).all() and bits.view(torch.float32).eq(5).all()
        torch.testing.assert_close(wide, (x + 1).expand(2, 3, 3))
    assert len(results) == 5


def test_what_is_an_argument_stays_that_argument():
    call, _, device = made(lambda x, w: (x, w.t(), w, None, 7), TWO)
    w = torch.randn(2, 3)
    for _ in range(3):
        x = torch.randn(4)
        same, turned, parameter, nothing, number = call([x, w])
        assert same is x and parameter is w and nothing is None and number == 7
        assert turned.data_ptr() == w.data_ptr() and turned.shape == (3, 2)
    assert device.captures == 1


def test_writing_to_arguments_happens_once_a_call():
    def run(x, w):
        x.add_(1)
        w.mul_(2)
        return (x.sum() + w.sum(),)

    call, _, device = made(run, CapturePlan("", "cpu", (0, 1), (1,), (0, 1)))
    w = torch.ones(2)
    for turn in range(4):
        x = torch.zeros(3)
        version = x._version
        (result,) = call([x, w])
        assert x.tolist() == [1, 1, 1] and w.tolist() == [2.0 ** (turn + 1)] * 2
        assert result.item() == 3 + 2 * 2.0 ** (turn + 1)
        assert turn == 0 or x._version == version
    assert device.captures == 1


@pytest.mark.parametrize("make", [
    lambda: torch.randn(1, 5).expand(4, 5),
    lambda: torch.randn(9).as_strided((4, 3), (2, 1)),
    lambda: torch.randn(7, 4).t()[::2],
    lambda: torch.randn(0, 3),
    lambda: torch.tensor(3.0),
])  # fmt: skip
def test_arguments_of_every_layout_are_copied(make):
    call, _, device = made(lambda x: (x * 2, x.sum()), CapturePlan("", "cpu", (0,)))
    for _ in range(3):
        x = make()
        double, total = call([x])
        torch.testing.assert_close(double, x * 2)
        torch.testing.assert_close(total, x.sum())
    assert device.captures == 1


def test_each_size_and_each_address_of_a_parameter_has_its_capture_up_to_the_limit(caplog):
    plan = CapturePlan("", "cpu", (1, 2), (2,), symbolic=(1,))
    call, _, device = made(lambda n, x, w: (x[:n] * w,), plan, limit=3)
    first, second = torch.tensor(2.0), torch.tensor(3.0)
    for w, length, n in [(first, 4, 2), (second, 4, 2), (first, 5, 2), (first, 4, 1)] * 3:
        x = torch.randn(length)
        torch.testing.assert_close(call([n, x, w])[0], x[:n] * w)
    assert device.captures == 3
    assert [r.getMessage() for r in caplog.records] == [
        "main runs without further CUDA graphs: 3 combinations of sizes and addresses are captured (cuda_graph_shapes)"
    ]


def test_sizes_that_never_come_again_are_given_up(caplog):
    call, program, device = made(lambda n, x: (x[:n],), CapturePlan("", "cpu", (1,)), limit=1)
    x = torch.randn(100)
    for n in range(40):
        torch.testing.assert_close(call([n, x])[0], x[:n])
    assert program.calls == 40 and device.captures == 0 and len(caplog.records) == 1


def test_what_forbids_a_capture_is_told_once_and_the_program_goes_on(caplog):
    def run(x, w):
        return (x * w if torch.equal(x, x) else x,)

    call, _, device = made(run, TWO)
    w = torch.randn(3)
    for _ in range(4):
        x = torch.randn(3)
        torch.testing.assert_close(call([x, w])[0], x * w)
    assert device.captures == 0 and device.replays == 0
    (record,) = caplog.records
    assert "main runs without CUDA graphs: capturing it failed: RuntimeError: operation not" in record.getMessage()


def test_a_plan_with_a_reason_leaves_the_program(caplog):
    device, program = RecordingDevice(), Counted(lambda x: (x,))
    reason = "input x is on the device cpu"
    warn_once.cache_clear()
    for name in ("main", "other"):
        assert graphed(program, CapturePlan(reason), lambda name: device, 4, name) is program
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert told == [f"torch-mlc runs a graph without CUDA graphs: {reason}"]


def test_inside_of_a_capture_of_the_users_nothing_else_is_captured():
    call, program, device = made(lambda x, w: (x + w,), TWO)
    device.busy = True
    for _ in range(3):
        call([torch.ones(1), torch.ones(1)])
    assert (program.calls, device.captures) == (3, 0)


def test_random_numbers_go_on_from_the_seed():
    call, _, device = made(lambda x, w: (x + torch.rand(4),), TWO)
    w, x = torch.zeros(1), torch.zeros(4)
    for _ in range(2):
        torch.manual_seed(3)
        expected = [torch.rand(4) for _ in range(4)]
        torch.manual_seed(3)
        for value in expected:
            torch.testing.assert_close(call([x, w])[0], value)
    assert device.captures == 1


def test_a_capture_serves_calls_in_inference_mode_and_outside_of_it():
    def run(x, w):
        x.add_(1)
        return x * w, w[1:]

    call, _, device = made(run, CapturePlan("", "cpu", (0, 1), (1,), (0,)))
    w = torch.randn(3)
    for mode in (True, True, False, True, False):
        with torch.inference_mode(mode):
            x = torch.zeros(3)
            result, tail = call([x, w])
            assert x.tolist() == [1, 1, 1] and result.is_inference() == mode
            torch.testing.assert_close((result, tail), (w, w[1:]))
    assert device.captures == 1


# --- forward and backward ---------------------------------------------------------------------------------------------


def pair() -> tuple[Any, Any, RecordingDevice, tuple[Counted, Counted]]:
    """y = exp(x) * w as a forward graph that saves exp(x) and w, and its backward."""
    device = RecordingDevice()

    def forward(x, w):
        e = x.exp()
        return e * w, e, w

    def backward(e, w, grad):
        return grad * w * e, (grad * e).sum()

    programs = Counted(forward), Counted(backward)
    first = graphed(programs[0], CapturePlan("", "cpu", (0, 1), (1,), saved=1), lambda name: device, 4, "forward")
    second = graphed(programs[1], CapturePlan("", "cpu", (0, 1, 2)), lambda name: device, 4, "backward")
    return first, second, device, programs


def test_what_is_saved_stays_in_the_forwards_memory_and_is_read_there():
    forward, backward, device, programs = pair()
    w, places = torch.tensor(3.0), set()
    for turn in range(6):
        x, grad = torch.randn(5), torch.randn(5)
        y, *saved = forward([x, w])
        if turn >= 2:
            places.add(saved[0].data_ptr())
            assert saved[0].data_ptr() in device.addresses
        gx, gw = backward([*saved, grad])
        del saved
        torch.testing.assert_close(y, x.exp() * w)
        torch.testing.assert_close(gx, grad * w * x.exp())
        torch.testing.assert_close(gw, (grad * x.exp()).sum())
    assert len(places) == 1
    # The backward saw ordinary memory first, then the forward's.
    assert [p.calls for p in programs] == [2, 3] and device.captures == 2


def test_a_forward_whose_saved_results_are_in_use_leaves_them_alone():
    forward, backward, device, _ = pair()
    w = torch.tensor(2.0)
    for _ in range(4):
        calls = []
        for _ in range(3):  # three forward passes, then their backward passes
            x = torch.randn(5)
            calls.append((x, forward([x, w])[1:]))
        for x, saved in calls:
            gx, _ = backward([*saved, torch.ones(5)])
            torch.testing.assert_close(gx, w * x.exp())
        calls.clear()
        del saved
    assert device.captures >= 2


def test_addresses_are_forgotten_with_the_program():
    forward, _, device, _ = pair()
    w = torch.tensor(2.0)
    for _ in range(3):
        saved = forward([torch.randn(5), w])[1:]
    place = saved[0].data_ptr()
    assert place in device.addresses and w.data_ptr() in device.addresses
    kept = saved[0].clone()
    del forward
    assert place not in device.addresses and w.data_ptr() not in device.addresses
    torch.testing.assert_close(saved[0], kept)


# --- streams and threads ----------------------------------------------------------------------------------------------


def test_a_replay_on_another_stream_waits_for_the_last_one():
    call, _, device = made(lambda x, w: (x + w,), TWO)
    for stream in (0, 0, 1, 1, 0):
        device.current = stream
        call([torch.ones(2), torch.ones(2)])
    assert device.waits == [(1, 0), (0, 1)]


def test_memory_of_a_capture_is_let_be_until_all_streams_have_used_it():
    call, _, device = made(lambda x, w: (x + w,), TWO)
    w = torch.ones(2)
    for stream in (0, 0, 0, 1, 1, 0, 1, 2):
        device.current = stream
        call([torch.ones(2), w])
    # The buffer of the one argument that is copied, once for each stream but the one that asked for it.
    assert [stream for stream, _ in device.kept] == [1, 2] and len({at for _, at in device.kept}) == 1


def test_threads_share_a_capture():
    call, _, device = made(lambda x, w: (x * w,), TWO)
    w, wrong = torch.tensor(3.0), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(64, generator=generator)
            if not torch.equal(call([x, w])[0], x * w):
                wrong.append(seed)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong and device.captures == 1


# --- kernels over tables ----------------------------------------------------------------------------------------------


def test_a_kernel_over_a_table_gets_its_table_after_the_capture():
    n = symbol("s0")
    buffers = tuple(Buffer(x, (n,), (sympy.S.One,), DType.FLOAT32) for x in ("in0", "out0"))
    source = KernelSource("k", "triton", "", buffers, ("s0",), (n,), (("table", True),))
    launched: list[tuple[int, ...]] = []
    kernel = GpuTableKernel(
        source, gpu_target("cuda:sm_90"), driver=object(), memory=PlayedLibrary().memory
    )  # fmt: skip
    kernel._kernel.launch = lambda device, aligned, grid, arguments, far: launched.append((*grid, *arguments))
    tensors, sizes = [torch.ones(4), torch.ones(4), torch.ones(2), torch.ones(2)], (4, 2)
    kernel(2, tensors, sizes)
    ordinary = kernel.record(-1)
    rows = [[tensors[k].data_ptr(), tensors[k + 1].data_ptr(), sizes[k // 2]] for k in (0, 2)]
    with capturing() as tried:
        kernel(2, tensors, sizes)
    assert not tried.is_whole
    rooms = [make() for make in tried.asked]
    with capturing(rooms) as capture:
        kernel(2, tensors, sizes)
        table, programs = capture.rooms
        assert launched[-1] == (6, 1, 1, table.data_ptr(), programs.data_ptr())
        assert table.eq(-1).all() and programs.eq(-1).all()
    assert table.tolist() == rows and programs[:, 0].tolist() == [0] * 4 + [1] * 2
    assert kernel.record(-1) is ordinary


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_replays_on_a_gpu():
    device = graph_device("cuda:0")
    program = Counted(lambda x, w: (torch.relu(x @ w) + torch.rand(4, 8, device="cuda"), x.exp()))
    plan = CapturePlan("", "cuda:0", (0, 1), (1,), saved=1)
    call = graphed(program, plan, lambda name: device, 4, "main")
    w = torch.randn(16, 8, device="cuda")
    for turn in range(5):
        x = torch.randn(4, 16, device="cuda")
        torch.manual_seed(turn)
        expected = torch.relu(x @ w) + torch.rand(4, 8, device="cuda")
        torch.manual_seed(turn)
        result, saved = call([x, w])
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(saved, x.exp())
        del saved
    assert program.calls == 2
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.testing.assert_close(call([x, w])[1], x.exp())


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_gpu_usable():
    def run(x):
        return (x * x.sum().item(),)

    call = graphed(Counted(run), CapturePlan("", "cuda:0", (0,)), graph_device, 4, "main")
    for _ in range(3):
        x = torch.randn(64, device="cuda")
        torch.testing.assert_close(call([x])[0], x * x.sum())
    assert torch.rand(4, device="cuda").isfinite().all()
