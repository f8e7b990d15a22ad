"""A GPU as the current one of a thread, with the context under which kernels are launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch

from ...codegen.host.native.launch import CONTEXT_FROM_PYTHON, CONTEXTS
from ..cpu import LoadedObject, fast_function, load_text
from .driver import CDriver, Driver, driver_of

_exchange: Callable[[int], int] = torch.cuda._exchange_device
_give_back: Callable[[int], int] = torch.cuda._maybe_exchange_device


class GpuGuard:
    """``with GpuGuard(index):`` makes a GPU the current one, as ``torch.cuda.device`` does, in threads too that have
    used none yet: there torch leaves GPU 0 without a context. Raises GpuDriverError."""

    __slots__ = ("_before", "_index")

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._before = _exchange(self._index)
        status = _giver(self._index)()
        if status:
            _give_back(self._before)
            _driver().check(status, f"use GPU {self._index}")

    def __exit__(self, *_: Any) -> None:
        _give_back(self._before)


def _driver() -> CDriver:
    return driver_of("cuda" if torch.version.hip is None else "hip")


@cache
def _giver(index: int) -> Callable[[], int]:
    return context_giver(_driver(), index)


def context_giver(driver: Driver, device: int) -> Callable[[], int]:
    """What gives a thread that has no context the one of a device, and returns what the driver says, 0 if all is
    well."""
    words = (ctypes.c_int64 * 3)(*driver.context(device))
    code = _context_from_python()
    return fast_function(code.addresses["mlc_context_from_python"], ctypes.addressof(words), (code, words))


@lru_cache(maxsize=1)
def _context_from_python() -> LoadedObject:
    return load_text(CONTEXTS + CONTEXT_FROM_PYTHON, ["mlc_context_from_python"])
