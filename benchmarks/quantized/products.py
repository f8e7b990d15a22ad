"""Quantized products beside torch's own and beside reading as many bytes: CPU time of one thread, rounds in turn.

    python -m benchmarks.quantized.products --outputs 14336 --inputs 4096 --rows 1 4 16

Weights are many enough that no cache holds them. Medians, in microseconds, and gigabytes of weights and scales a
second.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import torch_mlc

Calls = list[Callable[[], object]]
GROUP, PAST_CACHES, ROUND = 32, 160e6, 0.15


def layers(rows: int, inputs: int, outputs: int, weights: str, activations: str | None, count: int) -> Calls:
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    torch_mlc.quantize_(model, weights, GROUP, activations)
    x = torch.randn(rows, inputs)
    compiled = [torch.compile(copy.deepcopy(model), backend="mlc") for _ in range(count)]
    return [lambda m=m: m(x) for m in compiled]  # type: ignore[misc]


def cases(rows: int, inputs: int, outputs: int) -> dict[str, tuple[Calls, float]]:
    """What is timed by name, and the bytes that one call reads."""
    numbers, found = inputs * outputs, {}
    for weights, size in (("int4", 0.5), ("int8", 1.0)):
        nbytes = numbers * size + numbers / GROUP * 2
        count = int(PAST_CACHES // nbytes) + 1
        read = [torch.randn(int(nbytes) // 4) for _ in range(count)]
        found[f"read {weights}"] = [lambda t=t: t.sum() for t in read], nbytes
        for activations in (None, "int8"):
            calls = layers(rows, inputs, outputs, weights, activations, count)
            found[f"{weights}, {activations or 'float32'} rows"] = calls, nbytes
    plain, x = [torch.randn(outputs, inputs) for _ in range(2)], torch.randn(rows, inputs)
    found["float32 BLAS"] = [lambda w=w: F.linear(x, w) for w in plain], numbers * 4.0
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales, half = torch.rand(inputs // GROUP, outputs, 2).bfloat16(), x.bfloat16()
    copies = [packed.clone() for _ in range(int(PAST_CACHES // packed.nbytes) + 1)]
    called = [lambda w=w: torch._weight_int4pack_mm_for_cpu(half, w, GROUP, scales) for w in copies]
    found["int4pack"] = called, packed.nbytes + scales.nbytes
    return found


@torch.no_grad()
def measure(rows: int, inputs: int, outputs: int, rounds: int) -> None:
    timed = cases(rows, inputs, outputs)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for calls, _ in timed.values():
        for call in calls:
            call()
    for _ in range(rounds):
        for name, (calls, _) in timed.items():
            started, done = time.process_time(), 0
            while time.process_time() - started < ROUND:
                for call in calls:
                    call()
                done += len(calls)
            seconds[name].append((time.process_time() - started) / done)
    print(f"\n{rows} rows, {outputs} x {inputs}, load {os.getloadavg()[0]:.1f}\n\n| | us | GB/s |\n|---|---|---|")
    for name, (_, nbytes) in timed.items():
        took = statistics.median(seconds[name])
        print(f"| {name} | {took * 1e6:.0f} | {nbytes / took / 1e9:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for rows in asked.rows:
        measure(rows, asked.inputs, asked.outputs, asked.rounds)


if __name__ == "__main__":
    main()
