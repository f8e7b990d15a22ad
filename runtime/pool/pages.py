"""Pages of memory: large ones, and ones that are moved.

A page of 2 MiB comes in a fraction of the time of the 512 that it stands for. A page that is there moves to another
address in a fraction of the time in which a new one comes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Of a large page, on every processor that has them by `madvise` with pages of 4 KiB.
LARGE_PAGE = 2 << 20
_PAGE = 4096
_MADV_HUGEPAGE = 14
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Pages:
    """Whole pages behind one another."""

    address: int
    nbytes: int

    def cut(self, nbytes: int) -> tuple[Pages, Pages]:
        """The first pages, so many bytes of them at most, and the others."""
        first = min(self.nbytes, nbytes)
        return Pages(self.address, first), Pages(self.address + first, self.nbytes - first)


def pages_of(address: int, nbytes: int) -> Pages:
    """The pages that lie in some memory as a whole."""
    first = -(-address // _PAGE) * _PAGE
    return Pages(first, max((address + nbytes) // _PAGE * _PAGE - first, 0))


def can_move() -> bool:
    """Whether the system moves pages; it is asked once, with two of its own."""
    return _mremap() is not None


def move(pages: Pages, to: int) -> bool:
    """Move pages to the address ``to``, in whose place as many are given up; whether the system did.

    Where they were are pages that nobody has touched. The pages have to be of one mapping: no borders of other moves
    are between them.
    """
    ask = _mremap()
    return ask is not None and _moved(ask, pages, to)


def advise(address: int, nbytes: int) -> bool:
    """Ask the system to give memory that nobody has touched in large pages; whether it will.

    Nothing is held that was not asked for: only pages that lie in the memory as a whole become large.
    """
    ask, pages = _madvise(), pages_of(address, nbytes)
    return ask is not None and pages.nbytes >= LARGE_PAGE and ask(pages.address, pages.nbytes, _MADV_HUGEPAGE) == 0


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's function, None where it is of no use: no Linux, or large pages for all or for none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        if "[madvise]" not in _ENABLED.read_text():
            return None
    except OSError:
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function  # type: ignore[no-any-return]


@cache
def _mremap() -> Callable[..., int | None] | None:
    """The system's function, None where it cannot leave the old place mapped (before Linux 5.7, and elsewhere)."""
    if not sys.platform.startswith("linux") or os.sysconf("SC_PAGE_SIZE") != _PAGE:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "mremap", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    function.restype = ctypes.c_void_p
    source, target = mmap.mmap(-1, 3 * _PAGE, _PRIVATE), mmap.mmap(-1, 3 * _PAGE, _PRIVATE)
    source[:] = b"1" * (3 * _PAGE)
    places = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (source, target)]
    moved = _moved(function, Pages(places[0] + _PAGE, _PAGE), places[1] + _PAGE)
    fine = moved and source[::_PAGE] == b"1\x001" and target[::_PAGE] == b"\x001\x00"
    return function if fine else None


def _moved(ask: Callable[..., int | None], pages: Pages, to: int) -> bool:
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return ask(pages.address, pages.nbytes, pages.nbytes, flags, to) == to


__all__ = ["LARGE_PAGE", "Pages", "advise", "can_move", "move", "pages_of"]
