"""What a call is made of that does what several calls do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from ...ir.expr.value import rename_loads, substitute_index
from ...ir.function.function import Output, Stage, TensorFunction
from ...ir.graph.graph import CallTensor
from ...ir.nest.loops import Buffer
from ..functions.function_table import FunctionTable


class JoinedParts:
    """Inputs, stages and outputs of some calls, for one function of all their arguments, each of which it has once."""

    def __init__(self, members: Sequence[CallTensor]) -> None:
        self._members = members
        self._args = tuple(dict.fromkeys(a for c in members for a in c.args))
        self._names = {a: f"in{k}" for k, a in enumerate(self._args)}
        self._inputs: dict[str, Buffer] = {}
        self.stages: list[Stage] = []
        self.outputs: list[Output] = []

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        """The inputs of the function, once all calls have been taken up."""
        return tuple(self._inputs[n] for n in self._names.values())

    def add(self, call: CallTensor, function: TensorFunction, moved: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
        """Take up what a call does, with its dimensions by the names that they have now."""
        given = {b.name: self._names[a] for a, b in zip(call.args, function.inputs, strict=True)}
        self._inputs |= {given[b.name]: replace(b, name=given[b.name]) for b in function.inputs}
        before, fresh = sum(len(s.results) for s in self.stages), len(self.outputs)
        results = {r: f"t{before + k}" for k, r in enumerate(r for s in function.stages for r in s.results)}
        for s in function.stages:
            self.stages.append(
                replace(
                    s,
                    results=tuple(results[r] for r in s.results),
                    values=tuple(substitute_index(rename_loads(v, given | results), moved) for v in s.values),
                    axes=None if s.axes is None else tuple(moved.get(v, v) for v in s.axes),
                    into=results[s.into] if s.into else "",
                )
            )
        for k, o in enumerate(function.outputs):
            name = given.get(o.buffer.name)
            buffer = self._inputs[name] if name is not None else replace(o.buffer, name=f"out{fresh + k}")
            indices = tuple(i.xreplace(moved) for i in o.indices)
            self.outputs.append(replace(o, buffer=buffer, result=results[o.result], indices=indices))

    def call(self, function: TensorFunction, table: FunctionTable) -> CallTensor:
        """The call of the function, in the place of all."""
        members = self._members
        return replace(
            members[0],
            names=tuple(n for c in members for n in c.names),
            types=tuple(t for c in members for t in c.types),
            function=table.enter(function),
            args=self._args,
            origins=tuple(dict.fromkeys(o for c in members for o in c.origins)),
            into=tuple(t for c in members for t in c.into or (None,) * len(c.names)),
        )


__all__ = ["JoinedParts"]
