"""The passes over a host program, from what is called in order to what runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...codegen.host.memory.plan_memory import check_arena
from ...codegen.host.memory.plan_memory import plan_memory as planned
from ...codegen.host.python.text import print_host
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.views import track_views as tracked
from ...ir.errors import MemoryLimitError
from ...ir.graph.graph import Graph
from ...ir.passes import Level, Pass, Setting
from ..repeats.repeating import NotAlike, Repeating
from ..repeats.roll import roll
from .memory_limit import limited


@dataclass(frozen=True, slots=True)
class HostContext:
    """``graph`` is what the program runs, of which the first ``returned`` results (None: all) are the caller's, and
    ``given`` inputs that nobody else holds; ``limit`` is a number of bytes that it may hold. ``few`` are the layers of
    the graph that it was built for, where it has more. With ``proved`` what lives in the arena is proved to be apart.
    """

    graph: Graph
    returned: int | None = None
    given: Collection[str] = ()
    limit: int | None = None
    few: Repeating | None = None
    proved: bool = False


HOST: Level[HostProgram] = Level("host", lambda p: print_host(p).text, lambda p: len(p.steps), suffix="py")
LIMITED: Setting[HostContext] = Setting("a limit of memory", lambda context: context.limit is not None)
IN_LAYERS: Setting[HostContext] = Setting("layers that repeat", lambda context: context.few is not None)


def limit_memory(program: HostProgram, context: HostContext) -> HostProgram:
    """The program refuses sizes that take more than the limit."""
    assert context.limit is not None
    return limited(program, context.graph, context.limit, context.given)


def roll_layers(program: HostProgram, context: HostContext) -> HostProgram:
    """The steps of a layer become a loop over all that are like it."""
    assert context.few is not None
    return roll(program, context.few)


def track_views(program: HostProgram, context: HostContext) -> HostProgram:
    """Results that share memory are views for autograd."""
    return tracked(program, context.returned)


def plan_memory(program: HostProgram, context: HostContext) -> HostProgram:
    """What is allocated gets a place in one arena."""
    program = planned(program, context.graph.symbols)
    if context.proved:
        check_arena(program, context.graph.symbols)
    return program


# In the order in which they run.
HOST_PASSES: tuple[Pass[HostProgram, HostContext], ...] = (
    Pass("limit_memory", HOST, limit_memory, needs=(LIMITED,), raises=(MemoryLimitError,)),
    Pass("roll_layers", HOST, roll_layers, needs=(IN_LAYERS,), raises=(NotAlike,)),
    Pass("track_views", HOST, track_views),
    Pass("plan_memory", HOST, plan_memory),
)
