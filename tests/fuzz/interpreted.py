"""Programs compiled for a GPU that is not here: graphs are planned as if they were on it, and their kernels run in
Triton's interpreter, over the memory of this machine. Library calls stay those of the CPU.

Import this before anything that imports Triton, which chooses then whether to interpret.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from torch_mlc.codegen.kernel import EmitError, KernelSource, LibraryOnlyError
from torch_mlc.dynamo_backend.compiling import graph_host
from torch_mlc.dynamo_backend.compiling.graph_kernels import variables_of
from torch_mlc.dynamo_backend.compiling.job import Job
from torch_mlc.dynamo_backend.compiling.kernels import KernelBuild, KernelError, KernelPlan, StartedKernel, emit
from torch_mlc.dynamo_backend.compiling.plans import Plan, plan_of
from torch_mlc.dynamo_backend.converters.random import replays
from torch_mlc.dynamo_backend.entry import compile as compilation
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.dynamo_backend.verify.verify_kernel import verify_kernel
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.compile.fallback import AtenKernel
from torch_mlc.runtime.compile.kernels import LoadedKernel
from torch_mlc.runtime.gpu.launch import grid_function
from torch_mlc.runtime.interpreter.launching import launch, launch_table
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fusion import Fusion
from torch_mlc.scheduler.rules import default_schedule

from .check import Unsuitable

# Lines that the interpreter runs, as ``_Kernel.lines`` counts them, beyond which nobody waits for it: in one launch,
# and in all those that verify one kernel. A thousand take about 0.1 seconds.
MOST_LINES, MOST_VERIFYING = 50_000, 20_000


@contextmanager
def interpreted() -> Iterator[None]:
    """Graphs of tensors on the CPU are compiled for the GPU that the setting ``target`` names, and run here."""
    # What is saved of a generator is that of the CPU.
    size = torch.get_rng_state().numel()
    with ExitStack() as patched:
        for module, name, own in (
            (compilation, "plan_of", _plan_of), (graph_host, "start_kernels", _start_kernels),
            (graph_host, "loaded_kernels", _loaded_kernels), (replays, "_CUDA_STATE", size),
        ):  # fmt: skip
            patched.enter_context(mock.patch.object(module, name, own))
        yield


def _plan_of(job: Job, key: Any) -> Plan:
    retarget([job.gm], "cuda")
    try:
        # Layers are written out, so that every node is one of the graph itself.
        plan = plan_of(replace(job, region=True), key)
    except RuntimeError as error:
        # Tensors that functions of attention bring along.
        if any(said in str(error) for said in ("is not on the expected device", "at least two devices")):
            raise Unsuitable(str(error)) from error
        raise
    finally:
        retarget([job.gm], "cpu")
    return replace(plan, fusion=replace(plan.fusion, graph=_at_home(plan.fusion.graph)))


def _start_kernels(fusion: Fusion, plan: KernelPlan, compilers: Any) -> dict[str, StartedKernel]:
    called = {n.function: n.origins for n in fusion.graph.nodes if isinstance(n, CallTensor)}
    return {name: StartedKernel.of(_build(plan.options, fusion, name, origins)) for name, origins in called.items()}


def _build(options: Options, fusion: Fusion, name: str, origins: Sequence[Any]) -> KernelBuild:
    """The source of a kernel; ATen's ops take the place of one that a library is meant to have, as on a GPU.

    Raises KernelError for any other that there is no code for.
    """
    function, target = fusion.functions[name], gpu_target(str(options.target))
    nest = lower_to_loops(function)
    schedule = default_schedule(nest, target)
    build = KernelBuild(function, target, name, None, nest, schedule)
    try:
        build = replace(build, source=emit(schedule.nest, target))
    except LibraryOnlyError:
        return build
    except EmitError as error:
        raise KernelError(f"kernel {name} has no code for {target}: {error}") from error
    if options.verify:
        kernel = _Kernel.of(build)
        affords = _Allowance(kernel).affords
        verify_kernel(function, nest, schedule.nest, kernel.on_rows, "cpu", origins, affords)
    return build


def _loaded_kernels(kernels: Mapping[str, KernelBuild], options: Any, store: Any) -> dict[str, LoadedKernel]:
    variables = variables_of(kernels)
    return {variables[b.key]: _loaded(b) for b in kernels.values()}


def _loaded(build: KernelBuild) -> LoadedKernel:
    call = AtenKernel(build.function) if build.source is None else _Kernel.of(build)
    return LoadedKernel(call, None, build.function.name)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel as host programs call one of ATen's ops: over tensors and all sizes of its function."""

    source: KernelSource
    sizes: tuple[str, ...]
    target: Any

    @classmethod
    def of(cls, build: KernelBuild) -> _Kernel:
        assert build.source is not None
        return cls(build.source, tuple(s.name for s in build.function.symbols.symbols), build.target)

    def __call__(self, *arguments: Any) -> None:
        rows, tensors, numbers = arguments if len(arguments) == 3 else (1, *arguments)
        width, count = len(tensors) // rows, len(self.sizes)
        each = [tensors[k * width : (k + 1) * width] for k in range(rows)]
        sizes = [dict(zip(self.sizes, numbers[k * count : (k + 1) * count], strict=True)) for k in range(rows)]
        self.on_rows(each, sizes)

    def on_rows(self, rows: Sequence[Sequence[Tensor]], sizes: Sequence[Mapping[str, int]]) -> float:
        """One call for each row; one launch for all of them where the kernel is one over a table."""
        numbers = [[int(n[s]) for s in self.source.symbols] for n in sizes]
        grids = [grid_function(self.source)(*n) for n in numbers]
        if sum(map(self.lines, sizes)) > MOST_LINES:
            raise Unsuitable(f"{self.source.name} has {grids} programs")
        given = [[t.detach() for t in row] for row in rows]
        if self.source.option("table"):
            launch_table(self.source, self.target, given, [n for row in numbers for n in row])
        elif 0 not in grids[0]:
            launch(self.source, grids[0], given[0], numbers[0])
        return 1.0

    def lines(self, sizes: Mapping[str, int]) -> int:
        """Lines that a launch runs: those of the text for each program. Those of loops count once."""
        programs = prod(grid_function(self.source)(*(int(sizes[s]) for s in self.source.symbols)))
        return programs * self.source.text.partition("@triton.jit")[2].count("\n")


@dataclass(slots=True)
class _Allowance:
    """What may still be run to verify a kernel: small sizes come first, and those that it is not enough for are left
    out, so that a program is not given up for what its own sizes do not ask."""

    kernel: _Kernel
    left: int = MOST_VERIFYING

    def affords(self, sizes: Mapping[str, int]) -> bool:
        rows = 2 if self.kernel.source.option("table") else 1
        lines = rows * self.kernel.lines(sizes)
        if lines > self.left:
            return False
        self.left -= lines
        return True


def _at_home(x: Any) -> Any:
    """Part of a graph, with the CPU for the GPU."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, str):
        return "cpu" if x == "cuda:0" else x
    if isinstance(x, (tuple, list)):
        return type(x)(map(_at_home, x))
    if isinstance(x, dict):
        return {k: _at_home(v) for k, v in x.items()}
    if is_dataclass(x) and not isinstance(x, (type, SymbolTable)):
        moved = {f.name: _at_home(getattr(x, f.name)) for f in fields(x) if f.init}
        changed = any(v is not getattr(x, name) for name, v in moved.items())
        return replace(x, **moved) if changed else x
    return x
