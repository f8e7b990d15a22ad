"""Pages of blocks that nobody asks for any more, for new blocks of other sizes.

A page that the system gives is found and zeroed, which takes longer than most kernels need for it. A page that is
there can be moved to another address for a hundredth of that (Linux's ``mremap``). So where a block goes because blocks
of other sizes are wanted, its pages go on in those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import UntypedStorage

from .pages import LARGE_PAGE, Pages, move

# Less than that in one piece is not worth the call that moves it.
_LEAST_RUN = LARGE_PAGE


@dataclass(slots=True)
class _Left:
    """Pages in the memory of a storage that nobody else has. They go with it."""

    storage: UntypedStorage
    runs: list[Pages]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


class Reserve:
    """Pages that are in no block. ``moved`` is how many bytes of them it has given."""

    def __init__(self) -> None:
        self._left: list[_Left] = []
        self.moved = 0
        # Whether the pages were here already when idle memory was last looked for.
        self.looked = False

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(left.nbytes for left in self._left)

    def add(self, storage: UntypedStorage, runs: Iterable[Pages]) -> None:
        """Take the pages of a storage that nobody else holds. ``runs`` are those that the system moves as one."""
        left = _Left(storage, [run for run in runs if run.nbytes >= _LEAST_RUN])
        if left.runs:
            self._left.append(left)

    def fill(self, run: Pages) -> list[Pages]:
        """Move pages here to the beginning of ``run``, memory that nobody has touched. Returns what it is made of:
        pieces that came together, and at last what is left for the system to give."""
        self.looked = False
        made = []
        while self._left and run.nbytes >= _LEAST_RUN:
            last = self._left[-1]
            taken, rest = last.runs[-1].cut(run.nbytes)
            if not move(taken, run.address):
                self.release()  # of no use then
                break
            last.runs[-1:] = [rest] if rest.nbytes >= _LEAST_RUN else []
            if not last.runs:
                self._left.pop()
            self.moved += taken.nbytes
            piece, run = run.cut(taken.nbytes)
            made.append(piece)
        return [*made, run] if run.nbytes else made

    def release(self, most: int = 0) -> int:
        """Give pages back to the system until there are ``most`` bytes at most; returns how many were."""
        before = self.nbytes
        while self.nbytes > most:
            self._left.pop(0)
        return before - self.nbytes


__all__ = ["Reserve"]
