"""Checks of a GPU: its driver, programs on it, threads, streams, CUDA graphs, and how fast memory is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import MlcError
from ...ir.target import TargetError
from ...runtime.counters import counters
from ...runtime.gpu.context import GpuGuard
from ...runtime.gpu.driver import GpuDriverError, driver_of
from ...runtime.gpu.libraries import NoGpuLibrary, load_driver_library
from ...runtime.targets import target_for
from ...runtime.triton.architectures import check_architecture
from .finding import Row, row
from .on_cpu import OPTIONS, program
from .programs import PROGRAMS, run

# A GPU copies at 90 % of its data sheet's rate and more. Below this something else is on it, or it is throttled.
_COPY_SHARE = 0.75
# What a sum of two tensors reaches of a copy's rate.
_ADD_SHARE = 0.8
_COPY_BYTES = 1 << 29
DEVICE = "cuda"
_TIMED_CALLS = 20
_GRAPH_CALLS = 6


def driver() -> Iterator[Row]:
    """Whether there is a driver, a GPU, and a torch that knows it."""
    kind = "hip" if torch.version.hip is not None else "cuda"
    library = _library()
    if not torch.cuda.is_available():
        if not library:
            yield row("not done", "no GPU and no driver here: nothing is launched", gpu=False)
        elif torch.version.cuda is None and torch.version.hip is None:
            found = f"{library} is here, but this torch ({torch.__version__}) is built for CPUs alone"
            yield row("failed", found, "install a torch that is built for CUDA or ROCm (pytorch.org)", gpu=False)
        else:
            yield row("failed", f"{library} is here, but torch sees no GPU",
                      "look at nvidia-smi or rocm-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough for "
                      f"CUDA {torch.version.cuda or torch.version.hip}", gpu=False)  # fmt: skip
        return
    properties = torch.cuda.get_device_properties(0)
    try:
        target = target_for("cuda")
        check_architecture(target)
    except TargetError as error:
        mend = "Triton makes no code for this GPU: an older or a newer Triton may"
        yield row("failed", f"{properties.name}: {error}", mend, gpu=False)
        return
    count = torch.cuda.device_count()
    others = f", and {count - 1} more" if count > 1 else ""
    yield row(
        "ok", f"{properties.name}, {target.arch}, {target.cores} multiprocessors, "
        f"{properties.total_memory / 1e9:.0f} GB{others}; {kind} {torch.version.cuda or torch.version.hip}",
        gpu=True, name=properties.name, target=str(target), count=count,
    )  # fmt: skip


def _library() -> str:
    """The driver library that is here, "" for none."""
    for kind in ("cuda", "hip"):
        try:
            load_driver_library(kind)
        except NoGpuLibrary:
            continue
        return f"{kind}'s driver library"
    return ""


def context() -> Iterator[Row]:
    """A context, made and taken by a thread that has none."""
    found: list[str] = []

    def use() -> None:
        try:
            driver_of("hip" if torch.version.hip is not None else "cuda")
            with GpuGuard(0):
                torch.zeros(8, device=DEVICE).add_(1).sum().item()
        except (GpuDriverError, RuntimeError) as error:
            found.append(str(error).splitlines()[0])

    in_thread(use)
    if found:
        yield row("failed", found[0], "look at nvidia-smi: another process may have the GPU to itself, or it is reset")
    else:
        yield row("ok", "a thread without one was given it")


def in_thread(call: Callable[[], None]) -> None:
    """Run a call in a thread of its own, and raise what it raises."""
    raised: list[BaseException] = []

    def inside() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def backward_in_a_thread() -> Iterator[Row]:
    """Training in a thread that has used no GPU, whose backward runs in autograd's."""
    outcome = run(PROGRAMS["training step"], DEVICE, OPTIONS, around=in_thread)
    yield row("ok", f"as eager: error {outcome.error:.0e} of at most {outcome.limit:.0e}", error=outcome.error)


def two_streams() -> Iterator[Row]:
    """Calls on two streams in turn, whose results do not mix."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    turn = 0

    def on_a_stream(call: Callable[[], None]) -> None:
        nonlocal turn
        stream = streams[turn % 2]
        turn += 1
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)

    outcomes = [run(PROGRAMS[name], DEVICE, OPTIONS, calls=6, around=on_a_stream) for name in ("softmax", "product")]
    worst = max(outcomes, key=lambda o: o.error / o.limit)
    yield row("ok", f"{turn} calls, as eager: error {worst.error:.0e} of at most {worst.limit:.0e}", calls=turn)


def graph_capture() -> Iterator[Row]:
    """CUDA graphs: calls beyond the third replay what was captured."""
    if torch.version.hip is not None:
        yield row("not done", "torch captures no graphs of ours on HIP")
        return
    before = counters.snapshot()
    run(PROGRAMS["softmax"], DEVICE, {**OPTIONS, "cuda_graphs": True}, calls=_GRAPH_CALLS)
    since = counters.since(before)
    if not since.get("cuda_graphs"):
        refused = since.get("cuda_graph_refusals", 0)
        yield row("failed", f"nothing was captured ({refused} refusals)", "MLC_LOG=cache,schedule and report it")
    else:
        yield row("ok", f"{_GRAPH_CALLS} calls, {since['cuda_graphs']} captured, as eager", counts=since)


def bandwidth() -> Iterator[Row]:
    """What a copy reaches of the data sheet's rate, and a kernel of ours of the copy's."""
    free, _ = torch.cuda.mem_get_info()
    count = min(_COPY_BYTES, free // 8) // 4
    a, b = torch.ones(count, device=DEVICE), torch.full((count,), 2.0, device=DEVICE)
    copied = 2 * a.nbytes / _seconds(lambda: b.copy_(a))
    machine = target_for("cuda").machine
    sheet = machine.bandwidth * 1e9
    told = f"copies {copied / 1e12:.2f} TB/s, {copied / sheet:.0%} of what {machine.part} reaches"
    slow = copied < _COPY_SHARE * sheet
    mend = "look at nvidia-smi: other processes, clocks and temperature; or it is another model of the same family"
    yield row("warning" if slow else "ok", told, mend if slow else "", what="copy", bytes_per_s=copied, sheet=sheet)
    compiled = torch.compile(_added, backend="mlc", dynamic=False, fullgraph=True, options=OPTIONS)
    if not torch.equal(compiled(a, b), a + b):
        raise MlcError("a sum of two large tensors is not eager's")
    reached = 3 * a.nbytes / _seconds(lambda: compiled(a, b))
    slow = reached < _ADD_SHARE * copied
    told = f"a sum of two tensors moves {reached / 1e12:.2f} TB/s, {reached / copied:.0%} of a copy"
    yield row("warning" if slow else "ok", told, "report it, with `torch-mlc doctor --json`" if slow else "",
              what="our kernels", bytes_per_s=reached)  # fmt: skip


def _added(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def _seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call, of many between two events."""
    for _ in range(3):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(_TIMED_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / _TIMED_CALLS


def gpu_is_well() -> bool:
    """Whether the context is there still: a kernel that touched what it must not ends it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


CHECKS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "context": context,
    **{name: partial(program, name, "cuda") for name in PROGRAMS},
    "backward in a thread": backward_in_a_thread,
    "two streams": two_streams,
    "CUDA graph": graph_capture,
    "bandwidth": bandwidth,
}
DRIVER: Mapping[str, Callable[[], Iterator[Row]]] = {"driver": driver}
