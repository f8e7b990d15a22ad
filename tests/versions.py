"""What older versions of torch and Triton cannot do, or do otherwise, for tests that ask for it (CONTRIBUTING.md)."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton


def version(text: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    first, second = text.split(".")[:2]
    return int(first), int(second)


TORCH, TRITON = version(torch.__version__), version(triton.__version__)
# Whether explanations have entries of their own in Dynamo's cache, which count toward no limit of others.
ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters

needs_aot_compile = pytest.mark.skipif(
    not torch._dynamo.config.enable_aot_compile, reason="this torch has no aot_compile that a backend can take part in"
)
# Each raises, or does not, with the backend aot_eager too, which compiles nothing.
torch_mends_it = pytest.mark.skipif(TORCH < (2, 12), reason="a fault of torch 2.11, whatever the backend")
triton_mends_it = pytest.mark.skipif(TRITON < (3, 7), reason="a fault of Triton 3.6")
# Kernels for which its assembler finds no registers, or narrow loads: a gap of ours, which newer ones hide.
heavy_with_triton_3_6 = pytest.mark.xfail(TRITON < (3, 7), reason="some bytes spill, or loads are narrow", strict=False)
