"""The text under construction: lines, names, and what has been computed already in the scopes that are open."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sympy

from ...ir.expr.dtypes import DType
from .types import typed_literal

Dims = frozenset[sympy.Symbol]
SCALAR: Dims = frozenset()


@dataclass(frozen=True, slots=True)
class Value:
    """A value in the text. ``dims`` are the tile axes along which it varies; its tile has extent 1 along the others.

    A value without dims is a scalar; ``literal`` marks a bare Python literal.
    """

    text: str
    dims: Dims
    dtype: DType
    literal: bool = False

    @property
    def typed(self) -> str:
        """The text with a definite element type."""
        return typed_literal(self.text, self.dtype) if self.literal else self.text


class SourceWriter:
    """Lines at an indentation, and a stack of scopes of computed values: one for the program, one for each open
    loop."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.helpers: dict[str, str] = {}
        self._count: dict[str, int] = {}
        self._scopes: list[dict[Hashable, object]] = [{}]
        # Where the head of the program ends: behind its numbers and the axes of tiles.
        self._head = 0

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def comment(self, text: str) -> None:
        self.line(f"# {text}")

    def fresh(self, prefix: str) -> str:
        """A name of the kernel's own that nothing has yet."""
        k = self._count.get(prefix, 0)
        self._count[prefix] = k + 1
        return f"{prefix}{k}"

    def assign(self, prefix: str, text: str) -> str:
        name = self.fresh(prefix)
        self.line(f"{name} = {text}")
        return name

    def end_head(self) -> None:
        """What is written from now on is the body of the program."""
        self._head = len(self.lines)

    def assign_ahead(self, prefix: str, text: str) -> str:
        """A name for what is the same in all of the program, written at the end of its head."""
        name = self.fresh(prefix)
        self.lines.insert(self._head, f"    {name} = {text}")
        self._head += 1
        return name

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A nested body: what is computed in it is forgotten after it."""
        self.depth += 1
        self._scopes.append({})
        yield
        self._scopes.pop()
        self.depth -= 1

    @property
    def level(self) -> int:
        return len(self._scopes)

    def known(self, key: Hashable) -> object | None:
        for scope in reversed(self._scopes):
            if key in scope:
                return scope[key]
        return None

    def remember(self, key: Hashable, value: object) -> None:
        self._scopes[-1][key] = value

    def remember_always(self, key: Hashable, value: object) -> None:
        """Remember what was written ahead of the body, whatever is open now."""
        self._scopes[0][key] = value

    def forget(self, buffer: str) -> None:
        """Loads of a buffer that is written: what was loaded before does not hold any more."""
        for scope in self._scopes:
            for key in [k for k in scope if isinstance(k, tuple) and k[:2] == ("load", buffer)]:
                del scope[key]

    def forget_value(self, name: str) -> None:
        """Expressions of a variable that has a new value."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        for scope in self._scopes:
            values = [k for k in scope if isinstance(k, tuple) and k[0] == "value" and name in str(k[1])]
            for key in [k for k in values if word.search(str(k[1]))]:
                del scope[key]
