"""Memory that is used again: nobody sees what somebody else writes, and no more is held than was in use."""

from __future__ import annotations

import copy
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.pool.holders import HOLDERS
from torch_mlc.codegen.host.memory.blocks import LEAST_BLOCK
from torch_mlc.runtime.pool import pool as pools
from torch_mlc.runtime.pool.pool import CpuPool

N = LEAST_BLOCK // 4


def block(pool: CpuPool, rows: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return pool.empty((rows, N), (N, 1), dtype)


@pytest.fixture
def pool() -> Iterator[CpuPool]:
    made = CpuPool()
    yield made
    made.release()


# --- who holds a block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOLDERS)
def test_a_block_is_not_given_out_while_somebody_holds_it(pool: CpuPool, name: str) -> None:
    make, look = HOLDERS[name]
    hold = make(block(pool).fill_(3.0))
    for _ in range(3):
        block(pool).fill_(7.0)
    assert (look(hold) == 3.0).all()
    del hold
    assert pool.stats().idle == pool.stats().held


def test_a_block_comes_back_to_who_asks_for_as_many_bytes(pool: CpuPool) -> None:
    first = block(pool)
    address = first.data_ptr()
    assert block(pool).data_ptr() != address
    del first
    both = block(pool), block(pool, dtype=torch.int32)
    assert address in {b.data_ptr() for b in both}
    del both
    assert pool.empty((2, N // 2), (1, 2), torch.float32).stride() == (1, 2)
    stats = pool.stats()
    assert (stats.blocks, stats.misses) == (2, 2) and stats.hits == 3


def test_small_and_empty_tensors_are_torchs_own(pool: CpuPool) -> None:
    for size in ((), (0, N), (3,), (N - 1,)):
        assert pool.empty(size, torch.empty(size, device="meta").stride(), torch.float32).shape == size
    assert pool.stats().blocks == 0


def test_a_tensor_is_as_torch_makes_it(pool: CpuPool) -> None:
    for _ in range(2):
        made = block(pool)
        assert made.untyped_storage().nbytes() == N * 4 and made.storage_offset() == 0 and made.is_contiguous()
        assert made._version == 0 and not made._is_view() and not made.is_inference() and not made.requires_grad
        with torch.inference_mode():
            assert block(pool).is_inference()
        assert made.resize_(2 * N).numel() == 2 * N  # which gives the storage other memory
        del made
    assert pool.stats().lost == 2


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "resized": lambda t: t.resize_(2 * N),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "freed and made again": lambda t: (t.untyped_storage().resize_(0), t.untyped_storage().resize_(N * 4)),
    "shared with processes": lambda t: t.share_memory_(),
    "an array once": lambda t: t.numpy(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_became_of_a_block_is_not_given_out(pool: CpuPool, name: str) -> None:
    CHANGES[name](block(pool))
    again = block(pool)
    assert again.untyped_storage().resizable() and not again.is_shared() and again.untyped_storage().nbytes() == N * 4
    assert pool.stats().hits == 0 or name == "freed and made again"


def test_copies_hold_no_more_than_a_tensor(pool: CpuPool) -> None:
    made, file = block(pool).fill_(2.0), io.BytesIO()
    torch.save(made, file)
    assert file.tell() < N * 4 + 4096
    assert (copy.deepcopy(made) == 2.0).all()
    file.seek(0)
    assert torch.equal(torch.load(file), made)


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 1, 3_000_000, (5 << 20) - 4, (1 << 33) + 12345])
def test_rounded_sizes_are_few_and_little_longer(nbytes: int) -> None:
    rounded = pools._rounded(nbytes)
    assert nbytes <= rounded < nbytes * 1.125 and pools._rounded(rounded) == rounded
    octave = {pools._rounded(n) for n in range(1 << 20, 2 << 20, 4096)}
    assert len(octave) == 9


def test_blocks_that_are_rounded_come_back_for_near_sizes(pool: CpuPool) -> None:
    """All of a block counts as held, and who asks for an exact size gets that."""
    for extra in (5, 3, 900, 12):
        made = pool.empty((N + extra,), (1,), torch.float32, rounded=True)
        assert made.shape == (N + extra,) and made.storage_offset() == 0 and made.is_contiguous()
        assert made.untyped_storage().nbytes() == pools._rounded(4 * (N + extra)) == pool.stats().held
        del made
    assert (pool.stats().hits, pool.stats().misses) == (3, 1)
    assert pool.empty((N + 12,), (1,), torch.float32).untyped_storage().nbytes() == 4 * (N + 12)


# --- what is held -----------------------------------------------------------------------------------------------------


def test_no_more_is_held_than_was_in_use(pool: CpuPool) -> None:
    """Of ever other sizes nothing comes back: idle blocks go before there would be more than the peak."""
    for rows in range(1, 12):
        made = block(pool, rows)
        assert pool.stats().held <= pools.SPARE * pool.stats().peak + 11 * N * 4
        del made
    kept = [block(pool, rows) for rows in (3, 4, 5)]
    peak = pool.stats().peak
    del kept
    for _ in range(5):
        for rows in (3, 6, 4, 2, 5):
            block(pool, rows)
            assert pool.stats().held <= peak * (1 + pools.SPARE)


def test_so_much_more_may_be_held() -> None:
    pool = CpuPool(spare=2 * N * 4)
    for rows in (1, 2, 1, 2):
        block(pool, rows)
    assert (pool.stats().hits, pool.stats().blocks) == (2, 2)
    pool = CpuPool(spare=0)
    block(pool)
    assert pool.stats().blocks == 0


def test_idle_memory_is_given_back(pool: CpuPool) -> None:
    held, busy = block(pool), block(pool)
    del busy
    pool.release_unused()
    assert pool.stats().blocks == 2
    block(pool)  # used between two looks
    pool.release_unused()
    assert pool.stats().blocks == 2
    pool.release_unused()
    assert pool.stats().blocks == 1 and pool.stats().idle == 0
    del held
    assert pool.release() == N * 4 and pool.stats().held == 0


def test_the_peak_is_a_recent_one(pool: CpuPool) -> None:
    kept = [block(pool) for _ in range(9)]
    del kept[1:]
    for _ in range(2 * pools.WINDOW + pools.LOOK):
        block(pool)
    assert pool.stats().peak == 2 * N * 4 or pool.stats().peak == N * 4


def test_memory_that_is_refused_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = CpuPool(spare=1 << 30)
    block(pool)
    refused = [True]

    def refusing(nbytes: int) -> torch.UntypedStorage:
        if refused and refused.pop():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.UntypedStorage(nbytes)

    monkeypatch.setattr(pools, "UntypedStorage", refusing)
    assert block(pool, 2).shape == (2, N)
    assert pool.stats().released == 1
    pool.release()
    refused.append(True)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        block(pool, 4)
    assert block(pool, 4).shape == (4, N)


# --- many lifetimes ---------------------------------------------------------------------------------------------------


class Checker:
    """Tensors that are alive, each with its place and the number that it is full of."""

    def __init__(self, pool: CpuPool, seed: int) -> None:
        self.pool, self.random = pool, random.Random(seed)
        self.alive: list[tuple[Tensor, int]] = []

    def step(self, number: int, places: dict[int, int], lock: threading.Lock) -> None:
        if self.alive and (len(self.alive) > 6 or self.random.random() < 0.45):
            made, written = self.alive.pop(self.random.randrange(len(self.alive)))
            assert made[0, 0] == written and made[-1, -1] == written
            with lock:
                del places[made.data_ptr()]
            return
        rows = self.random.choice((1, 1, 2, 3))
        made = block(self.pool, rows, torch.int32)
        with lock:
            begin, end = made.data_ptr(), made.data_ptr() + rows * N * 4
            assert all(end <= b or e <= begin for b, e in places.items())
            places[begin] = end
        made[0, 0] = made[-1, -1] = number
        self.alive.append((made if self.random.random() < 0.5 else made.view(torch.int32), number))


def test_ten_thousand_lifetimes_never_overlap(pool: CpuPool) -> None:
    places: dict[int, int] = {}
    lock = threading.Lock()

    def run(seed: int) -> None:
        checker = Checker(pool, seed)
        for k in range(2500):
            checker.step(seed * 10000 + k, places, lock)
            if k % 500 == 499 and seed == 0:
                pool.release_unused()
        with lock:
            for made, _ in checker.alive:
                places.pop(made.data_ptr(), None)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    stats = pool.stats()
    assert stats.idle == stats.held and stats.hits > stats.misses and stats.lost == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_has_memory_of_its_own() -> None:
    """The lock may be held, and the thread that watches is the parent's alone."""
    held = pools.POOL.empty((N,), (1,), torch.float32).fill_(1.0)
    idle = pools.POOL.empty((N,), (1,), torch.float32)
    del idle
    with pools.POOL._lock:
        child = os.fork()
    if child == 0:  # whose OpenMP has no threads: NumPy looks
        made = pools.POOL.empty((N,), (1,), torch.float32).numpy()
        made[:] = 2.0
        fine = (held.numpy() == 1.0).all() and pools.POOL._watch is None
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (held == 1.0).all()
