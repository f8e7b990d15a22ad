"""What machine code knows of a GPU kernel on one device: words that it reads at each launch.

``codegen/host/native/launch.py`` has the function that reads them, and says what each word is.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

from ...codegen.host.native.launch import CONTEXT, FAR, LAUNCH, LAUNCH_FROM_PYTHON, RECORD, VARIANT_WORDS, VARIANTS
from ..cpu import LoadedObject, fast_function, load_text


class LaunchRecord:
    """The words of one kernel on one device, at ``address`` as long as this object lives.

    Variants are put there when they have been loaded; what finds none that fits asks Python for it. Code may read the
    words at any time, so a variant counts after it is whole, and stays as it is.
    """

    def __init__(
        self,
        relaxable: Sequence[bool],
        sizes: int,
        launcher: int,
        context: Sequence[int] = (0, 0, 0),
        early_launcher: int = 0,
    ) -> None:
        """``launcher`` is the address of the driver's function that launches, ``early_launcher`` of the one that
        launches before the kernel ahead has ended, ``context`` the words ``CONTEXT``."""
        self._words = (ctypes.c_int64 * (len(RECORD) + VARIANTS * VARIANT_WORDS))()
        self._masks: list[int] = []
        self._lock = threading.Lock()
        self._put("pointers", len(relaxable))
        self._put("arguments", len(relaxable) + sizes)
        self._put("relaxable", mask_of(relaxable))
        self._put("launcher", launcher)
        self._put("early_launcher", early_launcher)
        for word, value in zip(CONTEXT, context, strict=True):
            self._put(word, value)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def function(self) -> Callable[..., int]:
        """``launch(x, y, z, reach, stream, address, …, size, …)`` from Python; 0, or what the driver says, or what
        ``mlc_launch`` does."""
        code = _launch_from_python()
        return fast_function(code.addresses["mlc_launch_from_python"], self.address, (code, self))

    def add(
        self,
        aligned: Sequence[bool],
        function: int,
        threads: int,
        shared: int,
        parameters: int,
        *,
        far: bool = False,
        dependent: bool = False,
    ) -> None:
        """Make a variant known, ``far`` where it is for indices of 64 bits, ``dependent`` where it waits for the kernel
        ahead by itself; one that finds no room is left to Python."""
        mask = mask_of(aligned) | (FAR if far else 0)
        with self._lock:
            if mask in self._masks or len(self._masks) == VARIANTS:
                return
            at = len(RECORD) + len(self._masks) * VARIANT_WORDS
            self._words[at : at + VARIANT_WORDS] = [mask, function, threads, shared, parameters, int(dependent)]
            self._masks.append(mask)
        # Behind the lock's release, by which other processors see the variant before the count.
        self._put("variants", len(self._masks))

    def _put(self, word: str, value: int) -> None:
        self._words[RECORD.index(word)] = value


@lru_cache(maxsize=1)
def _launch_from_python() -> LoadedObject:
    return load_text(LAUNCH_FROM_PYTHON + LAUNCH, ["mlc_launch_from_python"])


def mask_of(flags: Sequence[bool]) -> int:
    """A bit for each flag, the first one's lowest."""
    return sum(1 << k for k, flag in enumerate(flags) if flag)
