"""``python -m benchmarks.regions``: CPU time of one compilation for all numbers of tokens over one for each.

Times are of the process, in turns, so that a machine that others use too tells ratios. Prints the ratio of compile
times, each of a process of its own, since one program would find kernels of the other; then of each number of tokens
the median of ratios, and how often Dynamo compiled.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ..models.llama import LlamaConfig
from .tokens import LlamaTokens, inputs

# Seconds of one turn, and calls before the first: host programs are machine code from the 65th on.
TURN, WARM = 0.03, 70


def compiled(
    model: nn.Module, name: str, args: tuple[Tensor, ...], dynamic: bool, options: dict[str, Any]
) -> tuple[Callable[..., Any], float]:
    """The model under a code object of its own, and the CPU seconds until its first result."""
    scope: dict[str, Any] = {}
    exec(compile("def call(model, *args):\n    return model(*args)\n", f"<{name}>", "exec"), scope)
    fn = torch.compile(scope["call"], backend="mlc", dynamic=None if dynamic else False, options=options)
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 1)
        torch._dynamo.mark_dynamic(args[1], 0)
    begin = time.process_time()
    fn(model, *args)
    return lambda *given: fn(model, *given), time.process_time() - begin


def seconds(fn: Callable[..., Any], args: tuple[Tensor, ...], times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        fn(*args)
    return time.process_time() - begin


def compile_seconds(config: str, first: int, regions: str) -> float:
    """CPU seconds of compiling in a process of its own."""
    command = [sys.executable, "-m", __package__, "--compile-only", "--config", config, "--first", str(first)]
    done = subprocess.run([*command, "--regions", regions], check=True, capture_output=True, text=True)
    return float(done.stdout)


def told_compile_times(config: str, first: int, regions: str, rounds: int = 3) -> str:
    """The median ratio of compiling with regions and with one program, in turns."""
    pairs = [[compile_seconds(config, first, r) for r in (regions, "0")] for _ in range(rounds)]
    own, one = (statistics.median(p) for p in zip(*pairs, strict=True))
    return f"{own:.2f} s, {one:.2f} s with one program, {statistics.median(a / b for a, b in pairs):.2f} times"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config", default="8,256,8,2,688,2048", help="layers, dim, heads, kv heads, hidden, vocabulary"
    )
    parser.add_argument("--tokens", default="1,2,4,8,16,32,128,1024,4096")
    parser.add_argument("--first", type=int, default=64, help="tokens of the call that compiles")
    parser.add_argument("--regions", default="auto")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--compile-only", action="store_true", help="print the CPU seconds of compiling alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers = [int(n) for n in given.tokens.split(",")]
    config = LlamaConfig(*map(int, given.config.split(",")), positions=max(2048, *numbers))
    model = LlamaTokens(config).eval()
    shared: dict[str, Any] = {"threads": 1, "cache": False}
    with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):
        first = inputs(config, given.first)
        compiled(model, "warm", inputs(config, 3), False, shared)
        every, own = compiled(model, "regions", first, True, {**shared, "regions": given.regions})
        if given.compile_only:
            print(own)
            return
        whole, _ = compiled(model, "one", first, True, {**shared, "regions": 0})
        print(f"compiling: {told_compile_times(given.config, given.first, given.regions)}", flush=True)
        print(f"{'tokens':>7} {'static':>10} {'of static':>9} {'one program':>11}")
        for tokens in numbers:
            args = inputs(config, tokens)
            alone, _ = compiled(model, f"static{tokens}", args, False, shared)
            fns = (every, whole, alone)
            torch.testing.assert_close(every(*args), model(*args), atol=1e-3, rtol=1e-3)
            once = min(seconds(alone, args, 1) for _ in range(3))
            for fn in fns:
                seconds(fn, args, WARM if once * WARM < 3.0 else 3)
            count, rounds = max(1, int(TURN / once)), given.rounds if once < 0.2 else 7
            found = [[seconds(fn, args, count) for fn in fns] for _ in range(rounds)]
            ratios = [statistics.median(row[k] / row[2] for row in found) for k in (0, 1)]
            static = statistics.median(row[2] for row in found) / count
            print(f"{tokens:>7} {static * 1e3:>7.2f} ms {ratios[0]:>9.3f} {ratios[1]:>11.3f}", flush=True)
    known = len(numbers) + 1
    print(f"graphs of Dynamo: {counters['stats']['unique_graphs']}, of which {known} for one number of tokens")


if __name__ == "__main__":
    main()
