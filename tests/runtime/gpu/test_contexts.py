"""The driver's view of contexts and of AMD's current device, over C functions that are played."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.runtime.played_driver import ILLEGAL, PlayedLibrary
from torch_mlc.runtime.gpu.context import context_giver
from torch_mlc.runtime.gpu.driver import CDriver, GpuDriverError

I32, POINTER = ctypes.c_int32, ctypes.c_void_p


class PlayedHip:
    """AMD's runtime: a thread has a current device, by default the first, and needs no context."""

    def __init__(self) -> None:
        self.device, self.loads, self.launches, self.status = 0, list[int](), list[tuple[int, ...]](), 0

        def c(function: Any, *kinds: Any) -> Any:
            return ctypes.CFUNCTYPE(I32, *kinds)(function)

        self.hipGetDevice = c(self._get, ctypes.POINTER(I32))
        self.hipSetDevice = c(self._set, I32)
        self.hipModuleLoadData = c(self._load, POINTER, POINTER)
        self.hipModuleGetFunction = c(self._function, ctypes.POINTER(POINTER), POINTER, ctypes.c_char_p)
        self.hipFuncSetAttribute = c(lambda *_: 1, POINTER, I32, I32)
        self.hipModuleLaunchKernel = c(self._launch, POINTER, *[ctypes.c_uint32] * 7, POINTER, POINTER, POINTER)
        self.hipStreamSynchronize = c(lambda stream: self.status, POINTER)
        self.hipStreamIsCapturing = c(lambda stream, state: 0, POINTER, POINTER)
        self.hipGetErrorString = ctypes.CFUNCTYPE(POINTER, I32)(lambda _: ctypes.cast(WORDS, POINTER).value)

    def _get(self, device: Any) -> int:
        device[0] = self.device
        return 0

    def _set(self, device: int) -> int:
        self.device = device
        return 0

    def _load(self, module: Any, code: int) -> int:
        self.loads.append(self.device)
        return self.status

    def _function(self, function: Any, module: int, name: bytes) -> int:
        function[0] = 7
        return 0

    def _launch(self, *given: int) -> int:
        self.launches.append(given)
        return self.status


WORDS = ctypes.c_char_p(b"an illegal memory access was encountered")


def test_amds_modules_are_loaded_on_their_device() -> None:
    library = PlayedHip()
    driver = CDriver("hip", library)
    for before in (0, 2):
        library.device = before
        for device in (0, 1, 2):
            driver.load(b"", "k", 1 << 20, device)
            assert library.device == before
    assert library.loads == [0, 1, 2] * 2
    assert driver.context(1) == (0, 0, 0) and context_giver(driver, 1)() == 0


@pytest.mark.parametrize("what", ["load", "launch", "wait"])
def test_amds_errors_are_in_its_words(what: str) -> None:
    library = PlayedHip()
    driver = CDriver("hip", library)
    library.status = ILLEGAL
    with pytest.raises(GpuDriverError, match=r"an illegal memory access was encountered \(hip status 700\)") as told:
        match what:
            case "load":
                driver.load(b"", "k", 0, 0)
            case "launch":
                driver.launch(0, 7, (1, 1, 1), 64, 0, 0, None)
            case _:
                driver.wait(0, 0)
    assert told.value.late == (what != "wait")


def test_a_thread_is_given_a_context_once() -> None:
    library = PlayedLibrary()
    give = context_giver(CDriver("cuda", library), 0)
    assert give() == 0 and library.context == 100
    library.context = 101  # somebody's choice
    assert give() == 0 and library.context == 101
    library.context, library.no_contexts = 0, True
    assert give() == 2


def test_loading_leaves_the_context_of_a_thread() -> None:
    library = PlayedLibrary()
    driver = CDriver("cuda", library)
    for before, device, after in ((0, 0, 100), (0, 1, 0), (100, 1, 100), (101, 0, 101), (201, 1, 201)):
        library.context = before
        driver.load(b"", "k", 0, device)
        assert library.context == after and library.homes[-1] % 100 == device
    assert library.retained == [0, 1]
