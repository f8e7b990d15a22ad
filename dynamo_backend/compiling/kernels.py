"""One tensor function to machine code: from the cache, or lowered, scheduled, emitted and compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial

from ...codegen.kernel import KernelSource
from ...codegen.llvm.module import emit_llvm
from ...codegen.triton.emit import emit_triton
from ...ir.errors import MlcError
from ...ir.function.function import Callee, TensorFunction
from ...ir.graph.graph import Origin
from ...ir.nest.loops import LoopNest
from ...ir.passes import NEST, Level, Runner
from ...ir.target import Target
from ...ir.text.printer import show
from ...ir.text.structure import function_key
from ...runtime.cache.fingerprint import environment_fingerprint, gpu_code_fingerprint, key_of
from ...runtime.compile.compilers import Compilers
from ...runtime.compile.device_library import device_library
from ...runtime.compile.kernels import KIND_KERNEL, KernelCode, KernelStore, compile_source, gpu_binary
from ...runtime.counters import counters
from ...runtime.log import KernelFallbackWarning, logger, say
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ...runtime.triton.compile import GpuBinary, RunTriton, StoppedError
from ...scheduler.functions.context import FunctionContext
from ...scheduler.functions.lower import lower_stages
from ...scheduler.numerics import is_fast
from ...scheduler.schedule.overrides import Override, workload_of
from ...scheduler.schedule.schedule import Schedule
from ..verify.kernel_run import kernel_run
from ..verify.verify_graph import WrongResultError
from ..verify.verify_kernel import verify_kernel
from .lighter import fitting_code, written_as
from .pass_lists import pass_lists
from .schedule_told import ScheduleTold, with_schedule
from .tuning import BY_DEFAULT, BY_HAND, Choice, Tuning

_LOG = logger(__name__)


def _told(schedule: Schedule) -> str:
    return f"# rule {schedule.rule}\n{schedule.trace}\n# scheduled\n{show(schedule.nest)}\n"


SCHEDULE: Level[Schedule] = Level(
    "schedule", _told, lambda s: len(s.trace.steps), told=lambda schedule: schedule.nest.name
)  # fmt: skip
# By whether they are for a GPU.
SOURCE: dict[bool, Level[KernelSource]] = {
    gpu: Level("source", lambda s: s.text, lambda s: s.text.count("\n"), told=lambda s: s.name, suffix=suffix)
    for gpu, suffix in ((True, "py"), (False, "ll"))
}


class KernelError(MlcError):
    """A kernel could not be compiled; the text names its ops, the user's lines and the cause."""


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A tensor function, or a nest that is a kernel as it stands, and what became of it.

    ``code`` is None where compiling failed and a function's ATen ops take its place; ``error`` says why. ``nest``,
    ``schedule`` and ``source`` are None where the code came from the cache. ``override`` is the user's own schedule
    that was taken. ``choice`` says who chose the schedule, None where the code came from the cache.
    """

    function: Callee
    target: Target
    key: str
    code: KernelCode | None
    nest: LoopNest | None = field(default=None, repr=False)
    schedule: Schedule | None = field(default=None, repr=False)
    source: KernelSource | None = field(default=None, repr=False)
    error: str = ""
    override: Override | None = None
    choice: Choice | None = None

    @property
    def definition(self) -> TensorFunction:
        """The function. Raises TypeError for a nest, which has none."""
        if isinstance(self.function, TensorFunction):
            return self.function
        raise TypeError(f"{self.function.name} is a nest, and no tensor function")


@dataclass(frozen=True, slots=True)
class StartedKernel:
    """A kernel whose machine code is in the making out of ``source``, ``finish`` waits for it; or one that has its
    ``build``."""

    function: Callee
    key: str
    source: KernelSource | None
    finish: Callable[[], KernelBuild] = field(repr=False)
    build: KernelBuild | None = None

    @classmethod
    def of(cls, build: KernelBuild) -> StartedKernel:
        """A kernel that is there."""
        return cls(build.function, build.key, build.source, lambda: build, build)


@dataclass(frozen=True, slots=True)
class ByHand:
    """A nest with the schedule that a user gave for it, by an override or in the loops themselves."""

    nest: LoopNest
    schedule: Schedule
    override: Override | None = None

    @property
    def key(self) -> str:
        """What code depends on: the steps, not where they are written."""
        return self.schedule.trace.to_json()


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How kernels are made in one compilation. ``fresh`` looks at no cache, so that every stage can be shown.

    Nor is code from a cache taken while kernels are tuned; what is tuned takes its place. ``tells``: schedules are kept
    with the code, and code without one is made anew.
    """

    options: Options
    settings: str
    store: KernelStore
    timer: PhaseTimer
    tuning: Tuning
    run: Runner
    fresh: bool = False
    tells: bool = False

    @property
    def makes_anew(self) -> bool:
        """Whether what others make of a function is not what is wanted."""
        return self.fresh or self.tuning.anew


