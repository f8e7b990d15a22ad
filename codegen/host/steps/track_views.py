"""Results that share memory are views of each other to autograd too, as eager's are, and what is saved of the arguments
are views of those.

Views are otherwise bare tensors on the same memory, which cost less: each counts by itself how often it was written.
Where the caller gets several tensors on one memory, a write to one of them must be seen at the others, by what autograd
saved of them and by a later graph that takes them as inputs; so must a write to an argument, whose view was saved.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from .program import HostProgram
from .step import HostStep, MakeView, Return


def track_views(program: HostProgram) -> HostProgram:
    """The program in which results that share memory of its own, one of them returned to the caller, are tracked views,
    and so are views of inputs that are saved. Others of inputs stay as they are: AOTAutograd makes them again, of the
    caller's tensors."""
    returned = program.returned
    (end,) = [s for s in program.steps if isinstance(s, Return)]
    results = [v for v in end.values if isinstance(v, str)]
    seen = {v for v in end.values[:returned] if isinstance(v, str)}
    source: dict[str, str] = {}
    memory: dict[str, str] = {}
    for step in program.steps:
        for name, other in step.facts.shares:
            if name != other:
                memory[name] = memory.get(other, other)
                if isinstance(step, MakeView):
                    source[name] = other
    together = Counter(memory.get(v, v) for v in dict.fromkeys(results))
    watched = {memory.get(v, v) for v in seen} - program.inputs.keys()
    saved = set() if returned is None else {v for v in end.values[returned:] if isinstance(v, str)}
    tracked: set[str] = set()
    for name in results:
        root = memory.get(name, name)
        if (root in watched and together[root] > 1) or (name in saved and root in program.inputs):
            while name in source and name not in tracked:
                tracked.add(name)
                name = source[name]
    if not tracked:
        return program

    def step_of(step: HostStep) -> HostStep:
        return replace(step, tracked=True) if isinstance(step, MakeView) and step.name in tracked else step

    return replace(program, steps=tuple(step_of(s) for s in program.steps))
