"""Memory of the CPU that is used again.

Memory that the system gives anew costs more than most kernels: each page is found and zeroed when it is first touched.
The C library keeps small blocks, for whoever asks next, and gives large ones back at once. So blocks of ``LEAST_BLOCK``
bytes and more that programs ask for are remembered here. One whose storage nobody else holds any more goes to who next
asks for as many bytes.

A block is a storage of torch's own, so whoever has a tensor on it may do with it what may be done with any: views,
autograd, DLPack, NumPy, pickling, sharing with other processes, ``resize_``. All of these hold the storage, or give it
other memory; a block that has other memory is forgotten. How often a storage is held says when it is idle: nobody but
the pool is left then who could hold it again.

What is held is bounded. Before new memory is taken, idle blocks go, those that were used longest ago first, until all
blocks together are hardly more than what was in use at the recent peak. The pages of large ones go on in the new block
(``Reserve``). What has been idle for a while is given back.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, UntypedStorage

from ...codegen.host.memory.blocks import LEAST_BLOCK, LEAST_WATCHED
from ..frozen.kept import frozen_bytes
from .pages import Pages, advise, can_move, pages_of
from .reserve import Reserve

# The recent peak is that of so many requests, and of as many before. Once in so many, the pool looks at all blocks.
WINDOW, LOOK = 1024, 64
# Of the recent peak, what may be held beyond it where nobody says how much.
SPARE = 1 / 32
# Seconds between two looks for idle memory: what was idle at two of them, and not used between, is given back.
IDLE_SECONDS = 10.0

_holders = getattr(torch._C, "_storage_Use_Count", None)
_reinterpret = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None)
_Kind: TypeAlias = "tuple[torch.dtype, bool]"


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of the CPU's memory in blocks that compiled programs use again, and how often they did.

    ``held`` is all of them, ``idle`` what nobody uses, and ``peak`` the most that was in use lately. Of all requests
    ``hits`` found a block and ``misses`` did not; ``moved`` bytes of these were pages of blocks of other sizes.
    ``released`` blocks were given back to the system, or their pages kept for others; ``lost`` ones were given other
    memory, or none, by their users. ``frozen`` are bytes, on all devices, that programs keep beside parameters because
    they do not change between calls; they are no part of ``held``.
    """

    held: int
    idle: int
    peak: int
    blocks: int
    hits: int
    misses: int
    released: int
    lost: int
    moved: int = 0
    frozen: int = 0


@dataclass(slots=True, eq=False)
class _Block:
    """A storage at an address. ``tensors`` are the pool's own on it, one for each type that was asked for, and
    ``alone`` how often it is held where nobody else has it. ``runs`` are its pages, those together that came together,
    none where the C library keeps them. ``looked`` is whether it was idle when last looked at."""

    storage: UntypedStorage
    nbytes: int
    address: int
    runs: list[Pages]
    tensors: dict[_Kind, Tensor] = field(default_factory=dict)
    alone: tuple[int, int] = (0, 0)
    looked: bool = False

    def of(self, kind: _Kind) -> Tensor:
        """The pool's own tensor of a type."""
        found = self.tensors.get(kind)
        if found is None:
            found = self.tensors[kind] = torch.empty(0, dtype=kind[0]).set_(self.storage)
            self.alone = self.held()
        return found

    def held(self) -> tuple[int, int]:
        """How often torch's own code, and Python, hold the storage."""
        return _holders(self.storage._cdata), sys.getrefcount(self.storage)  # type: ignore[misc]

    @property
    def is_idle(self) -> bool:
        return self.held() == self.alone

    @property
    def is_lost(self) -> bool:
        """Whether it is no longer as it was made: of other memory, or with an array of NumPy's made of it, whose
        storage torch never resizes again."""
        storage = self.storage
        return storage.data_ptr() != self.address or storage.nbytes() != self.nbytes or not storage.resizable()


