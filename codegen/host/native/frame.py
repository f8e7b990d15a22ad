"""Where a native host program keeps its tensors: as tensors of torch's, or as addresses.

A result that only kernels of ours read and write needs no tensor, just memory: in the arena of the program
(``plan_memory.py``), or of its own as long as it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..steps.program import HostProgram
from ..steps.resolved import Forget, PointTo, Rename, RunKernel
from ..steps.step import Allocate, CallLibrary, CheckLayout, MakeView


@dataclass(frozen=True, slots=True)
class Frame:
    """``roots`` gives each name the one that its memory or tensor was made under (views are their own); ``tensors`` are
    the roots that ops, callers or views of torch's see; ``dying`` the inputs that are forgotten before the program
    ends; ``end`` the first step after which nothing runs."""

    roots: Mapping[str, str]
    tensors: frozenset[str]
    dying: frozenset[str] = frozenset()
    end: int = 0


def plan_frame(program: HostProgram) -> Frame:
    """The frame of a resolved program."""
    roots = _roots(program)
    tensors = _tensors(program, roots)
    running = (RunKernel, CallLibrary, Allocate, PointTo, CheckLayout)
    runs = [
        k for k, s in enumerate(program.steps) if isinstance(s, running) and not (isinstance(s, PointTo) and s.base)
    ]
    end = runs[-1] + 1 if runs else 0
    freed = {n for s in program.steps[:end] if isinstance(s, Forget) for n in s.facts.frees}
    return Frame(roots, tensors, frozenset(freed & program.inputs.keys()), end)


def _roots(program: HostProgram) -> dict[str, str]:
    roots = {name: name for name in program.arguments}
    for step in program.steps:
        roots.update((name, name) for name in step.facts.makes)
        if isinstance(step, (Rename, CallLibrary)):
            roots.update((name, roots[source]) for name, source in step.facts.shares)
    return roots


def _tensors(program: HostProgram, roots: Mapping[str, str]) -> frozenset[str]:
    found = {roots[n] for n in program.inputs}
    views: dict[str, str] = {}
    for step in program.steps:
        found.update(roots[n] for n in step.facts.wants)
        if isinstance(step, CallLibrary):
            found.update(roots[n] for n in step.facts.makes)
        if isinstance(step, (MakeView, PointTo)):
            views.update((roots[name], roots[source]) for name, source in step.facts.shares)
    for view in reversed(views):
        if view in found:
            found.add(views[view])
    return frozenset(found)