def start_kernel(
    function: Callee, target: Target, plan: KernelPlan, origins: Sequence[Origin], compilers: Compilers
) -> StartedKernel:
    """Begin to make the code of a function for a target; ``finish`` of the result waits for it. A nest is compiled with
    the loops that it has.

    Under ``verify`` what was compiled is compared with its definition, and VerifyError raised where it differs.
    A failure is warned of once and leaves ``code`` None; under ``strict``, and where the schedule is the user's own, it
    is raised as KernelError, here or by ``finish``. Raises ScheduleError for a schedule of the user's that is not
    legal.
    """
    phase = plan.timer.phase
    by_hand = _by_hand(function, target, plan)
    override = by_hand.override if by_hand is not None else None
    with phase("key"):
        versions = gpu_code_fingerprint() if target.is_gpu else environment_fingerprint()
        parts = [versions, plan.settings, repr(target), _content(function)]
        key = key_of(parts if by_hand is None else [*parts, by_hand.key])
    with phase("cache"):
        stored = _stored(key, plan, by_hand)
    if stored is not None:
        counters.add("kernel_cache_hits")
        return StartedKernel.of(KernelBuild(function, target, key, stored, override=override))
    counters.add("kernel_cache_misses")
    try:
        nest, chosen, written = _written(function, target, plan, by_hand)
        with phase("key"):  # functions that are told other typical sizes may be the same code
            key = plan.store.key_of_text(key_of([*parts[:-1], *source_parts(written)]), key)
        with phase("compile"):
            library = device_library(plan.store, written, target)
        compiled = partial(_compiled, target=target, key=key, library=library, run=compilers.run_triton)
    except Exception as error:  # whatever goes wrong in there, the graph can still run
        return StartedKernel.of(_failed(function, target, plan, key, origins, error, override))
    choice = BY_HAND if by_hand is not None else plan.tuning.choices.get(function.name, BY_DEFAULT)
    by = choice.source

    def make() -> KernelCode:
        with plan.store.lock(KIND_KERNEL, key):
            code = _stored(key, plan, by_hand)  # by another process, meanwhile
            if code is None:
                code = compiled(written) if by_hand else fitting_code(nest, target, chosen, written, compiled)
                if plan.tells:
                    code = with_schedule(code, nest, written_as(code, nest, target, chosen, written)[0], target, by)
                if not plan.options.verify:
                    _keep(code, plan, function, target)
            return code

    def finish() -> KernelBuild:
        try:
            with phase("compile"):
                try:
                    code = making.result()
                except (CancelledError, StoppedError):  # by another graph, which failed
                    code = make()
            schedule, source = written_as(code, nest, target, chosen, written)
            if plan.tells:  # begun for somebody who does not
                code = with_schedule(code, nest, schedule, target, by)
            if source is not None and source is not written:  # with smaller tiles
                plan.run.dump("lighter_schedule", SCHEDULE, schedule)
                plan.run.dump("lighter_emit", SOURCE[target.is_gpu], source)
            built = KernelBuild(function, target, key, code, nest, schedule, source, override=override, choice=choice)
            if plan.options.verify:
                _verify(built, origins)
        except WrongResultError:
            raise
        except Exception as error:
            return _failed(function, target, plan, key, origins, error, override)
        if plan.options.verify:
            _keep(code, plan, function, target)
        counters.add("kernels_generated")
        say(plan.options.log, "schedule", partial(_story, function, schedule))
        if source is not None:
            say(plan.options.log, "output_code", lambda: f"{function.name} for {target}:\n{source.text}")
        return built

    with phase("compile"):
        begin = partial(compilers.start, key, make, gpu=target.is_gpu)
        making = compilers.making(key) or (begin() if plan.makes_anew else plan.store.shared(key, begin))
    return StartedKernel(function, key, written, finish)


