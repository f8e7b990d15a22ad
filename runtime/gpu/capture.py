"""Capturing the work of a device: what it takes, and CUDA's own way.

While a capture is under way nothing runs: launches, and memory that they use, are written down. ``current_capture``
tells whoever would copy from the host, or wait, to leave that for later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol

import torch

from .collection import no_collection

Results = Sequence[Any]


class Replayable(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Do the work again, on the current stream."""


class GraphDevice(Protocol):
    """A device whose work can be captured. ``addresses`` are those of memory that stays where it is."""

    addresses: Addresses

    def capturing(self) -> bool:
        """Whether somebody else captures what the current stream is given."""

    def stream(self) -> Any:
        """The current stream; equal where it is the same one."""

    def wait(self, stream: Any) -> None:
        """Let what the current stream is given from now on wait for what ``stream`` has been given."""

    def keep(self, memory: Sequence[torch.Tensor]) -> None:
        """Let memory be until the current stream has used it, though everybody forgets it."""

    def pool(self) -> Any:
        """Memory for captures that are replayed one after the other. What one of them has let go of, or lets go of
        before its end, is another's, or its own again, and each replay writes there."""

    def capture(self, run: Callable[[], Results], pool: Any) -> tuple[Replayable, Results]:
        """The work of ``run``, which is not done, and its results, whose memory each replay writes. Memory is taken
        from ``pool``. Raises whatever stands against capturing it."""


class Addresses:
    """Addresses of memory that stays: parameters, and what captured graphs keep for others. Each as often as it was
    added."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, addresses: Iterable[int]) -> None:
        self._counts.update(addresses)

    def drop(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._counts[address] -= 1
            if self._counts[address] <= 0:
                del self._counts[address]

    def __contains__(self, address: int) -> bool:
        return address in self._counts


class Capture:
    """A capture under way, and what is left for its end.

    Memory of the capture itself may have held something else before, in the middle of it, and then each replay writes
    that again. What is to stay lies in ``rooms``, which are there before the capture begins. What it asks for is known
    when it has been tried once (``asked``): a capture without rooms is thrown away where it asked for some.
    """

    def __init__(self, rooms: Sequence[torch.Tensor] = ()) -> None:
        self.rooms = tuple(rooms)
        self.asked: list[Callable[[], torch.Tensor]] = []
        self._later: list[Callable[[], None]] = []

    def room(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The next of the rooms; ``make`` makes it, where there is none only for what is thrown away. It lives as long
        as what is captured, and no replay writes there but by what is launched over it."""
        place = len(self.asked)
        self.asked.append(make)
        return self.rooms[place] if place < len(self.rooms) else make()

    def later(self, fill: Callable[[], None]) -> None:
        """Do something before the first replay."""
        self._later.append(fill)

    @property
    def is_whole(self) -> bool:
        """Whether there were as many rooms as were asked for."""
        return len(self.asked) == len(self.rooms)

    def finish(self) -> None:
        """Do what was left."""
        for fill in self._later:
            fill()
        self._later.clear()


_CURRENT: ContextVar[Capture | None] = ContextVar("mlc_capture", default=None)


def current_capture() -> Capture | None:
    """The capture that this thread is in the middle of."""
    return _CURRENT.get()


@contextmanager
def capturing(rooms: Sequence[torch.Tensor] = ()) -> Iterator[Capture]:
    """Around ``GraphDevice.capture``. What was left is done at the end, unless capturing failed or is not whole."""
    capture = Capture(rooms)
    token = _CURRENT.set(capture)
    try:
        yield capture
    finally:
        _CURRENT.reset(token)
    if capture.is_whole:
        capture.finish()


def captured(device: GraphDevice, run: Callable[[], Results], pool: Any) -> tuple[Replayable, Results, Capture]:
    """The work of ``run`` with its results, as ``GraphDevice.capture`` gives them, and the rooms that it reads."""
    rooms: list[torch.Tensor] = []
    thrown_away: list[Replayable] = []  # at the end, for a pool without any captures is no pool any more
    while True:
        with capturing(rooms) as capture:
            graph, results = device.capture(run, pool)
        if capture.is_whole:
            return graph, results, capture
        thrown_away.append(graph)
        del results
        rooms = [make() for make in capture.asked]


class CudaDevice:
    """The GPU of an index, by ``torch.cuda.CUDAGraph``.

    The device's default generator of random numbers belongs to every capture of torch's: a replay draws where the
    generator stands, and moves it on.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.addresses = Addresses()
        self._side: torch.cuda.Stream | None = None

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.index)

    def wait(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.current_stream(self.index).wait_stream(stream)

    def keep(self, memory: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.index)
        for m in memory:
            m.record_stream(stream)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Results], pool: Any) -> tuple[Replayable, Results]:
        with torch.cuda.device(self.index):
            if self._side is None:
                self._side = torch.cuda.Stream(self.index)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            # Workspaces of cuBLAS belong to a stream; those of the capture are to lie in its pool, and go with it.
            torch._C._cuda_clearCublasWorkspaces()
            # To free graphs and events breaks a capture.
            with torch.cuda.stream(self._side), no_collection():
                # Other threads may go on allocating.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    results = run()
                except BaseException:
                    _abandon(graph)
                    raise
                graph.capture_end()
            torch._C._cuda_clearCublasWorkspaces()
        return graph, results


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that has failed; what the driver says of it is known already."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


@cache
def _cuda_device(index: int) -> CudaDevice:
    return CudaDevice(index)


# By the type of a device, the one of an index.
GRAPH_DEVICES: Mapping[str, Callable[[int], GraphDevice]] = {"cuda": _cuda_device}


def graph_device(name: str) -> GraphDevice:
    """The device of a name ("cuda:0")."""
    kind, _, index = name.partition(":")
    return GRAPH_DEVICES[kind](int(index or 0))
