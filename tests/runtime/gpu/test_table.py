"""Kernels over a table of addresses: with several threads and streams, and inside of captures, each launch finds the
table that is its own."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Event
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from tests.runtime.played_memory import PlayedMemory
from tests.runtime.recording_device import Pool, RecordingDevice
from torch_mlc.codegen.host.capture import CapturePlan
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu.table import GpuTableKernel, _plan
from torch_mlc.runtime.gpu.table_memory import GpuMemory
from torch_mlc.runtime.host.cuda_graphs import graphed

N, M = symbol("s0"), symbol("s1")
Numbers = tuple[int, ...]


@dataclass
class Device:
    """A device with one current stream, whose launches over a table are read there and then."""

    stream: int = 0
    capturing: bool = False

    def __post_init__(self) -> None:
        self.memory = PlayedMemory(self)
        self.launches: list[tuple[list[Numbers], list[Numbers]]] = []

    def kernel(self) -> GpuTableKernel:
        """A kernel over two pointers and two sizes, of a program for each two elements of the first, by each of the
        second."""
        buffers = tuple(Buffer(x, (N, M), (M, sympy.S.One), DType.FLOAT32) for x in ("in0", "out0"))
        grid = (FloorDiv(N + 1, 2), M)
        source = KernelSource("k", "triton", "", buffers, ("s0", "s1"), grid, (("table", True),))
        made = GpuTableKernel(source, gpu_target("cuda:sm_90"), driver=object(), memory=self.memory)  # type: ignore[arg-type]
        made._kernel.launch = self.launch  # type: ignore[method-assign]
        return made

    def launch(self, device: int, aligned: tuple[bool, ...], grid: Numbers, where: Numbers, far: bool) -> None:
        self.memory.used(self.stream, *where)
        programs = words(ctypes.c_int32, where[1], grid[0], 4)
        rows = max(p[0] for p in programs) + 1
        self.launches.append((words(ctypes.c_int64, where[0], rows, 4), programs))


def words(kind: Any, address: int, rows: int, width: int) -> list[Numbers]:
    """Rows of numbers as they lie in memory."""
    row = kind * width
    size = ctypes.sizeof(row)
    return [tuple(row.from_address(address + k * size)) for k in range(rows)]


def expected(numbers: Numbers) -> tuple[list[Numbers], list[Numbers]]:
    rows = [numbers[k : k + 4] for k in range(0, len(numbers), 4)]
    return rows, [tuple(p) for p in _plan([(-(-n // 2), m, 1) for _, _, n, m in rows]).tolist()]


def numbers_of(start: int, *sizes: tuple[int, int]) -> Numbers:
    return tuple(x for k, (n, m) in enumerate(sizes) for x in (start + 32 * k, start + 32 * k + 16, n, m))


FIRST, SECOND = numbers_of(1 << 40, (4, 2), (3, 1)), numbers_of(1 << 41, (4, 2), (3, 1))
OTHER = numbers_of(1 << 42, (1, 1), (6, 3), (2, 2))


def test_what_is_the_same_is_copied_once() -> None:
    device = Device()
    kernel = device.kernel()
    for numbers in (FIRST, FIRST, SECOND, SECOND, OTHER, FIRST):
        kernel.at(0, len(numbers) // 4, *numbers)
        assert device.launches[-1] == expected(numbers)
    # The second has the programs of the first, which go by sizes.
    assert len(device.memory.uploads) == 2 + 1 + 2 + 2 and not device.memory.joins


def test_devices_have_their_own() -> None:
    device = Device()
    kernel = device.kernel()
    for numbers in (FIRST, SECOND, FIRST):
        for index, these in ((0, numbers), (1, OTHER)):
            kernel.at(index, len(these) // 4, *these)
            assert device.launches[-1] == expected(these)


def test_rows_without_programs_launch_nothing() -> None:
    device = Device()
    kernel = device.kernel()
    for _ in range(2):
        kernel.at(0, 2, *numbers_of(64, (0, 3), (4, 0)))
    assert not device.launches and not device.memory.uploads
    mixed = numbers_of(64, (0, 3), (4, 1), (2, 0), (1, 1))
    kernel.at(0, 4, *mixed)
    assert device.launches[-1] == expected(mixed)


# --- threads and streams ----------------------------------------------------------------------------------------------


def test_a_thread_that_comes_between_changes_nothing() -> None:
    """The first is in the middle of its copy when the second calls with other numbers, and goes on afterwards."""
    device = Device()
    kernel, copying, done = device.kernel(), Event(), Event()
    upload = device.memory.upload

    def slow(array: Any, index: int) -> torch.Tensor:
        if array.dtype.itemsize == 8 and array[0, 0] == FIRST[0]:
            copying.set()
            assert done.wait(60)
        return upload(array, index)

    device.memory.upload = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(kernel.at, 0, 2, *FIRST)
        assert copying.wait(60)
        for numbers in (OTHER, SECOND):
            kernel.at(0, len(numbers) // 4, *numbers)
            assert device.launches[-1] == expected(numbers)
        done.set()
        first.result(60)
    assert device.launches[-1] == expected(FIRST)


def test_threads_at_once() -> None:
    device = Device()
    kernel = device.kernel()
    calls = (FIRST, SECOND, OTHER)

    def work(k: int) -> None:
        for turn in range(60):
            numbers = calls[(k + turn) % 3]
            kernel.at(0, len(numbers) // 4, *numbers)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert len(device.launches) == 180
    for numbers in calls:
        assert device.launches.count(expected(numbers)) == 60


def test_another_stream_waits_once_for_the_copy_and_is_known_to_use_it() -> None:
    device = Device()
    kernel = device.kernel()
    for stream, numbers in ((1, FIRST), (2, FIRST), (2, FIRST), (1, FIRST), (3, SECOND), (1, SECOND), (2, SECOND)):
        device.stream = stream
        kernel.at(0, len(numbers) // 4, *numbers)
        assert device.launches[-1] == expected(numbers)
    assert device.memory.joins == [(2, 1), (3, 1), (1, 3), (2, 3)]


# --- captures ---------------------------------------------------------------------------------------------------------


class Captures(Device):
    """Launches are recorded too: what is replayed reads the table that is there then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorder = RecordingDevice()
        self.seen: list[torch.Tensor] = []

    def launch(self, device: int, aligned: tuple[bool, ...], grid: Numbers, where: Numbers, far: bool) -> None:
        self.memory.used(self.stream, *where)
        rows = [(torch.int64, where[0], 4 * self.rows), (torch.int32, where[1], 4 * grid[0])]
        # What a launch reads now, or where it is replayed.
        self.seen = [torch.empty(n, dtype=dtype) for dtype, _, n in rows]
        for seen, (dtype, address, n) in zip(self.seen, rows, strict=True):
            seen.copy_(at_address(dtype, address, n))

    def at(self, kernel: GpuTableKernel, numbers: Numbers) -> None:
        self.rows = len(numbers) // 4
        kernel.at(0, self.rows, *numbers)

    def found(self) -> tuple[list[Numbers], list[Numbers]]:
        table, programs = (s.view(-1, 4).tolist() for s in self.seen)
        return [tuple(r) for r in table], [tuple(r) for r in programs]


