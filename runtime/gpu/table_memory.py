"""Memory on a GPU for the tables of kernels: how they come there, and who may use them when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, Any]


class TableMemory(Protocol):
    """What a kernel over a table asks of a device of an index, whose current stream is meant throughout."""

    def stream(self, device: int) -> int:
        """The current stream."""

    def capturing(self) -> bool:
        """Whether somebody captures what the current stream of the current device is given."""

    def upload(self, array: Array, device: int) -> torch.Tensor:
        """A copy of an array, complete for what the stream is given from now on. Nothing is waited for."""

    def mark(self, device: int) -> Any:
        """A mark behind what the stream has been given."""

    def join(self, memory: Sequence[torch.Tensor], mark: Any, device: int) -> None:
        """Let the stream go on when another one has come to a mark, and let ``memory`` be until this one has used it,
        too, though everybody forgets it."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        """Memory that is not initialised."""


class GpuMemory:
    """GPUs, through torch. Its allocator gives memory to others in the order of the stream that it was asked for on,
    and of those that it is told of; that of pinned memory of the host, when the copies that read it are done."""

    def stream(self, device: int) -> int:
        return torch._C._cuda_getCurrentRawStream(device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def upload(self, array: Array, device: int) -> torch.Tensor:
        pinned = torch.from_numpy(array).pin_memory()
        return pinned.to(torch.device("cuda", device), non_blocking=True)

    def mark(self, device: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def join(self, memory: Sequence[torch.Tensor], mark: torch.cuda.Event, device: int) -> None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(mark)
        for m in memory:
            m.record_stream(stream)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))
