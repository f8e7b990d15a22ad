"""Which memory of the CPU a program asks its process's pool for (``runtime/pool``), and which torch alone."""

from __future__ import annotations

import sympy

from ....ir.graph.graph import TensorType

# Bytes from which a tensor is a block of the pool. The C library keeps smaller ones, and takes less time for them.
LEAST_BLOCK = 1 << 20


def may_be_block(kind: TensorType) -> bool:
    """Whether a tensor's memory may be a block of the pool: where sizes vary, each call says."""
    size = kind.numel * kind.dtype.itemsize
    return kind.device == "cpu" and not (size.is_Integer and size < LEAST_BLOCK)


def bytes_of(kind: TensorType) -> sympy.Expr:
    """Bytes of a tensor's elements."""
    return sympy.sympify(kind.numel * kind.dtype.itemsize)