def at_address(dtype: torch.dtype, address: int, count: int) -> torch.Tensor:
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)


def captured_by_user(device: Captures, kernel: GpuTableKernel, pool: Pool, *calls: Numbers) -> tuple[Any, list[Any]]:
    """As ``torch.cuda.graph`` around a compiled function: work of the user's before, between and behind its launches,
    in memory that what is freed is taken from."""
    seen: list[list[torch.Tensor]] = []

    def run() -> list[torch.Tensor]:
        results = []
        for numbers in calls:
            results.append(torch.ones(64).exp().sum())
            device.at(kernel, numbers)
            seen.append(device.seen)
            results.append((torch.ones(200) * 3).exp())
        return results

    device.capturing = True
    graph, results = device.recorder.capture(run, pool)
    device.capturing = False
    return (graph, results), seen


def test_a_users_own_capture_holds_its_numbers() -> None:
    device = Captures()
    kernel, pool = device.kernel(), device.recorder.pool()
    device.at(kernel, FIRST)
    uploads = len(device.memory.uploads)
    # One that is on the device already, one that is not, and another capture from the same memory.
    kept = [captured_by_user(device, kernel, pool, FIRST, OTHER), captured_by_user(device, kernel, pool, SECOND)]
    assert len(device.memory.uploads) == uploads
    for numbers in (OTHER, SECOND, FIRST):
        device.at(kernel, numbers)
        assert device.found() == expected(numbers)
    for u in device.memory.uploads:
        u.memory.fill_(-7)  # as if it had been given to somebody else
    del kernel
    for turn in range(4):
        (graph, _), seen = kept[turn % 2]
        graph.replay()
        for numbers, (table, programs) in zip(((FIRST, OTHER), (SECOND,))[turn % 2], seen, strict=True):
            device.seen = [table, programs]
            assert device.found() == expected(numbers)


