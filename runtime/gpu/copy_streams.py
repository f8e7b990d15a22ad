"""Streams for copies between devices, beside those that kernels are launched on: what begun copies ask of devices, and
CUDA's own way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch


class CopyStreams(Protocol):
    """Devices with streams. Marks are places in a stream, behind what it has been given so far."""

    def home(self, memory: torch.Tensor) -> torch.device:
        """Where a tensor lies."""

    def usable(self, source: torch.Tensor, device: torch.device) -> bool:
        """Whether a copy of ``source`` to ``device`` may have a stream of its own: of different devices, one of which
        has streams, of which nobody captures what they are given."""

    def at_once(
        self, source: torch.Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
    ) -> torch.Tensor:
        """A copy as eager makes it, on the current streams."""

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether memory of the host is read and written by devices without the host."""

    def result(self, source: torch.Tensor, device: torch.device, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        """Memory for a copy, not initialised, that belongs to the current stream of its device."""

    def mark(self, device: torch.device) -> Any:
        """A mark in the current stream of a device."""

    def send(self, result: torch.Tensor, source: torch.Tensor, marks: Sequence[Any]) -> Any:
        """Copy ``source`` to ``result`` on a stream of this direction, behind marks, one for each side that has
        streams, the source's first. Gives a mark behind the copy. The host goes on meanwhile where its side is pinned,
        and where it has none."""

    def wait(self, device: torch.device, mark: Any) -> None:
        """Let the current stream of a device go on when another one has come to a mark."""

    def finish(self, mark: Any) -> None:
        """Let the host go on when a stream has come to a mark."""


class CudaStreams:
    """GPUs, through torch."""

    def home(self, memory: torch.Tensor) -> torch.device:
        return memory.device

    def usable(self, source: torch.Tensor, device: torch.device) -> bool:
        if type(source) not in (torch.Tensor, torch.nn.Parameter) or source.device == device:
            return False
        kinds = [d for d in (source.device, device) if d.type != "cpu"]
        return all(d.type == "cuda" for d in kinds) and not any(map(_captures, kinds))

    def at_once(
        self, source: torch.Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
    ) -> torch.Tensor:
        copied: torch.Tensor = torch.ops.aten._to_copy.default(
            source, dtype=dtype, device=device, non_blocking=non_blocking
        )
        return copied

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned()

    def result(self, source: torch.Tensor, device: torch.device, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        return torch.empty_like(
            source, dtype=dtype, device=device, pin_memory=pinned, memory_format=torch.preserve_format
        )

    def mark(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def send(self, result: torch.Tensor, source: torch.Tensor, marks: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        there, here = source.device, result.device
        gpus = [d for d in (there, here) if d.type != "cpu"]
        streams = [_copy_stream(d.index, there.type == here.type, d == here) for d in gpus]
        for stream, mark in zip(streams, marks, strict=True):
            stream.wait_event(mark)
        # torch copies between GPUs on the source's current stream, which waits for the other's and is waited for by it.
        with torch.cuda.stream(streams[-1]), torch.cuda.stream(streams[0]), torch.no_grad():
            result.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(streams[-1])
        return done

    def wait(self, device: torch.device, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(device).wait_event(mark)

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


def _captures(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@cache
def _copy_stream(index: int, between_gpus: bool, comes: bool) -> torch.cuda.Stream:
    """A GPU's stream for copies that come or go, with another GPU or the host."""
    return torch.cuda.Stream(index)
