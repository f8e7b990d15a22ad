"""What native host programs know of a GPU kernel on one device: words that they read at each launch.

``codegen/host_launch.py`` has the function that reads them, and says what each word is.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from ..codegen.host_launch import RECORD, VARIANT_WORDS, VARIANTS


class LaunchRecord:
    """The words of one kernel on one device, at ``address`` as long as this object lives.

    Variants are put there when they have been loaded; what finds none that fits asks Python for it. Code may read the
    words at any time, so a variant counts after it is whole, and stays as it is.
    """

    def __init__(self, relaxable: Sequence[bool], sizes: int) -> None:
        self._words = (ctypes.c_int64 * (len(RECORD) + VARIANTS * VARIANT_WORDS))()
        self._masks: list[int] = []
        self._lock = threading.Lock()
        self._put("pointers", len(relaxable))
        self._put("arguments", len(relaxable) + sizes)
        self._put("relaxable", mask_of(relaxable))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def add(self, aligned: Sequence[bool], function: int, threads: int, shared: int, parameters: int) -> None:
        """Make a variant known; one that finds no room is left to Python."""
        mask = mask_of(aligned)
        with self._lock:
            if mask in self._masks or len(self._masks) == VARIANTS:
                return
            at = len(RECORD) + len(self._masks) * VARIANT_WORDS
            self._words[at : at + VARIANT_WORDS] = [mask, function, threads, shared, parameters]
            self._masks.append(mask)
        # Behind the lock's release, by which other processors see the variant before the count.
        self._put("variants", len(self._masks))

    def _put(self, word: str, value: int) -> None:
        self._words[RECORD.index(word)] = value


def mask_of(flags: Sequence[bool]) -> int:
    """A bit for each flag, the first one's lowest."""
    return sum(1 << k for k, flag in enumerate(flags) if flag)
