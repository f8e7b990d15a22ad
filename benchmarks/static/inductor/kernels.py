"""A kernel of Inductor's as machine code, and its time as our model predicts it."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
from torch._inductor import config
from torch._inductor.runtime.triton_heuristics import GridExpr

from torch_mlc.ir.target import Target
from torch_mlc.runtime.machine_code.counts import count_runs
from torch_mlc.runtime.machine_code.sass import read_sass
from torch_mlc.runtime.model.predict import Prediction, predict
from torch_mlc.runtime.model.work import work_of
from torch_mlc.runtime.triton.compile import GpuBinary, resource_report
from torch_mlc.runtime.triton.occupancy import resident_programs
from torch_mlc.runtime.triton.triton_stages import gpu_target, load_function

from .calls import Array, Launch
from .capture import as_if_on
from .visits import arrays_of

# What the text of a kernel asks for that is not here: a GPU's driver, and the file that it would be in.
_ASKS = {"triton_helpers.set_driver_to_gpu()": "", "filename=__file__": "filename='kernel.py'"}


@dataclass(frozen=True, slots=True)
class InductorKernel:
    """A kernel with the configuration that the model finds fastest of those that Inductor would measure.

    ``moved`` bytes are those of all visits, ``slots`` instructions of all threads. ``parameters`` are those of the
    configuration, of which there were ``tried``.
    """

    name: str
    prediction: Prediction
    moved: int
    slots: float | None
    registers: int
    spills: int
    parameters: Mapping[str, int]
    tried: int


def inductor_kernel(launch: Launch, target: Target) -> InductorKernel:
    """Compile and predict a launch. Raises whatever Inductor or Triton raise, and ValueError where nothing fits."""
    text = launch.text
    for asks, answer in _ASKS.items():
        text = text.replace(asks, answer)
    with as_if_on(target), config.patch({"autotune_local_cache": False, "autotune_remote_cache": False}):
        tuner = load_function(launch.name, text)
        found = [_predicted(launch, text, tuner, c, target) for c in {str(c): c for c in tuner.configs}.values()]
    known = [k for k in found if k is not None]
    if not known:
        raise ValueError(f"no configuration of {launch.name} fits")
    best = min(known, key=lambda k: k.prediction.seconds)
    return replace(best, tried=len(found))


def _predicted(launch: Launch, text: str, tuner: Any, chosen: Any, target: Target) -> InductorKernel | None:
    meta = tuner._create_compile_meta(chosen)
    source = triton.compiler.ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    of = gpu_target(target.kind, target.arch, target.warp)
    made = triton.compile(source, target=of, options=tuner._create_compile_options(chosen, meta))
    names = tuner.fn.arg_names[: len(launch.given)]
    given = dict(zip(names, launch.given, strict=True))
    numbers = {**meta["constants"], **{n: v for n, v in given.items() if not isinstance(v, Array)}}
    arrays = {n: v for n, v in given.items() if isinstance(v, Array)}
    numbers |= _constants(text, launch.name, numbers)
    expression = GridExpr.from_meta(tuner.inductor_meta, chosen)
    grid = [int(n) for n in expression.eval_slow({**numbers, **chosen.kwargs})]
    programs = math.prod(grid)
    threads = made.metadata.num_warps * target.warp
    binary = GpuBinary(
        made.metadata.name, "cuda", target.arch, made.asm["cubin"], made.asm["ptx"], ("ptr",) * len(names), 2, threads,
        made.metadata.shared, (True,) * len(arrays),
    )  # fmt: skip
    resources = resource_report(binary)
    machine = target.machine
    resident = resident_programs(machine, resources.registers, resources.shared, resources.threads)
    if resident < 1:
        return None
    sizes = {n: int(v) for n, v in numbers.items() if isinstance(v, (int, bool))}
    counted = count_runs(read_sass(binary.code, binary.name), text, launch.name, sizes, grid)
    visited = arrays_of(text, launch.name, numbers, arrays, grid, machine.cores * resident)
    work = work_of(counted, binary, programs, resident, visited, machine)
    moved = sum(a.read + a.written for a in visited)
    return InductorKernel(
        launch.name, predict(work, machine), moved,
        None if counted.guessed else counted.slots * threads * programs, resources.registers,
        resources.spills, {**chosen.kwargs, "num_warps": chosen.num_warps, "num_stages": chosen.num_stages}, 1,
    )  # fmt: skip


def _constants(text: str, name: str, numbers: Mapping[str, Any]) -> dict[str, int]:
    """Numbers that the kernel's body sets (``R0_BLOCK: tl.constexpr = 4096``)."""
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    return {
        n.target.id: n.value.value
        for n in ast.walk(function)
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and isinstance(n.value, ast.Constant)
        and isinstance(n.value.value, int)
    }
