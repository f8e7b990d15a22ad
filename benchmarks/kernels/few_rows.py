"""``python -m benchmarks.kernels.few_rows``: products of few rows by weights that no cache holds, in BLAS, oneDNN and
as torch-mlc compiles them, as the table of docs/few-rows.md.

Milliseconds of CPU time on one thread, medians of interleaved rounds, each over several weights in turn. An asterisk
says that the compiled function calls a library; *best* is the faster of BLAS and oneDNN.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc

Product = Callable[[Tensor, Tensor], Tensor]
OPTIONS = {"threads": 1, "cache": False}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``[rows, k]`` by a weight ``[n, k]``, which lies along the sum."""
    return F.linear(x, weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``[rows, k]`` by a weight ``[k, n]``, which lies along its columns."""
    return x @ weight


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return out


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    return onednn_linear(x, weight.t())


@dataclass(frozen=True, slots=True)
class FewRows:
    """Median milliseconds of BLAS, of oneDNN and of the compiled function, and whether that calls a library."""

    blas: float
    onednn: float
    ours: float
    is_library: bool

    @property
    def cells(self) -> str:
        mark = "*" if self.is_library else ""
        best = min(self.blas, self.onednn)
        return f"{self.blas:.2f} | {self.onednn:.2f} | {self.ours:.2f}{mark} | {best / self.ours:.2f}"


def compiled(fn: Product, x: Tensor, weight: Tensor) -> tuple[Product, bool]:
    """The function for these sizes alone, and whether it calls a library."""
    graph = torch_mlc.explain(fn, x, weight, options=OPTIONS).graphs[0]
    torch._dynamo.reset()
    return torch.compile(fn, backend="mlc", dynamic=False, options=OPTIONS), bool(graph.libraries)


def measured(fn: Product, onednn: Product, x: Tensor, weights: list[Tensor], rounds: int) -> FewRows:
    """Times of a number of rows. Raises AssertionError where a result is not that of float64."""
    ours, is_library = compiled(fn, x, weights[0])
    fns = (fn, onednn, ours)
    exact = fn(x.double(), weights[0].double())
    for one in fns:
        torch.testing.assert_close(one(x, weights[0]).double(), exact, atol=1e-4, rtol=1e-3)
    found: list[list[float]] = [[], [], []]
    for turn in range(rounds + 1):
        for k in ((turn + i) % len(fns) for i in range(len(fns))):
            begin = time.process_time()
            for weight in weights:
                fns[k](x, weight)
            if turn:
                found[k].append((time.process_time() - begin) / len(weights) * 1e3)
    return FewRows(*map(median, found), is_library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,3,4,8,12,13,16")
    parser.add_argument("--size", default="4096,4096", help="terms of a sum, columns")
    parser.add_argument("--weights", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    terms, columns = map(int, given.size.split(","))
    along_sum = [torch.randn(columns, terms) * terms**-0.5 for _ in range(given.weights)]
    along_columns = [w.t().contiguous() for w in along_sum]
    print(f"load {os.getloadavg()[0]:.1f}")
    print("| rows | BLAS | oneDNN | ours | best / ours | BLAS | oneDNN | ours | best / ours |")
    print("|" + " --- |" * 9)
    with torch.no_grad():
        for rows in map(int, given.rows.split(",")):
            x = torch.randn(rows, terms)
            one = measured(linear, onednn_linear, x, along_sum, given.rounds)
            other = measured(product, onednn_product, x, along_columns, given.rounds)
            print(f"| {rows} | {one.cells} | {other.cells} |", flush=True)


if __name__ == "__main__":
    main()
