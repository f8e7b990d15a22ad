"""Programs whose launches are captured once and replayed (CUDA graphs).

The first call for some sizes runs the program, so that code is loaded and libraries have chosen their ways; the second
captures it; the others are one replay. Whatever a capture holds fast is compared at each call: integers, symbolic
sizes, and the addresses of memory that stays (parameters, and what a captured forward graph keeps for its backward).
Other tensors are copied into memory of the capture's own; what the program writes to there is copied back. Results are
copied out, except those that only the backward reads: they stay, and the capture rests while somebody holds them.

A replay writes all memory that its capture ever had, that too which it had let go of. Captures of one pool give each
other such memory, so those that hand theirs out have a pool each; the others of a program, which are replayed one after
the other and copied from, share one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from ...codegen.host.capture import CapturePlan
from ..counters import counters
from ..gpu.capture import Capture, GraphDevice, Replayable, captured
from ..log import logger
from .executable import Boxed

_LOG = logger(__name__)
# Calls that may each bring sizes or addresses of their own, for each capture that is allowed.
_PATIENCE = 8
# Bytes of the largest element.
_ALIGNED = 16

Tensor: TypeAlias = torch.Tensor
_uses = torch._C._storage_Use_Count
_version_kept = torch.autograd._unsafe_preserve_version_counter


@functools.cache
def warn_once(reason: str) -> None:
    """Tell why graphs are not captured, the first time that this is the reason."""
    _LOG.warning("torch-mlc runs a graph without CUDA graphs: %s", reason)


def graphed(call: Boxed, plan: CapturePlan, device: Callable[[str], GraphDevice], limit: int, name: str) -> Boxed:
    """The program behind captures, at most ``limit`` of them; the program as it is where it cannot be captured, with
    one warning of each reason in a process."""
    if plan.reason:
        _LOG.debug("%s runs without CUDA graphs: %s", name, plan.reason)
        warn_once(plan.reason)
        counters.add("cuda_graph_refusals")
        return call
    return GraphedProgram(call, plan, device(plan.device), limit, name)


class GraphedProgram:
    """A boxed program that replays what it has captured. Safe to call from several threads and on several streams."""

    def __init__(self, call: Boxed, plan: CapturePlan, device: GraphDevice, limit: int, name: str) -> None:
        self._boxed_call = True
        self.__name__ = name
        self._call, self._plan, self._device, self._limit, self._name = call, plan, device, limit, name
        self._static, self._tensors = frozenset(plan.static), frozenset(plan.tensors)
        self._lock = threading.Lock()
        # Memory that captures share, unless they hand theirs out.
        self._shared: Any = None
        self._captured: dict[Hashable, list[_Captured]] = {}
        self._count = 0
        self._seen: set[Hashable] = set()
        # The stream of the last call, and why no more is captured.
        self._stream: Any = None
        self._reason = ""

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if (self._reason and not self._captured) or self._device.capturing():
            return self._call(args)
        with self._lock, torch.no_grad():
            stream = self._device.stream()
            if self._stream is not None and stream != self._stream:
                self._device.wait(self._stream)
                self._move(stream)
            self._stream = stream
            key, fixed = self._key(args)
            found = self._idle(key)
            if found is None and not self._reason:
                if key not in self._seen:
                    return self._first(key, fixed, args)
                found = self._capture(key, fixed, args)
            if found is not None:
                results = found.run(args)
                args.clear()
                return results
        return self._call(args)

    def _key(self, args: list[Any]) -> tuple[Hashable, list[bool]]:
        """What a capture for these arguments holds fast, and which of them are read where they are."""
        stays, static, tensors = self._device.addresses, self._static, self._tensors
        key: list[Hashable] = []
        fixed = [False] * len(args)
        for k, a in enumerate(args):
            if k not in tensors:  # also what nothing reads, which need not be a tensor
                key.append(None if isinstance(a, torch.Tensor) else a)
                continue
            address = a.data_ptr()
            fixed[k] = k in static or address in stays
            key.append(address if fixed[k] else None)
        for k in self._plan.symbolic:
            key += [args[k].shape, args[k].stride()]
        return tuple(key), fixed

    def _idle(self, key: Hashable) -> _Captured | None:
        """A capture for a key whose results nobody holds."""
        return next((c for c in self._captured.get(key, ()) if not c.is_held()), None)

    def _first(self, key: Hashable, fixed: list[bool], args: list[Any]) -> Sequence[Any]:
        """Run the program as it is, over arguments that lie as those of a capture will."""
        self._seen.add(key)
        if len(self._seen) > _PATIENCE * self._limit:
            self._stop("sizes or addresses differ from call to call")
        staged = _Staged.of(args, fixed, self._plan)
        results = list(self._call(list(staged.inputs)))
        staged.write_back(args)
        places = {id(a): k for k, a in enumerate(staged.inputs)}
        found = tuple(args[places[id(r)]] if isinstance(r, torch.Tensor) and id(r) in places else r for r in results)
        args.clear()
        return found

    def _capture(self, key: Hashable, fixed: list[bool], args: list[Any]) -> _Captured | None:
        if self._count >= self._limit:
            # A second one for a key is a favour; a key without any is what the limit is about.
            if key not in self._captured:
                self._stop(f"{self._limit} combinations of sizes and addresses are captured (cuda_graph_shapes)")
            return None
        staged = _Staged.of(args, fixed, self._plan)
        try:
            with torch.inference_mode(False), torch.no_grad():
                run = partial(self._run_staged, staged)
                graph, results, capture = captured(self._device, run, self._pool())
        except Exception as error:  # whatever an op does that a capture forbids
            self._stop(f"capturing it failed: {type(error).__name__}: {error}")
            return None
        handed = _handed_out(results, staged, args, self._plan.saved)
        given = [
            r.data_ptr() for r, h in zip(results, handed, strict=True) if isinstance(h, _Given) and fixed[h.position]
        ]
        stays = [*(args[k].data_ptr() for k in self._static), *given]
        made = _Captured(graph, capture, staged, handed, stays, self._stream)
        del results
        self._device.addresses.add(made.stays)
        weakref.finalize(made, self._device.addresses.drop, made.stays)
        self._captured.setdefault(key, []).append(made)
        self._count += 1
        counters.add("cuda_graphs")
        return made

    def _run_staged(self, staged: _Staged) -> Sequence[Any]:
        return self._call(list(staged.inputs))

    def _pool(self) -> Any:
        """Memory for the next capture."""
        if self._plan.saved is not None:
            return self._device.pool()
        if self._shared is None:
            self._shared = self._device.pool()
        return self._shared

    def _move(self, stream: Any) -> None:
        """Tell whoever owns the memory of captures that a stream uses it now."""
        for c in (c for captures in self._captured.values() for c in captures if stream not in c.streams):
            self._device.keep(c.memory)
            c.streams.add(stream)

    def _stop(self, reason: str) -> None:
        self._reason = reason
        counters.add("cuda_graph_refusals")
        _LOG.warning("%s runs without %sCUDA graphs: %s", self._name, "further " * bool(self._count), reason)


# --- arguments --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Staged:
    """The arguments of a capture: ``buffers`` in the place of the tensors at positions ``copied``, which lie ``flat``
    where their elements overlap. Of the others nothing is kept alive."""

    inputs: list[Any]
    copied: tuple[int, ...]
    flat: tuple[bool, ...]
    buffers: list[Tensor]
    written: tuple[int, ...]

    @staticmethod
    def of(args: Sequence[Any], fixed: Sequence[bool], plan: CapturePlan) -> _Staged:
        copied = tuple(k for k in plan.tensors if not fixed[k])
        flat = tuple(not _is_apart(args[k]) for k in copied)
        inputs = list(args)
        buffers = []
        with torch.inference_mode(False):
            for k, whole in zip(copied, flat, strict=True):
                inputs[k], buffer = _like(args[k], whole)
                buffers.append(buffer)
        staged = _Staged(inputs, copied, flat, buffers, tuple(k for k in plan.written if not fixed[k]))
        staged.read(args)
        return staged

    def read(self, args: Sequence[Any]) -> None:
        """Copy arguments into the buffers."""
        if self.buffers:
            given = [_flat(args[k]) if whole else args[k] for k, whole in zip(self.copied, self.flat)]
            torch._foreach_copy_(self.buffers, given)

    def write_back(self, args: Sequence[Any]) -> None:
        """Copy what the program wrote to into the arguments, as unnoticed as its kernels write there."""
        for k in self.written:
            at = self.copied.index(k)
            target = (_flat(args[k]) if self.flat[at] else args[k]).detach()
            counter = nullcontext() if args[k].is_inference() else _version_kept(args[k])
            with counter:
                target.copy_(self.buffers[at])


def _is_apart(t: Tensor) -> bool:
    """Whether no two elements of a tensor share memory."""
    end = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride < end:
            return t.numel() == 0
        end = stride * size
    return True


def _span(t: Tensor) -> int:
    """Elements from the first to the last that a tensor has."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0