class CpuPool:
    """Blocks by their sizes, and all of them, those used longest ago first. ``spare`` bytes may be held beyond the
    recent peak, a share of it where that is None; where it is 0, there are no blocks. None has less than ``least``
    bytes."""

    def __init__(self, spare: int | None = None, least: int = LEAST_BLOCK) -> None:
        self.spare, self.least = spare, least
        self._blocks: dict[_Block, None] = {}
        self._by_size: dict[int, list[_Block]] = {}
        self._at: dict[int, _Block] = {}
        self._reserve = Reserve()
        self._held = self._hits = self._misses = self._released = self._lost = 0
        # The most in use in this window of requests, and in the one before.
        self._peaks, self._window = (0, 0), 0
        self._lock = threading.RLock()
        self._watch: threading.Thread | None = None

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, rounded: bool = False) -> Tensor:
        """A tensor of the CPU, not initialised, as ``torch.empty_strided`` makes it. Where it is ``rounded``, its
        storage may be longer, by less than an eighth."""
        nbytes = _extent(size, stride) * dtype.itemsize
        if nbytes < self.least or self.spare == 0 or _holders is None or _reinterpret is None:
            return torch.empty_strided(size, stride, dtype=dtype)
        if rounded:
            nbytes = _rounded(nbytes)
        kind = dtype, torch.is_inference_mode_enabled()
        with self._lock:
            block = self._found(nbytes) or self._new(nbytes)
            # Made before anybody else may look whether the block is idle.
            return _reinterpret(block.of(kind), size, stride, 0)  # type: ignore[no-any-return]

    def stats(self) -> MemoryStats:
        with self._lock:
            idle = self._idle()
            self._note(idle)
            counts = len(self._blocks), self._hits, self._misses, self._released, self._lost, self._reserve.moved
            spare = self._reserve.nbytes
            return MemoryStats(self._held + spare, _bytes(idle) + spare, max(self._peaks), *counts)

    def places(self) -> dict[int, int]:
        """Address and bytes of every block."""
        with self._lock:
            return {b.address: b.nbytes for b in self._blocks if not b.is_lost}

    def is_held_once(self, tensor: Tensor) -> bool | None:
        """Whether nobody but a tensor has the block that it lies in; None where it lies in none."""
        if tensor.device.type != "cpu" or not self._at:
            return None
        with self._lock:
            block = self._at.get(tensor.untyped_storage().data_ptr())
            if block is None or block.is_lost:
                return None
            uses, names = block.alone
            return block.held() == (uses + 1, names)

    def release(self) -> int:
        """Give all idle blocks back; returns their bytes."""
        with self._lock:
            idle = self._idle()
            self._drop(idle)
            self._peaks = (0, 0)
            return _bytes(idle) + self._reserve.release()

    def release_unused(self) -> None:
        """Give back the blocks that were idle at the last such look too, and have not been used since."""
        with self._lock:
            idle = self._idle()
            self._drop([b for b in idle if b.looked])
            for block in self._blocks:
                block.looked = False
            for block in idle:
                block.looked = True
            if self._reserve.looked:
                self._reserve.release()
            self._reserve.looked = True

    def after_fork(self) -> None:
        """In a child, whose memory is its own. The lock is of a thread that it has not, and so is who watches."""
        self._lock, self._watch = threading.RLock(), None

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _found(self, nbytes: int) -> _Block | None:
        """An idle block of a size, that was used last."""
        for block in self._by_size.get(nbytes, ())[::-1]:
            if not block.is_idle:
                continue
            if block.is_lost:
                self._forget(block)
                self._lost += 1
                continue
            self._hits += 1
            block.looked = False
            self._blocks[block] = self._blocks.pop(block)  # the last
            if self._hits % LOOK == 0:
                self._note(self._idle())
            return block
        return None

    def _new(self, nbytes: int) -> _Block:
        self._misses += 1
        most = self._make_room(nbytes)
        try:
            storage = UntypedStorage(nbytes)
        except RuntimeError:  # the system has no more: what is idle may be enough
            if not self.release():
                raise
            storage = UntypedStorage(nbytes)
        advise(storage.data_ptr(), nbytes)
        runs = self._reserve.fill(pages_of(storage.data_ptr(), nbytes)) if _has_own_pages(nbytes) else []
        self._reserve.release(max(most, 0))
        block = _Block(storage, nbytes, storage.data_ptr(), runs)
        self._blocks[block] = None
        self._by_size.setdefault(nbytes, []).append(block)
        self._at[block.address] = block
        self._held += nbytes
        if self._watch is None:
            self._watch = threading.Thread(target=_watch, args=(self,), name="torch-mlc idle memory", daemon=True)
            self._watch.start()
        return block

    def _make_room(self, nbytes: int) -> int:
        """Let idle blocks go until with so many more bytes hardly more is held than was in use at the recent peak.
        Returns how many bytes of pages may be left then that are in no block."""
        idle = self._idle()
        self._note(idle, nbytes)
        peak = max(self._peaks)
        most = peak + (int(peak * SPARE) if self.spare is None else self.spare) - nbytes
        # What is in no block goes first, into the new block or back to the system.
        over = self._held - most
        gone = []
        for block in idle:
            if over <= 0:
                break
            gone.append(block)
            over -= block.nbytes
        self._drop(gone, keep=_has_own_pages(nbytes))
        return most - self._held

    def _note(self, idle: Iterable[_Block], more: int = 0) -> None:
        """Take what is in use, and so many bytes ``more``, for the peak where it is one."""
        window, used = (self._hits + self._misses) // WINDOW, self._held - _bytes(idle) + more
        now, before = self._peaks
        if window != self._window:
            now, before = 0, now if window == self._window + 1 else 0
            self._window = window
        self._peaks = max(now, used), before

    def _idle(self) -> list[_Block]:
        """Blocks that nobody uses, those used longest ago first. Lost ones are forgotten."""
        for block in [b for b in self._blocks if b.is_lost]:
            self._forget(block)
            self._lost += 1
        return [b for b in self._blocks if b.is_idle]

    def _drop(self, blocks: Iterable[_Block], keep: bool = False) -> None:
        """Forget idle blocks. Where they are to ``keep``, their pages wait for others."""
        for block in blocks:
            self._forget(block)
            self._released += 1
            if keep and block.runs:
                block.tensors.clear()
                self._reserve.add(block.storage, block.runs)

    def _forget(self, block: _Block) -> None:
        del self._blocks[block]
        if self._at.get(block.address) is block:
            del self._at[block.address]
        alike = self._by_size[block.nbytes]
        alike.remove(block)
        if not alike:
            del self._by_size[block.nbytes]
        self._held -= block.nbytes

    def _has_blocks(self) -> bool:
        """Whether there is anything to watch; who watches ends where there is not."""
        with self._lock:
            if not self._blocks:
                self._reserve.release()
                self._watch = None
            return bool(self._blocks)


