"""The passes over a host program, from what is called in order to what is printed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ...codegen.host.memory.plan_memory import plan_memory
from ...codegen.host.python.text import print_host
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.resolve import resolve
from ...codegen.host.steps.resolved import Take
from ...codegen.host.steps.track_views import track_views
from ...codegen.host.steps.write_out_loops import write_out_loops
from ...codegen.host.verify import verify_host_program
from ...ir.errors import MemoryLimitError
from ...ir.graph.graph import Graph
from ...ir.passes import Level, Pass, Plain, Setting
from .memory_limit import limited


@dataclass(frozen=True, slots=True)
class HostContext:
    """``graph`` is what the program runs, and ``given`` its inputs that nobody else holds; ``limit`` is a number of
    bytes that it may hold."""

    graph: Graph
    given: Collection[str] = ()
    limit: int | None = None


def _text(program: HostProgram) -> str:
    """The program as Python, resolved where it is not yet."""
    return print_host(program if isinstance(program.steps[0], Take) else resolve(program)).text


HOST: Level[HostProgram] = Level("host", _text, lambda p: len(p.steps), verify_host_program, suffix="py")
LIMITED: Setting[HostContext] = Setting("a limit of memory", lambda context: context.limit is not None)


def limit_memory(program: HostProgram, context: HostContext) -> HostProgram:
    """The program refuses sizes that take more than the limit."""
    assert context.limit is not None
    return limited(program, context.graph, context.limit, context.given)


# In the order in which they run.
HOST_PASSES: tuple[Pass[HostProgram, HostContext], ...] = (
    Pass("limit_memory", HOST, limit_memory, needs=(LIMITED,), raises=(MemoryLimitError,)),
    Pass("track_views", HOST, Plain(track_views)),
    Pass("plan_memory", HOST, Plain(plan_memory)),
)
# From there to what is printed: as Python, and as machine code, which has no loops.
TEXT_PASSES: tuple[Pass[HostProgram, Any], ...] = (Pass("resolve", HOST, Plain(resolve)),)
CODE_PASSES: tuple[Pass[HostProgram, Any], ...] = (
    Pass("write_out_loops", HOST, Plain(write_out_loops)),
    Pass("resolve", HOST, Plain(resolve)),
)
