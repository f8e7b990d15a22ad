"""Streams of devices that the CPU plays, with a clock: kernels run one after the other on each device, copies beside
them, and the host goes on after launching a kernel and waits where it has to.

A copy is made as late as it may be: when somebody waits for it. Until then its result holds no numbers, and what it
reads has to stay as it was.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from torch_mlc.runtime.host import begun_copies

Tensor = torch.Tensor
HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
# What takes so long on a device, on a stream for copies, and for the host to launch.
KERNEL, COPY, LAUNCH = 10.0, 25.0, 1.0


@dataclass
class Mark:
    """A place in a stream: when it is reached, and the copy that is behind it."""

    time: float
    copy: tuple[Tensor, Tensor, Tensor] | None = None

    def reach(self) -> None:
        """Make the copy, of what was there when it was sent."""
        if self.copy is not None:
            (result, source, then), self.copy = self.copy, None
            assert torch.equal(source, then), "what a copy reads was written over before it was waited for"
            result.copy_(source)


@dataclass
class PlayedStreams:
    """``hosts`` are the tensors that lie on the host, of which those ``pinned`` are; all others lie on the GPU, or on
    the GPU that ``homes`` tells. ``log`` is what happened, in order."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    hosts: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    homes: dict[int, torch.device] = field(default_factory=dict)
    captures: bool = False
    host: float = 0.0
    ends: dict[Any, float] = field(default_factory=lambda: defaultdict(float))
    kept: list[Tensor] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def playing(self) -> Iterator[PlayedStreams]:
        begun_copies.STREAMS.append(self)
        try:
            yield self
        finally:
            begun_copies.STREAMS.remove(self)

    def on_host(self, *tensors: Tensor, pinned: bool = False) -> tuple[Tensor, ...]:
        self.kept += tensors  # so that nothing else is found at their addresses
        self.hosts |= {t._cdata for t in tensors}
        self.pinned |= {t._cdata for t in tensors if pinned}
        return tensors

    def events(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [e for e in self.log if e[0] in kinds]

    @property
    def time(self) -> float:
        """When everything is done."""
        return max(self.host, *self.ends.values())

    # --- kernels ------------------------------------------------------------------------------------------------------

    def launch(self, name: str, device: torch.device = GPU) -> None:
        with self.lock:
            self.log.append(("launch", name))
            self.ends[device] = max(self.ends[device], self.host) + KERNEL
            self.host += LAUNCH

    def in_order(self, source: Tensor, *, device: str, dtype: torch.dtype, layout: Any = None, **how: Any) -> Tensor:
        """``aten::_to_copy``, for which the host waits."""
        return self.at_once(source, torch.device(device), dtype, how.get("non_blocking", False))

    # --- what begun copies ask for ------------------------------------------------------------------------------------

    def home(self, memory: Tensor) -> torch.device:
        return HOST if memory._cdata in self.hosts else self.homes.get(memory._cdata, GPU)

    def usable(self, source: Tensor, device: torch.device) -> bool:
        return self.home(source) != device and not self.captures

    def at_once(self, source: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        gpu = next(d for d in (self.home(source), device) if d != HOST)
        self.log.append(("copy", gpu))
        self.ends[gpu] = max(self.ends[gpu], self.host) + COPY
        if not non_blocking:
            self.host = self.ends[gpu]
        result = source.to(dtype=dtype or source.dtype, copy=True)
        if device == HOST:
            self.on_host(result)
        return result

    def is_pinned(self, memory: Tensor) -> bool:
        return memory._cdata in self.pinned

    def result(self, source: Tensor, device: torch.device, dtype: torch.dtype, pinned: bool) -> Tensor:
        made = torch.empty_like(source, dtype=dtype, memory_format=torch.preserve_format)
        made.fill_(float("nan") if dtype.is_floating_point else 77)
        if device == HOST:
            self.on_host(made, pinned=pinned)
        elif device != GPU:
            self.kept.append(made)
            self.homes[made._cdata] = device
        return made

    def mark(self, device: torch.device) -> Mark:
        self.log.append(("mark", device))
        return Mark(self.ends[device])

    def send(self, result: Tensor, source: Tensor, marks: Sequence[Mark]) -> Mark:
        with self.lock:
            way = (self.home(source), self.home(result))
            self.log.append(("send", *way))
            stream = ("copies", *way)
            self.ends[stream] = max(self.ends[stream], self.host, *(m.time for m in marks)) + COPY
            done = Mark(self.ends[stream], (result, source, source.clone()))
            host = [t for t in (source, result) if self.home(t) == HOST]
            if host and not self.is_pinned(host[0]):
                self.host = max(self.host, self.ends[stream])
                done.reach()
            return done

    def wait(self, device: torch.device, mark: Mark) -> None:
        with self.lock:
            self.log.append(("wait", device))
            self.ends[device] = max(self.ends[device], mark.time)
            mark.reach()

    def finish(self, mark: Mark) -> None:
        with self.lock:
            self.log.append(("finish",))
            self.host = max(self.host, mark.time)
            mark.reach()


@pytest.fixture
def streams() -> Iterator[PlayedStreams]:
    with PlayedStreams().playing() as played:
        yield played
