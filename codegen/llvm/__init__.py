"""LLVM IR for CPUs: explicit vectors, inlined mathematics, OpenMP teams."""

from .module import emit_llvm

__all__ = ["emit_llvm"]
