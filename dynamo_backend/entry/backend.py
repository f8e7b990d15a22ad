"""The entry point of ``torch.compile(model, backend="mlc")``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from torch import fx
from torch._dynamo.utils import dynamo_timed
from torch._functorch import config
from torch._functorch.aot_autograd import get_aot_graph_name
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from ...ir.errors import MlcError
from ...ir.passes import Runner
from ...runtime.compile.kernels import kernel_store
from ...runtime.frozen.recipe import Recipe
from ...runtime.gpu.collection import no_collection
from ...runtime.host.own_memory import CAN_TELL
from ...runtime.log import logger, say
from ...runtime.pool.pool import POOL
from ...runtime.settings.options import Options
from ...runtime.timing import process_times
from ...scheduler.decisions import Decider, DecisionOverrides, DecisionRecord
from ...scheduler.numerics import NumericsByPlace
from ..aten_passes.context import AtenContext
from ..aten_passes.frozen.part import part
from ..aten_passes.rounding.eager_steps import with_eager_steps
from ..aten_passes.rounding.numerics import keep_whole
from ..caches.aot_cache import cacheable, is_ahead_of_time, is_cacheable, settings_in_keys
from ..caches.saved_program import save_program
from ..caches.surroundings import uncacheable
from ..compiling.compiled import CompiledGraph, with_values
from ..compiling.job import devices_of
from ..compiling.pass_lists import STEPS, pass_lists, runner_of
from ..importing.decompositions import decomposition_table, whole_ops
from ..locking.graph_lock import GraphLock
from ..locking.lock_store import written_sections
from ..locking.scope import LockScope
from ..reports.numerics_uses import numerics_uses
from ..reports.override_uses import override_uses
from ..tracing.known_floats import restart_with_known_floats
from ..tracing.origins import number_nodes
from ..verify.verify_graph import verified
from .aot import Compiler, compile_with_aot
from .compile import compile_graph
from .forward_mode import differentiates_forward
from .frame_budget import frame_budget
from .frame_room import with_frame_room
from .frozen_inputs import NOTHING_FROZEN, FrozenInputs, forget_warnings
from .partition import partition, saved_inputs

_LOG = logger(__name__)
# Where AOTAutograd's metadata keeps what it found to be donated.
_DONATED = "mlc_donated"


class BackendError(MlcError):
    """Something inside the backend went wrong that is a fault of the backend."""


def mlc_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph, for inference or training.

    ``mode`` and ``options`` are those of ``torch.compile``; they go over ``MLC_*`` variables. Raises OptionError for
    settings that do not exist.
    """
    settings = settings_of(mode, options)
    POOL.spare = settings.cpu_pool
    if differentiates_forward():
        _LOG.warning("inside of forward_ad.dual_level() nothing is compiled: torch's own ops carry derivatives forward")
        return gm.forward
    restart_with_known_floats(gm)
    if settings.cache and (why := uncacheable()):
        say(settings.log, "cache", lambda: f"nothing is read or kept: {why}")
        settings = replace(settings, cache=False)
    cached = is_cacheable(settings, gm, example_inputs)
    # An entry that no key can tell from others has a key that nobody has.
    ahead = ("ahead of time" if cached else uuid4().hex) if is_ahead_of_time() else ""

    frozen = FrozenInputs.of(gm, example_inputs, settings)
    scope = LockScope.of(gm, example_inputs, settings)

    def compiler(kind: str) -> Compiler:
        graph = partial(_compile, settings=settings, kind=kind, frozen=frozen, scope=scope)
        if ahead:
            return cacheable(graph, partial(save_program, options=settings))
        return cacheable(graph) if cached else lambda gm, inputs: graph(gm, inputs).call

    return through_aot(gm, example_inputs, settings, compiler, cached=cached, ahead=ahead, told=frozen.text)


def settings_of(mode: str | None, options: Mapping[str, object] | None) -> Options:
    """The settings of a call of ``torch.compile`` in this environment. Raises OptionError."""
    settings = Options.resolve(mode, options, os.environ)
    # Random numbers of ours are not those of ATen.
    return replace(settings, fallback_random=True) if settings.verify > 1 else settings


