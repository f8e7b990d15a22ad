"""Traces: the record of a schedule, as data that replays on an equal nest."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from ...ir.errors import IRError
from ...ir.text.parser_expr import index
from ...ir.text.printer_expr import index_text
from ..error import ScheduleError

# Names of loops and blocks, numbers, expressions in sizes, values that were drawn, and lists of them.
Argument = Any
# Primitives that take loops one after the other, and the name under which a step keeps them.
VARIADIC = {"fuse": "loops", "reorder": "loops"}
# Primitives that draw something, and keep it as their argument ``decision``.
SAMPLES = ("sample_perfect_tile", "sample_categorical")


class DrawnInt(int):
    """A number that a step has drawn; steps that are given it say so, and follow another decision."""

    name: str


class DrawnFloat(float):
    name: str


class DrawnStr(str):
    name: str


Drawn = DrawnInt | DrawnFloat | DrawnStr


def drawn(value: int | float | str, name: str) -> Drawn:
    """A value with the name under which later steps know it."""
    kind = DrawnStr if isinstance(value, str) else DrawnFloat if isinstance(value, float) else DrawnInt
    result = kind(value)
    result.name = name
    return result


def settled(value: Argument) -> Argument:
    """A value by itself, whoever has drawn it."""
    match value:
        case DrawnInt():
            return int(value)
        case DrawnFloat():
            return float(value)
        case DrawnStr():
            return str(value)
    return value


@dataclass(frozen=True, slots=True)
class StepRef:
    """An argument that an earlier step has drawn."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive: its name, its arguments, and the names that it made."""

    primitive: str
    args: tuple[tuple[str, Argument], ...]
    results: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The call as Python that does it again on a schedule ``s``."""
        spread = VARIADIC.get(self.primitive)
        given = [", ".join(map(_text, v)) if k == spread else f"{k}={_text(v)}" for k, v in self.args]
        call = f"s.{self.primitive}({', '.join(given)})"
        return f"{', '.join(self.results)} = {call}" if self.results else call


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of a schedule, in order, and the name of the rule that took them."""

    steps: tuple[Step, ...] = ()
    rule: str = ""

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))

    @property
    def decisions(self) -> dict[int, Argument]:
        """What was drawn, by the number of the step that drew it."""
        return {k: dict(s.args)["decision"] for k, s in enumerate(self.steps) if s.primitive in SAMPLES}

    def with_decision(self, step: int, decision: Argument) -> Trace:
        """The trace in which one step has drawn something else, and those that use it follow. Raises ScheduleError;
        whether the decision is a legal one is seen where the trace is replayed."""
        if step not in self.decisions:
            known = ", ".join(map(str, self.decisions)) or "none"
            raise ScheduleError(f"with_decision({step})", f"no such step draws anything; those that do are {known}")
        old = self.steps[step]
        new = Step(
            old.primitive, tuple((k, _frozen(decision) if k == "decision" else v) for k, v in old.args), old.results
        )
        return Trace((*self.steps[:step], new, *self.steps[step + 1 :]), self.rule)

    def to_json(self) -> str:
        """The trace as text; ``from_json`` gives an equal one back."""
        steps = [[s.primitive, {k: _plain(v) for k, v in s.args}, list(s.results)] for s in self.steps]
        return json.dumps({"rule": self.rule, "steps": steps}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Trace:
        """Raises ScheduleError where the text is no trace."""
        try:
            data = json.loads(text)
            steps = tuple(
                Step(str(name), tuple((k, _frozen(v)) for k, v in args.items()), tuple(results))
                for name, args, results in data["steps"]
            )
            return Trace(steps, str(data.get("rule", "")))
        except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, IRError) as error:
            raise ScheduleError("Trace.from_json", f"this is no trace ({error}): {text[:80]!r}") from None


def make_step(primitive: str, args: Mapping[str, Argument], results: tuple[str, ...]) -> Step:
    return Step(primitive, tuple((k, _frozen(v)) for k, v in args.items()), results)


def _frozen(value: Argument) -> Argument:
    match value:
        case list() | tuple():
            return tuple(map(_frozen, value))
        case DrawnInt() | DrawnFloat() | DrawnStr():
            return StepRef(value.name)
        case {"drawn": str() as name}:
            return StepRef(name)
        case StepRef():
            return value
        case sympy.Integer():
            return int(value)
        case {"size": str() as text}:
            return index(ast.parse(text, mode="eval").body)
        case bool() | int() | float() | str() | None | sympy.Expr():
            return value
    raise TypeError(f"{type(value).__name__} is no argument of a primitive")


def _plain(value: Argument) -> Argument:
    match value:
        case tuple():
            return [_plain(v) for v in value]
        case StepRef():
            return {"drawn": value.name}
        case sympy.Expr():
            return {"size": index_text(value)}
    return value


def _text(value: Argument) -> str:
    match value:
        case tuple():
            return f"[{', '.join(map(_text, value))}]"
        case StepRef():
            return value.name
        case sympy.Expr():
            return f"s.size({index_text(value)!r})"
    return repr(value)
