"""Parameters that nobody needs any more give their memory back.

A weight that was packed or folded is in memory twice, the plain one beside what was made of it. Where the caller asks
for it, the plain one goes: the tensor stays, with its shape, strides and type, so that guards on it hold, but its
elements are all one page of memory, which is mapped again and again and in which every bit is set. A float that is
read there is no number. Whoever writes to the tensor (``load_state_dict``) gets memory for what was written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# Tensors of fewer bytes stay as they are: their pages are shared with others.
LEAST_BYTES = 64 << 10
# Bytes of the memory that all such tensors show. A tensor is so many of the system's mappings as it has multiples of
# it, of which a process may have some 65,000.
_SHOWN = 8 << 20
_FLAGS = (
    getattr(mmap, "MAP_PRIVATE", 0),
    getattr(mmap, "MAP_ANONYMOUS", 0),
    getattr(mmap, "MAP_NORESERVE", 0x4000),
)
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def can_discard(tensor: Tensor) -> bool:
    """Whether a tensor is one of a CPU whose memory is its own and large enough, on a system that can do it."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor._base is None
        and tensor.untyped_storage().nbytes() >= LEAST_BYTES
        and _system() is not None
    )


def discard(tensor: Tensor) -> int:
    """Let a tensor show memory that is none of its own; the bytes that are given back once nobody else reads the memory
    that it had. Raises MemoryError where the system refuses."""
    size, stride, nbytes = tensor.size(), tensor.stride(), tensor.untyped_storage().nbytes()
    place = tensor.storage_offset()
    with torch.inference_mode(tensor.is_inference()):
        shown = torch.frombuffer(_mapped(nbytes), dtype=torch.uint8).view(tensor.dtype)
        tensor.data = shown.as_strided(size, stride, place)
    _DISCARDED[tensor.data_ptr()] = version_of(tensor)
    weakref.finalize(tensor.untyped_storage(), _DISCARDED.pop, tensor.data_ptr(), None)
    counted.discards += 1
    return nbytes


def is_discarded(tensor: Tensor) -> bool:
    """Whether a tensor's elements are gone, and it was not written since."""
    if not _DISCARDED or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return _DISCARDED.get(tensor.data_ptr()) == version_of(tensor)


def version_of(tensor: Tensor) -> int:
    """How often it was written. Tensors that were made in inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


class _Counted:
    """How often a tensor of this process was discarded: where that has not changed, nothing needs to be checked."""

    discards = 0


counted = _Counted()
# By address, the version of then.
_DISCARDED: dict[int, int] = {}


def _mapped(nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Memory in which every bit is set, and which takes none."""
    system = _system()
    assert system is not None
    map_at, unmap, file = system
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    private, anonymous, unreserved = _FLAGS
    both = mmap.PROT_READ | mmap.PROT_WRITE
    first = map_at(None, whole, both, private | anonymous | unreserved, -1, 0)
    if first == _FAILED:
        raise MemoryError(f"the system refused {whole} bytes of addresses")
    for at in range(0, whole, _SHOWN):
        if map_at(first + at, min(_SHOWN, whole - at), both, private | unreserved | _MAP_FIXED, file, 0) == _FAILED:
            unmap(first, whole)
            raise MemoryError("the system refused another mapping of a file")
    buffer = (ctypes.c_ubyte * nbytes).from_address(first)
    weakref.finalize(buffer, unmap, first, whole)
    return buffer


@cache
def _system() -> tuple[Callable[..., int], Callable[..., int], int] | None:
    """``mmap`` and ``munmap``, and the file that is mapped; None where the system has no files of memory."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    map_at, unmap = libc.mmap, libc.munmap
    map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    map_at.restype = ctypes.c_void_p
    unmap.argtypes, unmap.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    try:
        file = os.memfd_create("torch_mlc_discarded")
        os.write(file, b"\xff" * _SHOWN)
    except OSError:
        return None
    return map_at, unmap, file


__all__ = ["LEAST_BYTES", "can_discard", "counted", "discard", "is_discarded", "version_of"]