def source_parts(source: KernelSource) -> tuple[str, ...]:
    """What machine code is made of besides a target and settings."""
    params = " ".join(f"{b.dtype.value}@{b.align}" for b in source.params)
    told = (source.language, source.name, source.symbols, source.grid, source.meta, source.reach)
    return source.text, params, repr(told)


def _content(function: Callee) -> str:
    """What code depends on besides a schedule: of a nest its text, which has that too."""
    return show(function) if isinstance(function, LoopNest) else function_key(function)


def _by_hand(function: Callee, target: Target, plan: KernelPlan) -> ByHand | None:
    """The user's schedule of a function, where there is one; that of a nest is its own."""
    if isinstance(function, LoopNest):
        return ByHand(function, Schedule(function, rule="by hand"))
    if plan.options.schedules is None:
        return None
    nest = lowered(function, target, plan)
    with plan.timer.phase("schedule"):
        override = plan.options.schedules.find(workload_of(nest), target)
        return None if override is None else ByHand(nest, override.apply(nest), override)


def is_by_hand(function: Callee, target: Target, plan: KernelPlan) -> bool:
    """Whether a function has a schedule of its own or the user's, so that nothing is to be chosen."""
    return _by_hand(function, target, plan) is not None


def _stored(key: str, plan: KernelPlan, by_hand: ByHand | None) -> KernelCode | None:
    # While kernels are tuned, code from a cache is not what will be found; what a user wrote stays what it is.
    if plan.fresh or plan.options.shows_stages or (plan.makes_anew and by_hand is None):
        return None
    code = plan.store.code(key)
    return None if code is not None and plan.tells and ScheduleTold.of(code) is None else code


def _written(
    function: Callee, target: Target, plan: KernelPlan, by_hand: ByHand | None
) -> tuple[LoopNest, Schedule, KernelSource]:
    """The loops of a function, their schedule, and the text of the kernel."""
    nest, schedule = _scheduled(function, target, plan, by_hand)
    with plan.timer.phase("emit"):
        return nest, schedule, plan.run.step(SOURCE[target.is_gpu], emit, schedule.nest, target)


def written(function: Callee, target: Target, plan: KernelPlan) -> KernelSource:
    """The text of the kernel of a function, which somebody else compiles. Raises EmitError and ScheduleError."""
    return _written(function, target, plan, _by_hand(function, target, plan))[2]


@dataclass(frozen=True, slots=True)
class GpuText:
    """The text of a kernel for a GPU, of which somebody else makes machine code: ``source``, of a ``schedule``."""

    target: Target
    nest: LoopNest
    schedule: Schedule
    source: KernelSource
    is_by_hand: bool
    library: str | None

    def fitted(self, run: RunTriton) -> tuple[KernelSource, GpuBinary]:
        """The text with tiles that fit the GPU, and its machine code. Raises GpuCompileError."""
        make = partial(_compiled, target=self.target, key="", library=self.library, run=run)
        if self.is_by_hand:
            return self.source, gpu_binary(make(self.source))
        code = fitting_code(self.nest, self.target, self.schedule, self.source, make)
        source = written_as(code, self.nest, self.target, self.schedule, self.source)[1]
        return source or self.source, gpu_binary(code)


