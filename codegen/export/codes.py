"""What functions of a library return, and how a sentence is written."""

from __future__ import annotations

CODES = {
    "ok": 0, "argument": 1, "tensor": 2, "size": 3, "index": 4, "file": 5, "processor": 6, "memory": 7,
    "device": 8, "library": 9,
}  # fmt: skip
"""Codes by what is wrong."""
DEVICE = (1, 2)
"""DLPack's kinds of the host, and of an NVIDIA GPU."""
REFUSED, MISPLACED = 3, 4
"""What launches on a GPU tell where kernels of a CPU tell of an index: that the driver refused, and that an address is no
multiple of 16 bytes that has to be one."""
MESSAGE_BYTES = 1024
SAY = f"call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 {MESSAGE_BYTES}, ptr"
"""The begin of a call that writes a sentence to ``%text``."""
