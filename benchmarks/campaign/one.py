"""Runs kernels twice each on a GPU, for a tool that watches: `python -m benchmarks.campaign.one cpu|cuda NAME…`."""

from __future__ import annotations

import sys

import torch

from .cases import NamedKernel
from .stages.kernels import compiled


def main(kind: str, *names: str) -> None:
    """Run the kernels of those names at the size of a ``kind``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in names:
        kernel = NamedKernel.of(name)
        inputs, function = kernel.inputs(kind, device), compiled(kernel)
        for _ in range(2):
            kernel.results(function, inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
