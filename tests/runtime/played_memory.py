"""Memory for tables on a GPU that the CPU plays: what is copied there arrives late, and not every stream may use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class PlayedStreams(Protocol):
    """A device with a current stream, which somebody may capture."""

    stream: int
    capturing: bool


@dataclass
class Upload:
    """Memory that a copy on a stream is to fill, and the other streams that its allocator knows of."""

    memory: torch.Tensor
    stream: int
    content: torch.Tensor | None
    streams: set[int] = field(default_factory=set)


class PlayedMemory:
    """Memory for tables: copies happen when their stream comes to them, which others have to wait for, and memory is
    for streams that its allocator was told of."""

    def __init__(self, device: PlayedStreams) -> None:
        self.device = device
        self.uploads: list[Upload] = []
        self.joins: list[tuple[int, int]] = []

    def stream(self, device: int) -> int:
        return self.device.stream

    def capturing(self) -> bool:
        return self.device.capturing

    def upload(self, array: Any, device: int) -> torch.Tensor:
        assert not self.device.capturing, "a copy from the host does not belong into a capture"
        content = torch.from_numpy(array.copy())
        self.uploads.append(Upload(torch.full_like(content, -1), self.device.stream, content))
        return self.uploads[-1].memory

    def mark(self, device: int) -> int:
        return self.device.stream

    def join(self, memory: Sequence[torch.Tensor], mark: int, device: int) -> None:
        self.joins.append((self.device.stream, mark))
        self.run(mark)
        for m in memory:
            next(u for u in self.uploads if u.memory is m).streams.add(self.device.stream)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=dtype)

    def run(self, stream: int) -> None:
        """Do what a stream was given."""
        for u in self.uploads:
            if u.stream == stream and u.content is not None:
                u.memory.copy_(u.content)
                u.content = None

    def used(self, stream: int, *addresses: int) -> None:
        """A stream reads tables."""
        self.run(stream)
        for u in self.uploads:
            if u.memory.data_ptr() in addresses:
                assert u.content is None, f"stream {stream} reads a table whose copy it has not waited for"
                assert stream in (u.stream, *u.streams), f"nobody knows that stream {stream} uses a table"
