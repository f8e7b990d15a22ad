"""A device whose work can be captured, played by the CPU: what tests of captured programs run on.

As on a GPU, a capture does nothing: memory that it allocates holds garbage until a replay, and a replay writes the
memory of the capture and no other. That memory is a pool's: what a capture lets go of, in its middle or at its end, the
next ops and the next captures of the pool are given, and each replay writes there all the same. Calls of ATen ops are
recorded, so kernels have to be ATen ops too.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_mlc.runtime.gpu.capture import Addresses, Results

NOT_DONE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


_uses = torch._C._storage_Use_Count


class Pool:
    """Memory of the captures that take theirs from it. It lives as long as one of them does, and cannot be used when
    all are gone."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self.graphs: weakref.WeakSet[Played] = weakref.WeakSet()
        self.is_new = True

    @property
    def bytes(self) -> int:
        return sum(b.numel() for b in self.blocks)

    def take(self, nbytes: int) -> torch.Tensor:
        """The smallest block of so many bytes at least that no tensor lies in, or a new one; much larger ones, which
        an allocator would split, are left alone."""
        free = [b for b in self.blocks if _uses(b.untyped_storage()._cdata) == _ALONE]
        fitting = [b for b in free if nbytes <= b.numel() <= 4 * nbytes + 64]
        if fitting:
            return min(fitting, key=torch.Tensor.numel)
        self.blocks.append(torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8))
        return self.blocks[-1]

    def has(self, t: torch.Tensor) -> bool:
        return any(b.data_ptr() <= t.data_ptr() < b.data_ptr() + b.numel() for b in self.blocks)


def _alone() -> int:
    block = torch.empty(64, dtype=torch.uint8)
    return _uses(block.untyped_storage()._cdata)


_ALONE = _alone()


class Recording(TorchDispatchMode):
    """Ops as they are called, with their arguments and results."""

    def __init__(self, addresses: Addresses, pool: Pool) -> None:
        super().__init__()
        self.addresses, self.pool = addresses, pool
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in NOT_DONE:
            raise RuntimeError("operation not permitted when stream is capturing")
        before = [t.clone() if t.numel() and not _overlaps(t) else None for t in _written(func, args, kwargs or {})]
        result = _done(func, args, kwargs or {})
        for t, old in zip(_written(func, args, kwargs or {}), before, strict=True):
            if old is not None:
                t.copy_(old)
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in given]
        self.place(fresh)
        for t in fresh:
            _spoil(t)
        args, kwargs = tree_map_only(torch.Tensor, self.by_address, (args, dict(kwargs or {})))
        self.calls.append((func, args, kwargs, [self.by_address(t) for t in fresh]))
        return result

    def place(self, fresh: list[torch.Tensor]) -> None:
        """Put new tensors into memory of the pool, those of one memory into one."""
        blocks: dict[int, torch.Tensor] = {}
        for t in fresh:
            memory = t.untyped_storage()
            if memory.nbytes():
                block = blocks.get(memory.data_ptr())
                if block is None:
                    block = blocks[memory.data_ptr()] = self.pool.take(memory.nbytes())
                t.set_(block.untyped_storage(), t.storage_offset(), t.size(), t.stride())

    def by_address(self, t: torch.Tensor) -> torch.Tensor:
        """Memory of a pool, or of somebody else, is known by its address, and not held."""
        if not t.numel() or not (t.data_ptr() in self.addresses or self.pool.has(t)):
            return t
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        raw = (ctypes.c_char * (span * t.itemsize)).from_address(t.data_ptr())
        return torch.frombuffer(raw, dtype=t.dtype).as_strided(t.shape, t.stride())


def _done(func, args, kwargs) -> Any:
    """What an op gives of garbage, by which the CPU cannot divide."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "ZeroDivisionError" not in str(error):
            raise
        return func(*tree_map_only(torch.Tensor, torch.ones_like, args), **kwargs)


def _written(func, args, kwargs) -> list[torch.Tensor]:
    found = []
    for k, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = kwargs.get(a.name, args[k] if k < len(args) else None)
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def _overlaps(t: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape))


def _spoil(t: torch.Tensor) -> None:
    """Put something wrong into memory. Integers may be indices, so theirs is in range."""
    if t.numel() and not _overlaps(t):
        t.fill_(float("nan") if t.dtype.is_floating_point else 0)


class Played:
    """A captured program, by doing the recorded calls again into the memory that they had."""

    def __init__(self, recording: Recording, device: RecordingDevice) -> None:
        self.recording, self.device = recording, device

    def replay(self) -> None:
        self.device.replays += 1
        for func, args, kwargs, fresh in self.recording.calls:
            result = func(*args, **kwargs)
            made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            new = [t for t in made if t.untyped_storage().data_ptr() not in old]
            for target, value in zip(fresh, new, strict=True):
                if "empty" not in func._schema.name:
                    target.copy_(value)


class RecordingDevice:
    """``current`` is what the test sets as the current stream; ``waits`` tells who waited for whom, ``kept`` which
    stream uses memory from what address on."""

    def __init__(self) -> None:
        self.addresses = Addresses()
        self.current, self.busy = 0, False
        self.waits: list[tuple[int, int]] = []
        self.kept: list[tuple[int, int]] = []
        self.captures, self.replays = 0, 0
        self.pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """What all captures that there are take."""
        return sum(p.bytes for p in self.pools)

    def capturing(self) -> bool:
        return self.busy

    def stream(self) -> int:
        return self.current

    def wait(self, stream: int) -> None:
        self.waits.append((self.current, stream))

    def keep(self, memory: Sequence[torch.Tensor]) -> None:
        self.kept += [(self.current, m.data_ptr()) for m in memory]

    def pool(self) -> Pool:
        made = Pool()
        self.pools.add(made)
        return made

    def capture(self, run: Callable[[], Results], pool: Pool) -> tuple[Played, Sequence[Any]]:
        assert pool.is_new or pool.graphs, "all captures of this pool are gone, and so is the pool"
        state = torch.get_rng_state()
        with Recording(self.addresses, pool) as recording:
            results = run()
        torch.set_rng_state(state)
        self.captures += 1
        made = Played(recording, self)
        pool.graphs.add(made)
        pool.is_new = False
        return made, results
