"""Which memory of a program the caller never has."""

from __future__ import annotations

from ....ir.graph.effects import may_alias
from .ops import users_op
from .program import HostProgram
from .step import CallLibrary, Repeat, Return


def unseen(program: HostProgram) -> frozenset[str]:
    """Names under which a planned program makes memory of intermediates, and of what is saved for the backward. No
    tensor that the caller gets lies there, so a storage may be longer than the tensor on it."""
    root: dict[str, str] = {}
    seen: set[str] = set()
    for step in program.steps:
        if isinstance(step, Repeat):  # what goes from one time to the next may be what leaves the last
            seen |= {*step.kept} | {name for row in step.carried for name in row}
    for step, _ in program.every_step():
        facts = step.facts
        root |= {n: n for n in facts.makes} | {n: root.get(source, source) for n, source in facts.shares}
        match step:
            case CallLibrary(node) if may_alias(node.target) or users_op(node):
                seen |= {*facts.reads, *facts.makes}  # which may return what they are given
            case Return(values):
                seen |= {v for v in values[: program.returned] if isinstance(v, str)}
    return frozenset({*root.values()} - {root.get(name, name) for name in seen})
