"""The passes over a host program, in the order in which they run, and what of a compilation they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TypeAlias

from ...codegen.host.memory.plan_memory import plan_memory
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.resolve import resolve
from ...codegen.host.steps.track_views import track_views
from ...codegen.host.steps.write_out_loops import write_out_loops
from ...codegen.host.verify import verify_host_program
from ...ir.graph.graph import Graph
from .memory_limit import limited


@dataclass(frozen=True, slots=True)
class HostContext:
    """The options' ``memory_limit`` in bytes, for which inputs that are ``given``, since nobody else holds them, count;
    the fused ``graph`` of the program, of which an error tells. ``verify`` has every pass checked."""

    graph: Graph | None = None
    memory_limit: int | None = None
    given: tuple[str, ...] = ()
    verify: bool = False


HostPass: TypeAlias = Callable[[HostProgram, HostContext], HostProgram]


def _plain(rewrite: Callable[[HostProgram], HostProgram]) -> HostPass:
    """A pass that asks nothing of the compilation."""

    @wraps(rewrite)
    def run(program: HostProgram, context: HostContext) -> HostProgram:
        return rewrite(program)

    return run


def limit_memory(program: HostProgram, context: HostContext) -> HostProgram:
    """The program, which refuses sizes that take more memory than the options allow. Raises MemoryLimitError."""
    if context.graph is None or context.memory_limit is None:
        return program
    return limited(program, context.graph, context.memory_limit, context.given)


HOST_PASSES: tuple[HostPass, ...] = (limit_memory, _plain(track_views), _plain(plan_memory))
# From there to what is printed: as Python, and as machine code, which has no loops.
TEXT_PASSES: tuple[HostPass, ...] = (_plain(resolve),)
CODE_PASSES: tuple[HostPass, ...] = (_plain(write_out_loops), _plain(resolve))


def run_host_passes(passes: Sequence[HostPass], program: HostProgram, context: HostContext) -> HostProgram:
    """The program after some passes. Raises VerifyError where one of them breaks a rule and somebody looks."""
    for rewrite in passes:
        program = rewrite(program, context)
        if context.verify:
            verify_host_program(program)
    return program
