"""Traces: the record of a schedule, as data that replays on an equal nest."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from ..ir.errors import IRError
from ..ir.parser_expr import index
from ..ir.printer_expr import index_text
from .error import ScheduleError

# Names of loops and blocks, numbers, expressions in sizes, and lists of them.
Argument = Any
# Primitives that take loops one after the other, and the name under which a step keeps them.
VARIADIC = {"fuse": "loops", "reorder": "loops"}


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
        case sympy.Expr():
            return {"size": index_text(value)}
    return value


def _text(value: Argument) -> str:
    match value:
        case tuple():
            return f"[{', '.join(map(_text, value))}]"
        case sympy.Expr():
            return f"s.size({index_text(value)!r})"
    return repr(value)
