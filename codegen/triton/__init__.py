"""Triton source from scheduled loop nests."""

from .emit import emit_triton

__all__ = ["emit_triton"]