@with_frame_room
def through_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Options,
    compiler: Callable[[str], Compiler],
    *,
    cached: bool = False,
    ahead: str = "",
    told: str = "",
) -> Callable[..., Any]:
    """The function that runs a Dynamo graph, by what ``compiler`` of "forward", "backward" and "inference" makes of its
    ATen graphs. Where it is ``cached``, AOTAutograd's cache is asked and filled; ``ahead`` is in its keys where the
    function is compiled to be saved, and so is ``told``, what is known of its inputs."""
    try:
        with ExitStack() as around:
            for context in (_collection(settings), whole_ops(), _states_as_tensors(), frame_budget(settings.log)):
                around.enter_context(context)
            if cached or ahead:
                around.enter_context(settings_in_keys(settings, number_nodes(gm), ahead, told))
            return compile_with_aot(
                gm,
                example_inputs,
                forward=compiler("forward"),
                backward=compiler("backward"),
                inference=compiler("inference"),
                partition=partition(settings),
                decompositions=with_eager_steps(
                    keep_whole(decomposition_table(), settings.numerics), settings.numerics
                ),
            )
    except IndexError as error:
        # Dynamo takes an IndexError for one of the user's.
        raise BackendError(f"IndexError inside the backend: {error}") from error


def _collection(settings: Options) -> AbstractContextManager[None]:
    """A search for garbage would look through every object of torch's and of the graph a few times, a quarter of a
    second each, to find next to nothing. What is tuned runs for minutes."""
    return nullcontext() if settings.tune is True else no_collection()


def _states_as_tensors() -> AbstractContextManager[Any]:
    """Random ops that a checkpoint runs again get the state of their generator as a tensor, on GPUs too; torch has
    generators as inputs of graphs there, which no program of ours takes."""
    if hasattr(config, "graphsafe_rng_functionalization"):
        return config.patch(graphsafe_rng_functionalization=False)
    return nullcontext()


@dataclass(frozen=True, slots=True)
class GraphJob:
    """One graph of AOTAutograd, as it is handed to ``compile_graph``."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    settings: Options
    kind: str
    name: str
    static: tuple[int, ...]
    saved: int | None
    given: Sequence[str]
    run: Runner
    recipe: Recipe | None = None
    decided: tuple[DecisionRecord, ...] = ()
    lock: GraphLock | None = None
    owned: tuple[str, ...] = ()

    def compile(self, *, load: bool = True, fresh: bool = False) -> CompiledGraph:
        """The graph compiled, as ``compile_graph`` says."""
        try:
            # AOTAutograd traces with fake tensors; constants of the module and tuning are about real ones. Torch's
            # own table of compile times has the seconds too.
            with _disable_current_modes(), dynamo_timed("mlc_compile_graph"):
                compiled = compile_graph(
                    self.gm,
                    self.example_inputs,
                    options=self.settings,
                    static=self.static,
                    saved=self.saved,
                    given=self.given,
                    owned=self.owned,
                    name=self.name,
                    run=self.run,
                    load=load,
                    fresh=fresh,
                    decided=self.decided,
                    lock=self.lock,
                )
                return replace(compiled, recipe=self.recipe)
        except IndexError as error:
            raise BackendError(f"IndexError inside the backend: {error}") from error


def job_of(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    settings: Options,
    kind: str,
    frozen: FrozenInputs = NOTHING_FROZEN,
    whole: bool = False,
    scope: LockScope | None = None,
    devices: Sequence[str] = (),
) -> GraphJob:
    """What AOTAutograd asks to be compiled, which is at work on it: after the rewrites, in place, of ATen graphs, and
    with what is known of its inputs and results. What does not change between calls is taken out of it, but not of what
    is to be ``whole``; parameters and buffers that do not change are ``frozen``. ``scope`` is what a lock file calls
    the graph of Dynamo's; ``devices`` are those that it will be moved to, where it is made on others."""
    name = get_aot_graph_name()
    _LOG.debug("compiling %s of %d nodes", name, len(gm.graph.nodes))
    donated = _donated(gm, kind)
    run = runner_of(settings, name)
    run.steps += gm.meta.pop(STEPS, ())
    try:
        with _disable_current_modes(), dynamo_timed("mlc_compile_graph"):
            lists = pass_lists()
            sources = frozen.sources(gm, _metadata(), kind)
            lock = scope.graph(kind, gm) if scope is not None else None
            fixed = lock is not None and settings.lock_mode == "use"
            ways = lock.open(gm, settings, devices or devices_of(gm)).ways if lock is not None and fixed else None
            decider = Decider(settings.decisions or DecisionOverrides(), locked=ways)
            context = AtenContext(
                settings, _metadata() if kind != "backward" else None, frozen=frozenset(n.name for n in sources),
                decider=decider,
            )  # fmt: skip
            run(gm, (*(lists.inference if kind == "inference" else ()), *lists.part, *lists.frozen), context)
            parted = None if whole else part(gm, sources, context.target, discard=frozen.discard)
    except IndexError as error:
        raise BackendError(f"IndexError inside the backend: {error}") from error
    given = saved_inputs(gm) if kind == "backward" else ()
    owned = () if settings.cuda_graphs else tuple(n for n in donated if n in given)
    static = _static_inputs(kind)
    recipe, values = parted or (None, ())
    if example_inputs:
        static += tuple(range(len(example_inputs), len(example_inputs) + len(values)))
        example_inputs = [*example_inputs, *values]
    return GraphJob(
        gm, example_inputs, settings, kind, name, static, _saved_from(kind), given, run, recipe, decider.records, lock,
        owned,
    )  # fmt: skip


