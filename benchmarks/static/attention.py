"""The suite ``attention``: what the kernels of an attention and of its backward take of GPUs, over types, widths of
heads, masks and biases, for several targets in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, product
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_mlc
from torch_mlc.dynamo_backend.compiling.lighter import TRIES
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.rules import Scarce, design_space
from torch_mlc.scheduler.rules.cpu.attention import roles

from ..kernels.attention import attend, positions
from ..models.spec import Size
from ..steps import Keep
from .made import Made, Workload, fake
from .results import Form, TargetResults

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTHS = (64, 128, 256)
VARIANTS = ("plain", "causal", "window", "bias")
# Keys that a row of "window" sees; a bias is one that a batch shares and whose gradient is wanted.
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Taken:
    """A kernel for a target: its tile (rows of a program and columns of a step), and what its code takes of a thread
    and of a block, in bytes but for ``registers``. ``lighter`` are the parameters that differ from the rule's default.
    ``error`` is why it did not compile."""

    target: str
    workload: str
    kernel: str
    parameters: Mapping[str, bool | int | str]
    lighter: tuple[str, ...]
    registers: int
    spills: int
    shared: int
    seconds: float | None
    error: str = ""

    @property
    def tile(self) -> str:
        """The rows and columns of a tile."""
        sides = [v for k, v in self.parameters.items() if k in ("queries", "keys", "rows", "columns")]
        return " x ".join(map(str, sides))


def _made(dtype: torch.dtype, width: int, variant: str) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        batch, heads, length = (4, 16, 2048) if size == "full" else (2, 2, 128)
        shapes = [(batch, heads, length, width)] * 3 + [(heads, length, length)] * (variant == "bias")
        return Made(partial(_attention, variant), fake(*shapes, dtype=dtype, gradients=True))

    return make


def _attention(variant: str, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
    def edit(scores: Tensor) -> Tensor:
        m, n = positions(q, k)
        match variant:
            case "causal":
                return torch.where(n <= m, scores, float("-inf"))
            case "window":
                return torch.where((n <= m) & (m - n < WINDOW), scores, float("-inf"))
        return sum(bias, scores)

    return attend(q, k, v, edit)


WORKLOADS: Mapping[str, Workload] = MappingProxyType({
    name: Workload(name, _made(dtype, width, variant), training=True)
    for (kind, dtype), width, variant in product(DTYPES.items(), WIDTHS, VARIANTS)
    for name in (f"{kind}, {width}, {variant}",)
})  # fmt: skip


def _read(body: Mapping[str, Any]) -> Taken:
    return Taken(**{**body, "lighter": tuple(body["lighter"])})


FORM = Form("torch-mlc-attention", 1, "kernels", asdict, _read)


def check(targets: str) -> None:
    """Raises TargetError where one of several names, with commas between, is none of a GPU."""
    for target in targets.split(","):
        gpu_target(target)


def compare(results: TargetResults[Taken], name: str, keep: Keep) -> None:
    """Compile a workload for each target that has no rows of it yet."""
    for target in results.target.split(","):
        if any((row.target, row.workload) == (target, name) for row in results.rows):
            continue
        made = WORKLOADS[name].make(results.about["size"])
        options = {"cache": False, "compile_workers": 0}
        report = torch_mlc.explain(made.function, *made.inputs, training=True, target=target, options=options)
        results.rows += [_taken(target, name, k) for k in report.kernels]
        keep()


def _taken(target: str, workload: str, kernel: KernelReport) -> Taken:
    r, parameters = kernel.resources, _parameters(kernel)
    default = next(parameters, {})
    chosen = next(parameters, default)
    return Taken(
        target,
        workload,
        _role(kernel),
        chosen,
        tuple(k for k, v in chosen.items() if v != default[k]),
        r.registers if r is not None else 0,
        r.spills if r is not None else 0,
        r.shared if r is not None else 0,
        kernel.prediction.seconds if kernel.prediction is not None else None,
        kernel.error,
    )


def _parameters(kernel: KernelReport) -> Iterator[Mapping[str, bool | int | str]]:
    """The default parameters of a kernel's rule, then those that it was scheduled with, where they are others."""
    if kernel.nest is None or kernel.target is None:
        return
    space = design_space(kernel.nest, kernel.target)
    for rule in (r for r in space.rules if r.name == kernel.rule):
        values = rule.parameters(kernel.nest, kernel.target)
        yield {k: v[0] for k, v in values.items()}
        tried = chain.from_iterable(islice(rule.lighter(values, scarce), TRIES[scarce]) for scarce in Scarce)
        for params in tried:
            candidate = space.candidate(rule, params)
            if candidate is not None and candidate.schedule.nest == kernel.scheduled:
                yield params


def _role(kernel: KernelReport) -> str:
    """What a kernel makes: results, the gradient of queries, those of keys and values, or that of a bias."""
    match kernel.rule:
        case "gpu_attention":
            return "forward"
        case "gpu_attention_bias":
            return "bias"
        case "gpu_attention_gradients":
            found = roles(kernel.nest) if kernel.nest is not None else None
            return "keys and values" if found is not None and len(found.states) > 1 else "queries"
    return kernel.rule


def print_attention(results: TargetResults[Taken], console: Console) -> None:
    """A row for each kernel, those that spill most first, and what failed."""
    rows = sorted(results.rows, key=lambda r: -r.spills)
    spilling = [r for r in rows if r.spills]
    triton = results.versions.get("triton")
    table = Table(title=f"attention, Triton {triton}: {len(spilling)} of {len(rows)} kernels spill", title_style="")
    for column in ("target", "workload", "kernel", "tile"):
        table.add_column(column, no_wrap=True)
    for column in ("warps", "stages", "registers", "spills", "shared", "us"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("other than the rule's default")
    for r in rows:
        us = "-" if r.seconds is None else f"{r.seconds * 1e6:.0f}"
        p = r.parameters
        table.add_row(
            r.target, r.workload, r.kernel, r.tile, str(p.get("warps", "")), str(p.get("stages", "")),
            str(r.registers), str(r.spills), str(r.shared), us, r.error or ", ".join(r.lighter),
        )  # fmt: skip
    console.print(table)
    console.print("times are predicted by a model that no measurement has corrected", style="dim")
    for name, error in results.progress.failed.items():
        console.print(f"not compiled: {name}: {error}", style="bold red")
