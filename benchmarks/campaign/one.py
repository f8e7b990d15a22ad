"""Runs one kernel twice on a GPU, for a tool that watches: `python -m benchmarks.campaign.one NAME cpu|cuda`."""

from __future__ import annotations

import sys

import torch

from .cases import NamedKernel
from .stages.kernels import compiled


def main(name: str, kind: str) -> None:
    """Run the kernel of that name at the size of a ``kind``."""
    kernel = NamedKernel.of(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, function = kernel.inputs(kind, device), compiled(kernel)
    for _ in range(2):
        kernel.results(function, inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"ran {name}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
