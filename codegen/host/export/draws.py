"""Random numbers of an exported program: seeds, which a context draws from a generator of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ....ir.graph.graph import TensorType
from ....ir.graph.rename import Naming
from ..steps.program import HostProgram
from ..steps.step import Allocate, CallLibrary, Facts, HostStep, Repeat

SEEDS = "mlc::seeds"


@dataclass(frozen=True, slots=True)
class DrawSeeds(HostStep):
    """``name``, memory of ``count`` int64, gets the next numbers of the context's generator."""

    name: str
    count: int
    comment: str = ""

    def told(self) -> Facts:
        return Facts(reads=(self.name,))

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, name=name(self.name))


def write_draws(program: HostProgram, types: Mapping[str, TensorType]) -> HostProgram:
    """The program with seeds drawn by steps of their own."""

    def written(step: HostStep) -> list[HostStep]:
        match step:
            case Repeat():
                return [replace(step, steps=tuple(s for inner in step.steps for s in written(inner)))]
            case CallLibrary(node) if node.target == SEEDS:
                (name,) = node.names
                return [Allocate(name, types[name]), DrawSeeds(name, int(types[name].numel), step.comment)]
        return [step]

    return replace(program, steps=tuple(s for step in program.steps for s in written(step)))
