"""One ATen graph that is to be compiled, and what is known of it before it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ...codegen.host.steps.lines import Lines
from ...ir.expr.size_regions import ANYWHERE, SizeRegion
from ...ir.passes import Runner
from ...runtime.compile.kernels import KernelStore
from ...runtime.host.lazy_bits import Lazy
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ...scheduler.decisions import Decider, LockedWays
from ..importing.regions import attribute
from ..tracing.origins import lines_of
from .compiled import CompiledGraph


@dataclass(frozen=True, slots=True)
class Job:
    """A graph after the passes over ATen graphs, and how it is to be compiled, as ``compile_graph`` says.

    ``regions`` are the bodies of its control flow, by the node that reads them; ``lazy`` the inputs that may come with
    bits; ``outside`` by name what decides its code besides itself, and ``settings`` what of that decides its kernels'.
    ``decider`` is asked about decisions; without one they are taken by cost, and not recorded. ``locked`` are those
    that a lock file has fixed; ``called_after`` is told what results are made of (``import_graph``). It is compiled for
    the sizes ``within`` a region. ``tables`` and ``owned`` are as in ``PassContext``.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    options: Options
    static: frozenset[int]
    saved: int | None
    given: tuple[str, ...]
    name: str
    load: bool
    fresh: bool
    region: bool
    regions: Mapping[str, CompiledGraph]
    lazy: tuple[Lazy, ...]
    outside: Mapping[str, str]
    settings: str
    timer: PhaseTimer
    run: Runner
    store: KernelStore
    decider: Decider | None = None
    within: SizeRegion = ANYWHERE
    locked: LockedWays | None = None
    called_after: dict[str, str] = field(default_factory=dict, repr=False)
    tables: bool = True
    owned: tuple[str, ...] = ()

    @property
    def lines(self) -> Lines:
        """The lines of the model."""
        return lines_of(self.gm)

    @property
    def devices(self) -> list[str]:
        """The devices of the graph's tensors that code is made for."""
        return devices_of(self.gm)

    @property
    def constants(self) -> dict[str, Any]:
        """The module's own tensors and sub-graphs, by the name of the node that reads them."""
        nodes = self.gm.graph.find_nodes(op="get_attr")
        return {node.name: attribute(self.gm, str(node.target)) for node in nodes}

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What library calls name: objects of the module, and bodies of control flow as functions."""
        return {**given, **{name: region.call for name, region in self.regions.items()}}

    def with_named(self, compiled: CompiledGraph) -> CompiledGraph:
        """The graph with the objects and bodies that it may name."""
        bodies = tuple({id(r): r for r in self.regions.values()}.values())
        variants = tuple(self.with_named(v) for v in compiled.variants)
        return replace(compiled, regions=bodies, constants={**self.constants, **self.regions}, variants=variants)


def devices_of(gm: fx.GraphModule) -> list[str]:
    """The devices of a graph's tensors that code is made for."""
    values = (n.meta.get("val") for n in gm.graph.nodes if n.op in ("placeholder", "call_function"))
    found = {str(v.device) for v in values if hasattr(v, "device")}
    return sorted(d for d in found if d.startswith(("cpu", "cuda")))


__all__ = ["Job", "devices_of"]
