"""A graph of Dynamo's in a run after which everything is as it was: AOTAutograd cuts it, and what it writes is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx
from torch._guards import TracingContext

from ...runtime.settings.options import Options
from ..entry.backend import through_aot
from ..entry.forward_mode import differentiates_forward
from ..entry.frozen_inputs import FrozenInputs
from ..locking.scope import LockScope
from .untouched import KeptTensors


class PartOfGraph(Protocol):
    """What runs in the place of one ATen graph, "forward", "backward" or "inference", of a graph of Dynamo's."""

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], /, *, kind: str, frozen: FrozenInputs,
        scope: LockScope | None,
    ) -> Callable[..., Any]: ...  # fmt: skip


def function_of_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options, kept: KeptTensors, part: PartOfGraph
) -> Callable[..., Any]:
    """The function that runs a Dynamo graph by what ``part`` makes of its ATen graphs. Before each call ``kept`` keeps
    the tensors that are written to. Inside of ``forward_ad.dual_level()`` torch's ops run, and there is no part."""
    if differentiates_forward():
        return gm.forward
    # What Dynamo has put into the module (tensors of an optimizer) comes before the arguments.
    inside = {**dict(gm.named_parameters(remove_duplicate=False)), **dict(gm.named_buffers(remove_duplicate=False))}
    held = list(inside.values())
    written: list[Sequence[int] | None] = []
    frozen = FrozenInputs.of(gm, example_inputs, settings)
    scope = LockScope.of(gm, example_inputs, settings)

    def compiler(kind: str) -> Callable[..., Any]:
        def compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if kind != "backward":
                written.append(_written_inputs(len(held) + len(example_inputs)))
            return part(graph, inputs, kind=kind, frozen=frozen, scope=scope)

        return compile

    call = through_aot(gm, example_inputs, settings, compiler)
    places = written[0] if written else None

    def run(*args: Any) -> Any:
        tensors = [*held, *args]
        kept.keep(tensors if places is None else [tensors[k] for k in places])
        return call(*args)

    return run


def _written_inputs(count: int) -> Sequence[int] | None:
    """The positions of those of ``count`` inputs of a Dynamo graph that are written to; None where it is not known."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or len(metadata.input_info) != count:  # inputs that overlap were put together
        return None
    return [k for k, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_storage_metadata]


__all__ = ["PartOfGraph", "function_of_graph"]
