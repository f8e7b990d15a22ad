"""Pages of blocks that went go on in others: nobody sees what was in them change, and no more is held than before."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import UntypedStorage

from torch_mlc.codegen.host.memory.blocks import LEAST_WATCHED
from torch_mlc.runtime.pool import pages, reserve
from torch_mlc.runtime.pool import pool as pools
from torch_mlc.runtime.pool.pages import Pages, can_move, move, pages_of
from torch_mlc.runtime.pool.pool import CpuPool
from torch_mlc.runtime.pool.reserve import Reserve

PAGE, MANY = 4096, LEAST_WATCHED
moving = pytest.mark.skipif(not can_move(), reason="the system does not move pages")


def tensor(pool: CpuPool, nbytes: int) -> torch.Tensor:
    return pool.empty((nbytes // 4,), (1,), torch.int32)


def resident(place: Pages) -> int:
    """Bytes that the system has given memory to, of whole pages."""
    first = place.address // PAGE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(first * 8)
        found = file.read(place.nbytes // PAGE * 8)
    return sum(entry >> 7 for entry in found[7::8]) * PAGE


@pytest.mark.parametrize(
    ("address", "nbytes", "pages"),
    [(PAGE, PAGE, (PAGE, PAGE)), (PAGE + 64, 3 * PAGE, (2 * PAGE, 2 * PAGE)), (64, PAGE, (PAGE, 0)), (4, 9, (PAGE, 0))],
)
def test_pages_lie_in_memory_as_a_whole(address: int, nbytes: int, pages: tuple[int, int]) -> None:
    assert pages_of(address, nbytes) == Pages(*pages)


@moving
def test_pages_are_moved_with_what_is_in_them() -> None:
    source, target = UntypedStorage(MANY), UntypedStorage(MANY + 7 * PAGE)
    source.fill_(3)
    target.fill_(5)
    from_, to = pages_of(source.data_ptr(), MANY), pages_of(target.data_ptr(), MANY)
    assert move(Pages(from_.address, 2 * PAGE), to.address + PAGE)
    begin = to.address + PAGE - target.data_ptr()
    assert [target[begin + k] for k in (-1, 0, 2 * PAGE - 1, 2 * PAGE)] == [5, 3, 3, 5]
    begin = from_.address - source.data_ptr()
    assert [source[begin + k] for k in (-1, 0, 2 * PAGE - 1, 2 * PAGE)] == [3, 0, 0, 3]
    assert not move(Pages(from_.address, 0), to.address)  # which is no mapping


@moving
def test_a_block_of_another_size_has_the_pages_of_one_that_went() -> None:
    """No page is asked for, nothing is held twice, and all that is wanted is there."""
    pool = CpuPool()
    sizes = MANY + (1 << 20), MANY + (5 << 20), 2 * MANY
    tensor(pool, sizes[2]).fill_(1)
    peak = pool.stats().peak
    for nbytes in (sizes * 4)[:11]:
        made = tensor(pool, nbytes)
        place = pages_of(made.data_ptr(), nbytes)
        assert resident(place) >= nbytes - 3 * reserve._LEAST_RUN
        assert pool.stats().held <= peak * (1 + pools.SPARE)
        made.fill_(7)
        assert (made == 7).all()
        del made, place
    stats = pool.stats()
    assert stats.moved > 9 * MANY and stats.idle == stats.held
    pool.release()
    assert pool.stats().held == 0


@moving
def test_pages_go_back_when_idle_or_where_they_are_too_many() -> None:
    kept = Reserve()
    for nbytes in (MANY, 2 * MANY, PAGE):
        storage = UntypedStorage(nbytes)
        kept.add(storage, [pages_of(storage.data_ptr(), nbytes)])
    whole = kept.nbytes
    assert 3 * MANY - 2 * PAGE <= whole <= 3 * MANY
    assert kept.release(whole) == 0 and kept.release(2 * MANY) == whole - kept.nbytes > 0
    pool = CpuPool()
    made = tensor(pool, 2 * MANY)
    del made
    held = tensor(pool, MANY)
    assert pool.stats().idle == pool._reserve.nbytes > MANY // 2
    pool.release_unused()
    assert pool._reserve.nbytes
    pool.release_unused()
    assert pool.stats().idle == 0 and held[0].shape == ()


def test_where_pages_do_not_move_blocks_are_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_mremap", lambda: lambda *args: None)
    pool = CpuPool()
    for nbytes in (2 * MANY, MANY, 2 * MANY, MANY + PAGE):
        made = tensor(pool, nbytes).fill_(4)
        assert (made == 4).all()
        del made
    assert pool.stats().moved == 0 and pool._reserve.nbytes == 0


@moving
def test_lifetimes_in_threads_never_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small blocks too, whose memory is the C library's: pages are moved there all the time."""
    monkeypatch.setattr(pools, "LEAST_WATCHED", 1 << 20)
    monkeypatch.setattr(reserve, "_LEAST_RUN", PAGE)
    pool = CpuPool(least=1 << 20)

    def run(seed: int) -> None:
        chance, alive = random.Random(seed), []
        for k in range(600):
            if len(alive) > 3 or (alive and chance.random() < 0.45):
                made, number = alive.pop(chance.randrange(len(alive)))
                assert (made[:: PAGE // 4] == number).all() and made[-1] == number
                del made
                continue
            made = tensor(pool, chance.randrange(1 << 20, 6 << 20, 64)).fill_(seed * 1000 + k)
            alive.append((made.view(2, -1).flatten() if k % 2 and len(made) % 2 == 0 else made, seed * 1000 + k))
            del made
        for made, number in alive:
            assert (made == number).all()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))
    stats = pool.stats()
    assert stats.idle == stats.held and stats.moved > 100 << 20 and stats.lost == 0
    assert stats.held <= stats.peak * (1 + pools.SPARE) + (6 << 20)
