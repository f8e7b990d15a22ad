"""One tensor function to machine code: from the cache, or lowered, scheduled, emitted and compiled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ..codegen.kernel import KernelSource
from ..codegen.llvm.module import emit_llvm
from ..codegen.triton.emit import emit_triton
from ..ir.errors import MlcError
from ..ir.graph import Origin
from ..ir.loops import LoopNest
from ..ir.target import Target
from ..runtime.counters import counters
from ..runtime.fingerprint import environment_fingerprint, key_of
from ..runtime.kernels import KIND_KERNEL, KernelCode, KernelStore, compile_source
from ..runtime.log import KernelFallbackWarning, logger, say
from ..runtime.options import Options
from ..runtime.timing import PhaseTimer
from ..scheduler.function import TensorFunction
from ..scheduler.function_text import function_key
from ..scheduler.lower import lower_to_loops
from ..scheduler.schedule import Schedule
from .tuning import Tuning

_LOG = logger(__name__)


class KernelError(MlcError):
    """A kernel could not be compiled; the text names its ops, the user's lines and the cause."""


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A tensor function and what became of it.

    ``code`` is None where compiling failed and ATen ops take its place; ``error`` says why. ``nest``, ``schedule`` and
    ``source`` are None where the code came from the cache.
    """

    function: TensorFunction
    target: Target
    key: str
    code: KernelCode | None
    nest: LoopNest | None = field(default=None, repr=False)
    schedule: Schedule | None = field(default=None, repr=False)
    source: KernelSource | None = field(default=None, repr=False)
    error: str = ""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How kernels are made in one compilation. ``fresh`` looks at no cache, so that every stage can be shown.

    Nor is code from a cache taken while kernels are tuned; what is tuned takes its place.
    """

    options: Options
    settings: str
    store: KernelStore
    timer: PhaseTimer
    tuning: Tuning
    fresh: bool = False


def build_kernel(function: TensorFunction, target: Target, plan: KernelPlan, origins: Sequence[Origin]) -> KernelBuild:
    """The code of a function for a target.

    A failure is warned of once and leaves ``code`` None; under ``strict`` it is raised as KernelError.
    """
    phase = plan.timer.phase
    with phase("key"):
        key = key_of([environment_fingerprint(), plan.settings, repr(target), function_key(function)])
    stored = _stored(key, plan)
    if stored is not None:
        counters.add("kernel_cache_hits")
        return KernelBuild(function, target, key, stored)
    counters.add("kernel_cache_misses")
    with plan.store.lock(KIND_KERNEL, key):
        stored = _stored(key, plan)
        if stored is not None:
            return KernelBuild(function, target, key, stored)
        try:
            return _compile(function, target, plan, key)
        except Exception as error:  # whatever goes wrong in there, the graph can still run
            return _failed(function, target, plan, key, origins, error)


def _stored(key: str, plan: KernelPlan) -> KernelCode | None:
    if plan.fresh or plan.tuning.budget is not None:
        return None
    with plan.timer.phase("cache"):
        return plan.store.code(key)


def _compile(function: TensorFunction, target: Target, plan: KernelPlan, key: str) -> KernelBuild:
    phase = plan.timer.phase
    with phase("lower"):
        nest = lower_to_loops(function)
    with phase("schedule"):
        schedule = plan.tuning.schedule(function.name, nest, target)
    with phase("emit"):
        source = emit(schedule.nest, target)
    with phase("compile"):
        code = compile_source(source, target, key)
    counters.add("kernels_generated")
    say(plan.options.log, "schedule", partial(_story, function, schedule))
    if not plan.fresh:
        with phase("cache"):
            plan.store.keep(code, f"{function.name} for {target}")
            plan.store.replaced(key)
    return KernelBuild(function, target, key, code, nest, schedule, source)


def emit(nest: LoopNest, target: Target) -> KernelSource:
    """The text of a scheduled nest in the language of its target."""
    return emit_triton(nest, target) if target.is_gpu else emit_llvm(nest, target)


def _story(function: TensorFunction, schedule: Schedule) -> str:
    return f"{function.name}: rule {schedule.rule}\n{schedule.trace}"


def _failed(
    function: TensorFunction, target: Target, plan: KernelPlan, key: str, origins: Sequence[Origin], error: Exception
) -> KernelBuild:
    ops = ", ".join(dict.fromkeys(o.op for o in origins)) or function.name
    lines = "; ".join(dict.fromkeys(o.source for o in origins if o.source))
    where = f" (from {lines})" if lines else ""
    cause = f"{type(error).__name__}: {error}"
    if plan.options.strict:
        raise KernelError(f"kernel {function.name} of {ops}{where} does not compile for {target}: {cause}") from error
    counters.add("kernel_fallbacks")
    _LOG.debug("kernel %s failed", function.name, exc_info=error)
    warnings.warn(
        KernelFallbackWarning(
            f"torch-mlc: a kernel does not compile for {target}, so its ATen ops run instead: {ops}{where}. "
            f"Cause: {cause.splitlines()[0]}. MLC_STRICT=1 makes this an error, TORCH_LOGS=+torch_mlc tells more"
        ),
        stacklevel=2,
    )
    return KernelBuild(function, target, key, None, error=cause)
