"""Graphs in AOTAutograd's own cache: a warm process neither traces nor partitions what an earlier one compiled.

AOTAutograd keeps, by the Dynamo graph and its inputs, what it needs to rebuild its wrappers and the two compiled
graphs. Of a graph of ours it keeps the key under which our own cache has the program. Its key knows nothing of
backends and their settings, so that these go into its tag, with our sources and torch's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import dynamo_timed
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, FXGraphCacheMiss
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext
from torch._inductor.output_code import OutputCode
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...codegen.host.steps.lines import Lines
from ...runtime.cache.fingerprint import environment_fingerprint, key_of
from ...runtime.cache.torch_sources import torch_sources
from ...runtime.compile.kernels import kernel_store_of
from ...runtime.frozen.recipe import Recipe
from ...runtime.settings.options import Options
from ...runtime.timing import process_times
from ..aten_passes.share_nodes import storage_of
from ..compiling.compiled import CompiledGraph, stored_graph, with_values
from ..tracing.origins import numbers_of
from .aot_key import KEYS_WITHOUT_INDUCTOR, OWN, shape_env
from .saved_program import SavedProgram, SavedProgramError, Saver
from .surroundings import surroundings

# The settings of the call of the backend that is at work: a graph out of AOTAutograd's cache is loaded under them.
_SETTINGS: ContextVar[Options] = ContextVar("mlc_settings")
# The lines of the model at hand, by the numbers of the nodes in the graph of Dynamo's.
_LINES: ContextVar[Lines] = ContextVar("mlc_lines")


@dataclass
class GraphCode(OutputCode):
    """One compiled graph as AOTAutograd's cache holds it: its name, and its key in our cache ("" for none), or,
    where it is compiled ahead of time, the program itself."""

    name: str
    key: str
    saved: SavedProgram | None = field(default=None, repr=False)
    # The places that the program's text names, in the graph of Dynamo's.
    places: dict[int, int] = field(default_factory=dict, repr=False)
    # How what does not change between calls is made, which the program is given behind its inputs.
    recipe: Recipe | None = field(default=None, repr=False)
    call: Callable[[list[Any]], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # AOTAutograd's wrappers copy what an object has itself, not what its class has.
        self._boxed_call = True

    def __call__(self, inputs: Any) -> Any:
        assert self.call is not None, f"{self.name} has not been loaded"
        return self.call(inputs)

    def prepare_for_serialization(self) -> None:
        """Leave out what only this process has. Raises BypassAOTAutogradCache for what no other can load."""
        if not self.key and self.saved is None:
            raise BypassAOTAutogradCache(f"torch-mlc: {self.name} is not in the cache by itself")
        self.call = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Load the program. Raises FXGraphCacheMiss where our cache no longer has it: the graph is compiled again; and
        SavedProgramError where a saved one cannot be run here."""
        with dynamo_timed("mlc_compile_graph"):
            if self.saved is not None:
                found: CompiledGraph | None = self.saved.load()
            else:
                lines, places = _LINES.get(), self.places
                found = stored_graph(
                    self.key, options=_SETTINGS.get(), name=self.name, lines=lambda k: lines(places.get(k, -1))
                )
        if found is None:
            raise FXGraphCacheMiss(f"torch-mlc: the program of {self.name} is gone from the cache")
        process_times.add("stored", found.timer.seconds)
        assert found.call is not None
        self.call = with_values(found.call, self.recipe, self.name)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing: kernels are in our own cache."""


def is_ahead_of_time() -> bool:
    """Whether torch is to write down what is compiled (``aot_compile``, packages of Dynamo's): no cache of this process
    or machine is there when that is loaded."""
    precompiled = getattr(torch._dynamo.config, "caching_precompile", False)
    return bool(getattr(functorch_config, "bypass_autograd_cache_key", False) or precompiled)


def is_cacheable(options: Options, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a call of the backend should be answered from AOTAutograd's cache.

    Not where something is wanted of the compilation itself, or where it depends on what no key can tell. Graphs of a
    single operation gain by it: one of a linear layer takes 15 ms instead of 55, and 15 more where it is new.
    """
    wanted = options.shows_stages or options.memory_limit is not None or options.retunes or options.verify > 1
    if not options.cache or wanted or options.schedules is not None or options.lock is not None:
        return False
    # AOTAutograd may take a plain float for a constant, with a guard that no entry holds: only those of integers are.
    values = [n.meta.get("example_value") for n in gm.graph.nodes]
    if any(isinstance(v, torch.SymFloat) and v.node.has_hint() for v in values):
        return False
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    if any(is_traceable_wrapper_subclass(x) for x in tensors):
        return False
    # Whether arguments overlap is traced, too, with a guard that Dynamo is told of and no entry holds. Where sizes do
    # not vary, the key says it.
    memories = Counter(storage_of(x) for x in tensors)
    shares = any(memory is not None and n > 1 for memory, n in memories.items())
    if shares and any(_varies(v) for v in (*values, *tensors)):
        return False
    # What the user's Python says of an op (its gradient, what it is composed of) is traced, and no key has its text.
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return not any(_is_written_in_python(node.target) for graph in graphs for node in graph.nodes)


def _is_written_in_python(target: Any) -> bool:
    """Whether an op is one of another library than torch's that has kernels in Python."""
    match target:
        case OpOverload():
            name = str(target._schema.name)
        case OpOverloadPacket():
            name = str(target._qualified_op_name)
        case _:
            return False
    namespace, _, op = name.partition("::")
    places = (f"{namespace}/{op}/", f"{namespace}/{op}.")  # without an overload's name, and with one
    return namespace not in OWN and any(known.startswith(places) for known in torch.library._impls)


def _varies(value: Any) -> bool:
    """Whether a number, or what tells the place of a tensor in memory, is no constant."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, torch.SymInt)


@contextmanager
def settings_in_keys(options: Options, lines: Lines, ahead: str = "", told: str = "") -> Iterator[None]:
    """AOTAutograd's cache under a key that tells these settings, this machine and our sources from others, and entries
    that hold their programs, ``ahead`` of time, from those that name them. ``lines`` are of the model at hand, and the
    key has what is ``told`` of its inputs."""
    devices = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    levels = kernel_store_of(options).levels
    sources = torch_sources(levels.disk if levels is not None else None)
    tag = key_of([environment_fingerprint(), sources, *surroundings(options, devices).values(), ahead, told])
    before = torch.compiler.config.cache_key_tag
    settings_before, lines_before = _SETTINGS.set(options), _LINES.set(lines)
    try:
        with (
            KEYS_WITHOUT_INDUCTOR.here(),
            torch.compiler.config.patch(cache_key_tag=f"{before}mlc:{tag}"),
            functorch_config.patch(bundled_autograd_cache=True),
            functorch_config.patch(enable_autograd_cache=True) if ahead else nullcontext(),
        ):
            yield
    finally:
        _SETTINGS.reset(settings_before)
        _LINES.reset(lines_before)


def cacheable(
    compiler: Callable[[fx.GraphModule, Sequence[Any]], CompiledGraph], save: Saver | None = None
) -> SerializableAOTDispatchCompiler:
    """A compiler whose results AOTAutograd's cache can hold; with ``save``, each with the program that it makes of it.

    That raises SavedProgramError where a program cannot be written down.
    """

    def compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> GraphCode:
        _LATE.begin()
        compiled = compiler(gm, example_inputs)
        if save is not None:
            if _has_tokens():
                raise SavedProgramError(
                    f"{compiled.name} cannot be saved: it has ops whose effects keep their order (prints, effectful "
                    "custom ops), and torch's wrappers of what is saved do not keep it"
                )
            return GraphCode(compiled.name, "", save(compiled), recipe=compiled.recipe, call=compiled.call)
        _keep_guards()
        kept = compiled.is_self_contained and not _has_tokens()
        places = numbers_of(gm, compiled.kept.places) if compiled.kept is not None else {}
        key = compiled.key if kept else ""
        return GraphCode(compiled.name, key, places=places, recipe=compiled.recipe, call=compiled.call)

    return SerializableAOTDispatchCompiler(GraphCode, compile)


def _has_tokens() -> bool:
    """Whether graphs are given tokens that keep effects in their order, which the wrappers of an entry do not give."""
    context = TracingContext.try_get()
    return context is not None and context.fw_metadata is not None and bool(context.fw_metadata.tokens)


def _keep_guards() -> None:
    """Let an entry hold every guard of its sizes.

    torch leaves out guards of symbols that are no arguments, as those are that tracing found to be equal to another:
    a graph for odd sizes was found for even ones. They are added in the symbol that stands for both. Other guards are
    held as they are: simplified, they would be the same ones once more.

    It also writes guards with "and" between them, and none in parentheses, so that of "a or b" the rest was not asked:
    a graph for one size was found for every.
    """
    env = shape_env()
    if env is None:
        return
    env.produce_guards = partial(_in_parentheses, type(env).produce_guards, env)
    known = {guard.expr for guard in env.guards}
    for guard in list(env.guards):
        if env.replacements.keys().isdisjoint(guard.expr.free_symbols):
            continue
        said = env.simplify(guard.expr)
        if said.free_symbols and said not in known:
            known.add(said)
            env.guards.append(guard._replace(expr=said))


def _in_parentheses(produce: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    return [f"({guard})" for guard in produce(*args, **kwargs)]


class _LateSaving:
    """A backward graph is compiled, and its entry saved, long after the call of the backend: at its first run.

    Whether entries hold their graphs is a setting of the process, which must hold until that compilation ends.
    """

    def __init__(self) -> None:
        self._open = ExitStack()

    def begin(self) -> None:
        if functorch_config.bundled_autograd_cache:
            return
        if self.end not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(self.end)
        self._open.enter_context(functorch_config.patch(bundled_autograd_cache=True))

    def end(self, args: CallbackArgs | None = None) -> None:
        self._open.close()


_LATE = _LateSaving()
