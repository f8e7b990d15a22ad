"""What functions of a library return, and how a sentence is written."""

from __future__ import annotations

CODES = {
    "ok": 0, "argument": 1, "tensor": 2, "size": 3, "index": 4, "file": 5, "processor": 6, "memory": 7,
}  # fmt: skip
"""Codes by what is wrong."""
MESSAGE_BYTES = 1024
SAY = f"call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 {MESSAGE_BYTES}, ptr"
"""The begin of a call that writes a sentence to ``%text``."""
