"""Copies between devices that a program begins, and waits for when something reads them.

A copy between GPUs, or with pinned memory of the host, runs as soon as it is begun. With other memory of the host it
would stop the host; so it is begun by a mark behind what it waits for, and made at the wait, when the kernels between
the two have been launched. Either way its source and its result are held until the wait, which orders what comes later
on both devices behind it: neither's memory is used again before.

A copy that is to block stops the host once, with all others of its kind: at the wait where the graph itself goes on
with the host's side of it, else when the program has run. Where an error ends a program, streams wait for what it has
begun. Whatever devices cannot run beside others is copied at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.graph.begun import BEGIN_COPY, WAIT_COPIES
from ..gpu.copy_streams import CopyStreams, CudaStreams

# What devices have; tests put played ones there.
STREAMS: list[CopyStreams] = [CudaStreams()]


@dataclass(slots=True)
class _Copy:
    """A copy under way; ``done`` is a mark behind it once it is made, as number ``made`` of its call. The host has to
    wait for it where it ``blocks``."""

    source: torch.Tensor
    result: torch.Tensor
    way: tuple[torch.device, torch.device]
    gpus: tuple[torch.device, ...]
    marks: tuple[Any, ...]
    blocks: bool
    done: Any = None
    made: int = 0


class _Call:
    """One run of a program: copies by the tensors that they make, and those for which the host still has to wait."""

    __slots__ = ("count", "flying", "owed", "streams")

    def __init__(self) -> None:
        self.count = 0
        self.streams = STREAMS[-1]
        self.flying: dict[int, _Copy] = {}
        self.owed: list[_Copy] = []

    def send(self, copy: _Copy) -> None:
        if copy.done is None:
            copy.done = self.streams.send(copy.result, copy.source, copy.marks)
            copy.made = self.count = self.count + 1

    def wait(self, copies: Sequence[_Copy], host: bool) -> None:
        for copy in copies:
            self.send(copy)
        for copy in copies:
            for gpu in copy.gpus:
                self.streams.wait(gpu, copy.done)
        self.owed += [copy for copy in copies if copy.blocks]
        if host:
            self.finish()

    def finish(self) -> None:
        """Let the host wait, once for each stream: the last copy of one is behind all others."""
        last = {c.way: c for c in sorted(self.owed, key=lambda c: c.made)}
        self.owed = []
        for copy in last.values():
            self.streams.finish(copy.done)

    def abandon(self) -> None:
        """After an error: what has been begun keeps its memory until it is done."""
        begun = [c for c in self.flying.values() if c.done is not None]
        self.flying.clear()
        with suppress(RuntimeError):  # of a device that does nothing any more another error tells
            self.wait(begun, host=True)


class _Calls(threading.local):
    now: _Call | None = None


_CALLS = _Calls()


def begin_copy(
    source: torch.Tensor, *, device: torch.device | str, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> torch.Tensor:
    """A tensor of the shape of ``source`` on another device, that nobody may look at before ``wait_copies``."""
    call, target = _CALLS.now, torch.device(device)
    if call is None or not call.streams.usable(source, target):
        return STREAMS[-1].at_once(source, target, dtype, non_blocking)
    streams = call.streams
    home = streams.home(source)
    to_host, from_host = target.type == "cpu", home.type == "cpu"
    # As in eager: the host's side of a copy that it does not wait for is pinned.
    pinned = to_host and non_blocking
    result = streams.result(source, target, dtype or source.dtype, pinned)
    gpus = tuple(d for d in (home, target) if d.type != "cpu")
    blocks = (to_host or from_host) and not non_blocking
    copy = _Copy(source, result, (home, target), gpus, tuple(map(streams.mark, gpus)), blocks)
    if pinned or not (to_host or from_host) or (from_host and streams.is_pinned(source)):
        call.send(copy)
    call.flying[result._cdata] = copy
    return result


def wait_copies(begun: Sequence[torch.Tensor], host: bool) -> list[torch.Tensor]:
    """The same tensors, for what their devices are given from now on; for the ``host`` too where it is to wait."""
    call = _CALLS.now
    if call is not None:
        names = {t._cdata for t in begun}
        # In the order in which they were begun, in which what they read is there.
        call.wait([call.flying.pop(n) for n in [*call.flying] if n in names], host)
    return list(begun)


def waited_for(run: Any, targets: Sequence[str]) -> Any:
    """A program (boxed) that calls ops: with the end of the copies that it begins, where it begins some."""
    if BEGIN_COPY not in targets:
        return run

    def call(args: list[Any]) -> Any:
        outer, mine = _CALLS.now, _Call()
        _CALLS.now = mine
        try:
            results = run(args)
            mine.finish()
        except BaseException:
            mine.abandon()
            raise
        finally:
            _CALLS.now = outer
        return results

    return call


# --- as ops -----------------------------------------------------------------------------------------------------------

BEGUN: dict[str, Callable[..., Any]] = {BEGIN_COPY: begin_copy, WAIT_COPIES: wait_copies}

torch.library.define(
    "mlc::begin_copy", "(Tensor source, *, Device device, ScalarType? dtype=None, bool non_blocking=False) -> Tensor"
)
torch.library.define("mlc::wait_copies", "(Tensor[] begun, bool host) -> Tensor[]")
torch.library.impl("mlc::begin_copy", "CompositeExplicitAutograd", begin_copy)


@torch.library.impl("mlc::wait_copies", "CompositeExplicitAutograd")
def _waited(begun: Sequence[torch.Tensor], host: bool) -> list[torch.Tensor]:
    """As an op, whose results are tensors of their own."""
    return [t.detach() for t in wait_copies(begun, host)]


@torch.library.register_fake("mlc::begin_copy")
def _fake_copy(
    source: torch.Tensor, *, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> torch.Tensor:
    return torch.empty_like(source, device=device, dtype=dtype, memory_format=torch.preserve_format)


@torch.library.register_fake("mlc::wait_copies")
def _fake_wait(begun: Sequence[torch.Tensor], host: bool) -> list[torch.Tensor]:
    return [torch.empty_like(t, memory_format=torch.preserve_format) for t in begun]