def _watch(pool: CpuPool) -> None:
    pause = threading.Event()
    while pool._has_blocks():
        pause.wait(IDLE_SECONDS)
        pool.release_unused()


def _has_own_pages(nbytes: int) -> bool:
    """Whether the C library asks the system for a block's memory, and pages can be moved there: smaller ones are cut
    from what it keeps."""
    return nbytes >= LEAST_WATCHED and can_move()


def _rounded(nbytes: int) -> int:
    """The next of eight sizes between each power of two and the next."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last."""
    last = 0
    for n, s in zip(size, stride, strict=True):
        if n == 0:
            return 0
        last += (n - 1) * s
    return last + 1


def _bytes(blocks: Iterable[_Block]) -> int:
    return sum(b.nbytes for b in blocks)


POOL = CpuPool()
"""The pool of this process."""
os.register_at_fork(after_in_child=POOL.after_fork)


def memory_stats() -> MemoryStats:
    """What compiled programs of this process hold of the CPU's memory to use it again, and how often they did."""
    return replace(POOL.stats(), frozen=frozen_bytes())


def empty_cache() -> int:
    """Give the memory of the CPU that no tensor uses back to the system; returns its bytes."""
    return POOL.release()


__all__ = ["POOL", "CpuPool", "MemoryStats", "empty_cache", "memory_stats"]