@pytest.mark.parametrize("sizes", [
    ((5, 1),), ((0, 1), (3, 3)), ((4, 4), (0, 7), (1, 2), (2, 0)), tuple((k % 5, k % 3) for k in range(40)),
])  # fmt: skip
def test_programs_that_the_device_writes_are_those_of_the_host(sizes: tuple[tuple[int, int], ...]) -> None:
    device = Device(capturing=True)
    numbers = numbers_of((1 << 47) + 16, *sizes)
    device.kernel().at(0, len(sizes), *numbers)
    rows, programs = expected(numbers)
    last = max(p[0] for p in programs)
    assert device.launches == [(rows[: last + 1], programs)]


def test_no_program_is_no_launch_in_a_capture_either() -> None:
    device = Device(capturing=True)
    device.kernel().at(0, 1, *numbers_of(64, (0, 3)))
    assert not device.launches


def test_one_of_our_captures_finds_its_tables_at_each_replay() -> None:
    """Intermediates of the capture had the memory that a table would have been given."""
    device = Captures()
    kernel = device.kernel()
    found: list[list[torch.Tensor]] = []

    def program(args: list[Any]) -> tuple[torch.Tensor, ...]:
        (x,) = args
        args.clear()
        y = (x * 2).exp()
        y = y + 1
        device.at(kernel, FIRST)
        z = y * 3
        device.at(kernel, OTHER)
        found.append(device.seen)
        return z, *device.seen

    call = graphed(program, CapturePlan("", "cpu", (0,)), lambda _: device.recorder, 4, "main")
    for turn in range(5):
        x = torch.randn(16)
        z, table, programs = call([x])
        torch.testing.assert_close(z, ((x * 2).exp() + 1) * 3)
        device.seen = [table, programs]
        assert device.found() == expected(OTHER)
        if turn > 1:
            device.at(kernel, SECOND)
    assert device.recorder.captures == 2 and device.recorder.replays == 4


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_tables_on_a_gpu_wait_for_nothing() -> None:
    memory = GpuMemory()
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(1 << 28)
        table = memory.upload(torch.arange(1000).numpy(), device)
        mark = memory.mark(device)
        assert not streams[0].query()  # the copy is behind work that goes on
    with torch.cuda.stream(streams[1]):
        memory.join([table], mark, device)
        total = table.sum()
        assert total.item() == 499500


@pytest.mark.gpu
def test_an_optimizer_in_a_users_own_capture_on_a_gpu() -> None:
    shapes = [(64, k + 3) for k in range(8)]

    def step(*tensors: torch.Tensor) -> None:
        half = len(tensors) // 2
        for p, g in zip(tensors[:half], tensors[half:], strict=True):
            p.sub_(0.1 * g.sign())

    fn = torch.compile(step, backend="mlc")
    for left, right in pairwise([[torch.randn(s, device="cuda") for s in (*shapes, *shapes)] for _ in range(3)]):
        fn(*[t.clone() for t in left])
        copies = [t.clone() for t in left]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn(*left)
        fn(*[t.clone() for t in right])  # other addresses
        for turn in range(3):
            graph.replay()
            step(*copies)
            torch.testing.assert_close(left, copies, msg=lambda m, turn=turn: f"replay {turn}: {m}")
