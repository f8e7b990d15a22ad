"""What functions of a library return, and how a sentence is written."""

from __future__ import annotations

CODES = {
    "ok": 0, "argument": 1, "tensor": 2, "size": 3, "index": 4, "file": 5, "processor": 6, "memory": 7,
    "device": 8, "library": 9,
}  # fmt: skip
"""Codes by what is wrong."""
DEVICE = (1, 2)
"""DLPack's kinds of the host, and of an NVIDIA GPU."""
REFUSED, MISPLACED, TOO_LARGE = 3, 4, 5
"""What launches tell where kernels of a CPU tell of an index: that a GPU's driver refused, that an address is no
multiple of 16 bytes that has to be one, and that a size is beyond what a library of products takes."""
DRAWS = "mlc_seeds"
"""What host programs call for seeds of random numbers: ``(target, count)``."""
COPY = "mlc_copy"
"""What host programs of GPUs call to copy bytes: ``(target, source, bytes)``."""


def product_symbol(function: str) -> str:
    """What host programs call for products of a library, "sgemm" or "dgemm"."""
    return f"mlc_{function}"


MESSAGE_BYTES = 1024
SAY = f"call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 {MESSAGE_BYTES}, ptr"
"""The begin of a call that writes a sentence to ``%text``."""