def _flat(t: Tensor) -> Tensor:
    """All memory from the first element of a tensor to the last."""
    return t.as_strided((_span(t),), (1,))


def _like(t: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Memory laid out as a tensor: as that tensor, and as what is copied to."""
    if not whole:
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        return made, made
    memory = torch.empty(_span(t), dtype=t.dtype, device=t.device)
    return memory.as_strided(t.shape, t.stride()), memory


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    """The argument at a position, or a view of its memory from ``offset`` elements behind its first."""

    position: int
    view: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    offset: int = 0

    def value(self, args: Sequence[Any]) -> Tensor:
        given: Tensor = args[self.position]
        if self.view is None:
            return given
        return torch.as_strided(given, *self.view, given.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Memory of the capture, handed out as it is."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Copied:
    """Memory of the capture, of which each call gets a copy."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """A view of memory that several results look at, or one result at twice: each call gets a copy of all of it."""

    tensor: Tensor
    memory: int

    def value(self, memory: Tensor, start: int) -> Tensor:
        t = self.tensor
        return memory.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset() - start // t.itemsize)


@dataclass(frozen=True, slots=True)
class _Number:
    """What is no tensor, the same at each call."""

    value: Any


_Result: TypeAlias = _Given | _Kept | _Copied | _Part | _Number


def _handed_out(results: Sequence[Any], staged: _Staged, args: Sequence[Any], saved: int | None) -> tuple[_Result, ...]:
    """What becomes of each result of a capture."""
    places = {id(a): k for k, a in enumerate(staged.inputs) if isinstance(a, torch.Tensor)}
    copied = frozenset(staged.copied)
    homes = {_home(a): k for k, a in enumerate(args) if isinstance(a, torch.Tensor) and a.numel() and k not in copied}
    shared: dict[int, list[int]] = {}
    for at, r in enumerate(results):
        if isinstance(r, torch.Tensor) and r.numel():
            shared.setdefault(_home(r), []).append(at)

    def one(at: int, r: Any) -> _Result:
        if not isinstance(r, torch.Tensor):
            return _Number(r)
        if id(r) in places:
            return _Given(places[id(r)])
        if not r.numel():
            return _Copied(r)
        home = _home(r)
        k = homes.get(home)
        if k is not None and r.dtype == args[k].dtype:
            return _Given(k, (tuple(r.shape), r.stride()), r.storage_offset() - args[k].storage_offset())
        if saved is not None and min(shared[home]) >= saved and k is None:
            return _Kept(r)
        return _Part(r, home) if len(shared[home]) > 1 or not _is_apart(r) else _Copied(r)

    return tuple(one(at, r) for at, r in enumerate(results))


def _home(t: Tensor) -> int:
    """The address of the memory that a tensor is in."""
    return t.untyped_storage().data_ptr()


def _bytes_of(parts: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The bytes from the first to the last of tensors in one memory, and where there they start, at a multiple of all
    element sizes."""
    start = min(t.storage_offset() * t.itemsize for t in parts) // _ALIGNED * _ALIGNED
    end = max((t.storage_offset() + _span(t)) * t.itemsize for t in parts)
    memory = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
    return memory.set_(parts[0].untyped_storage(), start, (end - start,), (1,)), start


class _Captured:
    """One capture: its arguments, its results, and the memory that it hands out. ``stays`` are addresses that are the
    same after each replay, ``memory`` is what it reads and did not get from its pool, and ``streams`` are those that
    the owner of that memory knows of."""

    def __init__(
        self,
        graph: Replayable,
        capture: Capture,
        staged: _Staged,
        results: tuple[_Result, ...],
        stays: Sequence[int],
        stream: Any,
    ) -> None:
        self._graph, self._staged, self._results = graph, staged, results
        self.memory, self.streams = (*capture.rooms, *staged.buffers), {stream}
        self.stays = (*stays, *(r.tensor.data_ptr() for r in results if isinstance(r, _Kept)))
        # Only the buffers stay: arguments that are read where they are belong to the caller.
        staged.inputs = []
        self._copied = [r.tensor for r in results if isinstance(r, _Copied)]
        parts: dict[int, list[Tensor]] = {}
        for r in results:
            if isinstance(r, _Part):
                parts.setdefault(r.memory, []).append(r.tensor)
        self._shared = {home: _bytes_of(tensors) for home, tensors in parts.items()}
        kept = {_home(r.tensor): r.tensor.untyped_storage() for r in results if isinstance(r, _Kept)}
        self._kept = tuple((s, _uses(s._cdata)) for s in kept.values())

    def is_held(self) -> bool:
        """Whether memory that was handed out is still in use."""
        return any(_uses(storage._cdata) > alone for storage, alone in self._kept)

    def run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Copy in, replay, copy out."""
        self._staged.read(args)
        self._graph.replay()
        self._staged.write_back(args)
        copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in self._copied]
        memory = {home: _room_for(source) for home, (source, _) in self._shared.items()}
        targets = [*copies, *(memory[home][: len(source)] for home, (source, _) in self._shared.items())]
        if targets:
            torch._foreach_copy_(targets, [*self._copied, *(source for source, _ in self._shared.values())])
        copied = iter(copies)
        found: list[Any] = []
        for r in self._results:
            match r:
                case _Given():
                    found.append(r.value(args))
                case _Kept(tensor):
                    found.append(tensor.detach())
                case _Copied():
                    found.append(next(copied))
                case _Part(_, home):
                    found.append(r.value(memory[home], self._shared[home][1]))
                case _Number(value):
                    found.append(value)
        return tuple(found)


def _room_for(source: Tensor) -> Tensor:
    """Memory for bytes, as long as views of any type ask for."""
    return torch.empty(-(-len(source) // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=source.device)
