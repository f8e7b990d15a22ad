"""Graphs in AOTAutograd's own cache: a warm process neither traces nor partitions what an earlier one compiled.

AOTAutograd keeps, by the Dynamo graph and its inputs, what it needs to rebuild its wrappers and the two compiled
graphs. Of a graph of ours it keeps the key under which our own cache has the program. Its key knows nothing of
backends and their settings, so that these go into its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, FXGraphCacheMiss
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode

from ..runtime.fingerprint import key_of
from ..runtime.options import Options
from .compile import CompiledGraph, stored_graph
from .surroundings import surroundings

# AOTAutograd's key and entries are made by code of Inductor's, whose import and hashes of files cost a cold process
# seconds. An operation of a training graph takes longer to trace, differentiate and part than one of inference. With
# 272 operations, training: 6.8 s cold and 4.6 s warm without this cache, 13.3 s and 4.5 s with it.
LEAST_TRAINED, LEAST_INFERRED = 1000, 3000
# The settings of the call of the backend that is at work: a graph out of AOTAutograd's cache is loaded under them.
_SETTINGS: ContextVar[Options] = ContextVar("mlc_settings")


@dataclass
class GraphCode(OutputCode):
    """One compiled graph as AOTAutograd's cache holds it: its name, and its key in our cache ("" for none)."""

    name: str
    key: str
    call: Callable[[list[Any]], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # AOTAutograd's wrappers copy what an object has itself, not what its class has.
        self._boxed_call = True

    def __call__(self, inputs: Any) -> Any:
        assert self.call is not None, f"{self.name} has not been loaded"
        return self.call(inputs)

    def prepare_for_serialization(self) -> None:
        """Leave out what only this process has. Raises BypassAOTAutogradCache for what no other can load."""
        if not self.key:
            raise BypassAOTAutogradCache(f"torch-mlc: {self.name} is not in the cache by itself")
        self.call = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Load the program. Raises FXGraphCacheMiss where our cache no longer has it: the graph is compiled again."""
        found = stored_graph(self.key, options=_SETTINGS.get(), name=self.name)
        if found is None:
            raise FXGraphCacheMiss(f"torch-mlc: the program of {self.name} is gone from the cache")
        self.call = found.call

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing: kernels are in our own cache."""


def is_cacheable(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> bool:
    """Whether a call of the backend should be answered from AOTAutograd's cache.

    Not where something is wanted of the compilation itself, where it depends on what no key can tell, or where the
    graph is so small that it is traced sooner than looked up.
    """
    wanted = options.dump_dir is not None or options.tune or options.verify > 1
    if not options.cache or wanted or options.schedules is not None:
        return False
    trained = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    operations = sum(n.op.startswith("call") for n in gm.graph.nodes)
    return operations >= (LEAST_TRAINED if trained else LEAST_INFERRED)


@contextmanager
def settings_in_keys(options: Options) -> Iterator[None]:
    """AOTAutograd's cache under a key that tells these settings, this machine and our sources from others."""
    devices = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    tag = key_of(surroundings(options, devices).values())
    before = torch.compiler.config.cache_key_tag
    token = _SETTINGS.set(options)
    try:
        with (
            torch.compiler.config.patch(cache_key_tag=f"{before}mlc:{tag}"),
            functorch_config.patch(bundled_autograd_cache=True),
        ):
            yield
    finally:
        _SETTINGS.reset(token)


def cacheable(
    compiler: Callable[[fx.GraphModule, Sequence[Any]], CompiledGraph],
) -> SerializableAOTDispatchCompiler:
    """A compiler whose results AOTAutograd's cache can hold."""

    def compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> GraphCode:
        _LATE.begin()
        compiled = compiler(gm, example_inputs)
        return GraphCode(compiled.name, compiled.key if compiled.is_self_contained else "", compiled.call)

    return SerializableAOTDispatchCompiler(GraphCode, compile)


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