def compiled_part(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, settings: Options, kind: str, frozen: FrozenInputs,
    scope: LockScope | None = None,
) -> tuple[GraphJob, CompiledGraph]:  # fmt: skip
    """What AOTAutograd asks to be compiled, and what became of it, before what does not change is given to it."""
    with _collection(settings):  # a backward may be compiled long after its forward
        job = job_of(gm, example_inputs, settings=settings, kind=kind, frozen=frozen, scope=scope)
        return job, job.compile()


@with_frame_room
def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, settings: Options, kind: str, frozen: FrozenInputs,
    scope: LockScope | None,
) -> CompiledGraph:  # fmt: skip
    """One graph of AOTAutograd."""
    job, compiled = compiled_part(gm, example_inputs, settings=settings, kind=kind, frozen=frozen, scope=scope)
    name = job.name
    process_times.add(kind, compiled.timer.seconds)
    assert compiled.call is not None
    if settings.verify > 1:

        def part(cut: fx.GraphModule) -> Callable[..., Any]:
            call = compile_graph(cut, job.example_inputs, options=settings, name=f"{name}_part").call
            assert call is not None
            return call

        compiled = replace(compiled, call=verified(gm, compiled.call, part, name))
        assert compiled.call is not None
    if settings.schedules is not None:
        override_uses().tell(settings.schedules, compiled.overridden, name, complete=kind != "forward")
    if isinstance(settings.numerics, NumericsByPlace):
        numerics_uses().tell(settings.numerics, job.gm, name, complete=kind != "forward")
    assert compiled.call is not None
    return replace(compiled, call=with_values(compiled.call, compiled.recipe, name))


def _metadata() -> Any:
    """What AOTAutograd knows of the inputs and results of the forward; None outside of it."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _donated(gm: fx.GraphModule, kind: str) -> tuple[str, ...]:
    """Of the inputs of a backward, what only its forward made and nobody else has by what tracing knows. Whether
    somebody has it all the same is seen at each call (``runtime/host/own_memory.py``).

    AOTAutograd is told that nothing is donated. It takes the answer of the first backward for that of all: later ones
    that retain the graph would raise, and a backward that is found in the cache could not take it into account.
    """
    metadata = _metadata()
    if metadata is None or not CAN_TELL:
        return ()
    if metadata.bw_donated_idxs:
        setattr(metadata, _DONATED, tuple(metadata.bw_donated_idxs))
    metadata.bw_donated_idxs = []
    places = gm.graph.find_nodes(op="placeholder")
    return tuple(places[k].name for k in getattr(metadata, _DONATED, ())) if kind == "backward" else ()


def _static_inputs(kind: str) -> tuple[int, ...]:
    """Positions of parameters and buffers among the inputs of a forward graph, as AOTAutograd knows them."""
    metadata = _metadata()
    if kind == "backward" or metadata is None:
        return ()
    return tuple(metadata.static_input_indices or ())


def _saved_from(kind: str) -> int | None:
    """Where among the results of a forward graph those begin that go to the backward graph alone."""
    metadata = _metadata()
    if kind != "forward" or metadata is None:
        return None
    return int(metadata.num_forward) + len(metadata.tokens)


def _reset() -> None:
    """Forget what this process compiled; torch._dynamo.reset() calls it."""
    kernel_store.cache_clear()
    override_uses.cache_clear()
    numerics_uses.cache_clear()
    written_sections.cache_clear()
    forget_warnings()


mlc_backend.reset = _reset  # type: ignore[attr-defined]

__all__ = ["BackendError", "GraphJob", "compiled_part", "job_of", "mlc_backend", "settings_of", "through_aot"]
