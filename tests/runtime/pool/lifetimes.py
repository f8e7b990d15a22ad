"""Random lifetimes of blocks in a process of its own: ``python -m tests.runtime.pool.lifetimes 10000 7``.

Blocks are made as kernels' results are, and as those of libraries; they are held in every way there is. Nobody ever
sees what another wrote, neither here nor in children; memory that the system refuses is made room for.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.runtime.pool.holders import HOLDERS
from torch_mlc.runtime.pool import ops
from torch_mlc.runtime.pool.pool import POOL

N = 1 << 18  # elements of four bytes in the smallest block
_MOST_ALIVE = 8

# Whoever has one may change where its memory is.
MOVERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "pickled": (pickle.dumps, pickle.loads),
    "shared": (lambda t: t.share_memory_(), lambda h: h),
    "resized": (lambda t: t.resize_(t.shape[0] + 1, N), lambda h: h[:-1]),
    "freed and made again": (lambda t: _remade(t), lambda h: h),
}
HOLDS = list({**HOLDERS, **MOVERS}.values())


def _remade(t: Tensor) -> Tensor:
    value, storage = t[0, 0].item(), t.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    return t.fill_(value)


def _kernel(number: float, rows: int) -> Tensor:
    return POOL.empty((rows, N), (N, 1), torch.float32, rounded=rows == 3).fill_(number)


def _library(target: str, args: Callable[[float, int], tuple[Any, ...]]) -> Callable[[float, int], Tensor]:
    op = getattr(torch.ops.aten, target).default._op
    call = ops.in_blocks(f"aten::{target}.default", op)

    def make(number: float, rows: int) -> Tensor:
        made: Tensor = call(*args(number, rows), blocks=(((rows, N), (N, 1), torch.float32, rows == 3),))
        return made

    return make


_ONES = torch.ones(1, N)
MAKERS = [
    _kernel,
    _kernel,
    _library("mm", lambda number, rows: (torch.full((rows, 1), number), _ONES)),
    _library("addmm", lambda number, rows: (torch.full((1,), number - 1), torch.ones(rows, 1), _ONES)),
    _library("cat", lambda number, rows: ([torch.full((1, N), number)] * rows,)),
]


def _check(hold: Any, look: Callable[[Any], Tensor], number: float, rows: int) -> None:
    seen = look(hold).detach().flatten()[[0, N // 2, rows * (N - 7) - 1]]  # views have a few elements less
    assert (seen == number).all(), f"{seen} where {number} was written"


def _child(alive: list[tuple[Any, Callable[[Any], Tensor], float, int]]) -> None:
    """What is held is there, and what the child makes is its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            made = [POOL.empty((1, N), (N, 1), torch.float32) for _ in range(3)]
            for m in made:
                m.numpy()[:] = -1.0  # OpenMP has no threads here
            for row in alive:
                _check(*row)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run(lifetimes: int, seed: int) -> None:
    torch.set_num_threads(1)
    POOL.least = 4 * N
    chance = random.Random(seed)
    alive: list[tuple[Any, Callable[[Any], Tensor], float, int]] = []
    for k in range(lifetimes):
        number = float(k + 1)
        hold, look = chance.choice(HOLDS)
        rows = chance.choice((1, 1, 2, 3))
        alive.append((hold(chance.choice(MAKERS)(number, rows)), look, number, rows))
        while len(alive) > _MOST_ALIVE or (alive and chance.random() < 0.45):
            _check(*alive.pop(chance.randrange(len(alive))))
        if k % 400 == 399:
            chance.choice((POOL.release_unused, POOL.release, lambda: _child(alive)))()
    for row in alive:
        _check(*row)
    alive.clear()
    del row, hold
    stats = POOL.stats()
    assert stats.idle == stats.held and stats.hits > stats.misses // 2 and stats.lost, stats


def refuse() -> None:
    """Idle blocks make room where the system has no more; then the error is torch's own."""
    POOL.spare = 1 << 40
    half = 512 << 20
    POOL.empty((half,), (1,), torch.uint8)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + half // 2, resource.RLIM_INFINITY))
    call = ops.in_blocks("aten::cat.default", torch.ops.aten.cat.default._op)
    part = torch.ones(1 << 20, dtype=torch.uint8)
    made = call([part] * 600, blocks=(((600 << 20,), (1,), torch.uint8, False),))
    assert made[-1] == 1 and POOL.stats().released
    for ask in (
        lambda: POOL.empty((1 << 40,), (1,), torch.uint8),
        lambda: call([part] * (1 << 11), blocks=(((1 << 31,), (1,), torch.uint8, False),)),
    ):
        try:
            ask()
        except RuntimeError as error:
            assert "alloc" in str(error), error
        else:
            raise AssertionError("more memory than there may be")


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
    if sys.platform.startswith("linux"):
        refuse()
    print("fine")