def written_for_gpu(function: Callee, target: Target, plan: KernelPlan) -> GpuText:
    """The text of the kernel of a function for a GPU. Raises EmitError and ScheduleError."""
    by_hand = _by_hand(function, target, plan)
    nest, schedule, source = _written(function, target, plan, by_hand)
    return GpuText(target, nest, schedule, source, by_hand is not None, device_library(plan.store, source, target))


def scheduled(function: Callee, target: Target, plan: KernelPlan) -> LoopNest:
    """The loops that the code of a function is made of, unless they turn out to take too much of a GPU."""
    return _scheduled(function, target, plan, _by_hand(function, target, plan))[1].nest


def _scheduled(function: Callee, target: Target, plan: KernelPlan, by_hand: ByHand | None) -> tuple[LoopNest, Schedule]:
    if by_hand is not None:
        return by_hand.nest, by_hand.schedule
    assert isinstance(function, TensorFunction)
    nest = lowered(function, target, plan)
    with plan.timer.phase("schedule"):
        return nest, plan.run.step(SCHEDULE, plan.tuning.schedule, function.name, nest, target)


def lowered(function: TensorFunction, target: Target, plan: KernelPlan) -> LoopNest:
    """The loops of a function before any schedule."""
    context = FunctionContext(function, target, is_fast(plan.options.numerics))
    with plan.timer.phase("lower"):
        return plan.run.step(NEST, lower_stages, plan.run(function, pass_lists().function, context))


def _compiled(source: KernelSource, *, target: Target, key: str, library: str | None, run: RunTriton) -> KernelCode:
    return compile_source(source, target, key, library, run)


def _keep(code: KernelCode, plan: KernelPlan, function: Callee, target: Target) -> None:
    if not plan.fresh:
        plan.store.keep(code, f"{function.name} for {target}")
        plan.store.replaced(code.key)


def emit(nest: LoopNest, target: Target) -> KernelSource:
    """The text of a scheduled nest in the language of its target."""
    return emit_triton(nest, target) if target.is_gpu else emit_llvm(nest, target)


def _verify(built: KernelBuild, origins: Sequence[Origin]) -> None:
    """Compare a kernel with its definition, on the GPU that it is for or in Triton's interpreter where there is none.

    Raises WrongResultError.
    """
    assert built.nest is not None and built.schedule is not None and built.code is not None
    run = kernel_run(built.code, built.target, table=bool(built.function.table))
    done = verify_kernel(built.function, built.nest, built.schedule.nest, run, run.device, origins)
    counters.add("kernels_verified" if done else "kernels_unverified")
    if not done:
        why = run.unknown or "it is too large, or nothing is known of its inputs"
        _LOG.warning("MLC_VERIFY: %s for %s was not compared: %s", built.function.name, built.target, why)


def _story(function: Callee, schedule: Schedule) -> str:
    return f"{function.name}: rule {schedule.rule}\n{schedule.trace}"


def _failed(
    function: Callee,
    target: Target,
    plan: KernelPlan,
    key: str,
    origins: Sequence[Origin],
    error: Exception,
    override: Override | None,
) -> KernelBuild:
    ops = ", ".join(dict.fromkeys(o.op for o in origins)) or function.name
    lines = "; ".join(dict.fromkeys(o.source for o in origins if o.source))
    where = f" (from {lines})" if lines else ""
    cause = f"{type(error).__name__}: {error}"
    if override is not None:
        raise KernelError(f"{override} makes a kernel that does not compile for {target}: {cause}") from error
    if isinstance(function, LoopNest):
        raise KernelError(f"the nest {function.name} does not compile for {target}: {cause}") from error
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
