"""How often the loops of a kernel's text run, from the text and the sizes of a call.

Bounds are scalars: numbers, sizes, the program's place in the grid, and what is computed of those. Loops that a causal
mask bounds run more often in some programs than in others, so a number of programs are looked at.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

# Programs that are looked at, and values of a loop's variable where inner loops depend on it.
_PROGRAMS, _VALUES = 64, 16
_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_CALLS: Mapping[str, Callable[..., int]] = {
    "minimum": min, "maximum": max, "min": min, "max": max, "cdiv": lambda a, b: -(-a // b),
}  # fmt: skip


@dataclass(slots=True)
class TextLoop:
    """A loop, or one side of a branch, of the text from line ``first`` to ``last``; ``runs`` is how often its body runs
    in a program, on average, None where its bounds are no scalars. ``within`` is the line of the loop that asks to be
    made one with this one (``flatten``), if there is such."""

    first: int
    last: int
    runs: float | None = 0.0
    within: int | None = None


def text_loops(text: str, name: str, sizes: Mapping[str, int], grid: Sequence[int]) -> tuple[TextLoop, ...]:
    """The loops and branches of the kernel ``name``, in the order of their lines.

    ``sizes`` are the values of its scalar arguments by name, ``grid`` the number of programs by dimension.
    """
    tree = ast.parse(text)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    nodes = [n for n in ast.walk(function) if isinstance(n, (ast.For, ast.If))]
    found = {n.lineno: _lines(n.lineno, n.body) for n in nodes}
    others = {n.lineno: _lines(n.orelse[0].lineno, n.orelse) for n in nodes if n.orelse}
    for outer in (n for n in ast.walk(function) if isinstance(n, ast.For) and _is_flat(n)):
        for inner in (n for n in outer.body if isinstance(n, ast.For)):
            found[inner.lineno].within = outer.lineno
    if found:
        programs = _sample(grid)
        for program in programs:
            _Program(program, found, others, sizes).body(function.body, 1 / len(programs))
    return tuple(sorted((*found.values(), *others.values()), key=lambda part: (part.first, -part.last)))


def _lines(first: int, body: Sequence[ast.stmt]) -> TextLoop:
    return TextLoop(first, body[-1].end_lineno or body[-1].lineno)


def _is_flat(loop: ast.For) -> bool:
    """Whether a loop asks to be made one with the loop that it holds."""
    asked = loop.iter.keywords if isinstance(loop.iter, ast.Call) else []
    return any(k.arg == "flatten" and isinstance(k.value, ast.Constant) and k.value.value is True for k in asked)


def _sample(grid: Sequence[int]) -> list[tuple[int, ...]]:
    shape = [max(n, 1) for n in (*grid, 1, 1, 1)[:3]]
    total = math.prod(shape)
    if total <= _PROGRAMS:
        return list(product(*map(range, shape)))
    # A step without a common factor with the grid's inner sizes, so that no place in them is left out.
    step = next(s for s in range(total // _PROGRAMS, 0, -1) if math.gcd(s, total) == 1)
    flat = islice(range(0, total, step), _PROGRAMS)
    return [(k // (shape[1] * shape[2]), k // shape[2] % shape[1], k % shape[2]) for k in flat]


@dataclass(slots=True)
class _Program:
    """One program's scalars while its statements are gone through."""

    program: tuple[int, ...]
    loops: dict[int, TextLoop]
    others: dict[int, TextLoop]
    sizes: Mapping[str, int]
    scalars: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scalars.update(self.sizes)

    def body(self, statements: Sequence[ast.stmt], weight: float) -> None:
        for s in statements:
            if isinstance(s, ast.For):
                self.loop(s, weight)
            elif isinstance(s, ast.If):
                self.branch(s, weight)
            elif isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name):
                value = self.value(s.value)
                if value is None and s.targets[0].id in self.sizes:
                    continue  # read for each row of a table, of which the size is that of a typical one
                if value is None:
                    self.scalars.pop(s.targets[0].id, None)
                else:
                    self.scalars[s.targets[0].id] = value

    def loop(self, s: ast.For, weight: float) -> None:
        loop = self.loops[s.lineno]
        bounds = self.bounds(s.iter)
        if bounds is None or not isinstance(s.target, ast.Name):
            loop.runs = None
            self.body(s.body, weight)
            return
        values = range(*bounds)
        if loop.runs is not None:
            loop.runs += weight * len(values)
        nested = any(isinstance(n, (ast.For, ast.If)) for inner in s.body for n in ast.walk(inner))
        chosen = values[:: max(len(values) // _VALUES, 1)] if nested else values[:1]
        for value in chosen:
            self.scalars[s.target.id] = value
            self.body(s.body, weight * len(values) / len(chosen))

    def branch(self, s: ast.If, weight: float) -> None:
        holds = self.value(s.test)
        sides = ((self.loops[s.lineno], s.body, True), (self.others.get(s.lineno), s.orelse, False))
        for part, body, meant in sides:
            if part is not None and holds is None:
                part.runs = None
            elif part is not None and bool(holds) is meant and part.runs is not None:
                part.runs += weight
            if holds is None or bool(holds) is meant:
                self.body(body, weight)

    def bounds(self, call: ast.expr) -> tuple[int, ...] | None:
        if not isinstance(call, ast.Call):
            return None
        found = [self.value(a) for a in call.args]
        return None if not found or None in found else tuple(v for v in found if v is not None)

    def value(self, e: ast.expr) -> int | None:
        if isinstance(e, ast.Constant):
            return int(e.value) if isinstance(e.value, (int, bool)) else None
        if isinstance(e, ast.Name):
            return self.scalars.get(e.id)
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
            inner = self.value(e.operand)
            return None if inner is None else -inner
        if isinstance(e, ast.BinOp) and type(e.op) in _BINARY:
            a, b = self.value(e.left), self.value(e.right)
            if a is None or b is None or (b == 0 and isinstance(e.op, (ast.FloorDiv, ast.Mod))):
                return None
            return _BINARY[type(e.op)](a, b)
        if isinstance(e, ast.Compare) and len(e.ops) == 1 and type(e.ops[0]) in _COMPARE:
            a, b = self.value(e.left), self.value(e.comparators[0])
            return None if a is None or b is None else int(_COMPARE[type(e.ops[0])](a, b))
        if isinstance(e, ast.Call):
            return self.call(e)
        return None

    def call(self, e: ast.Call) -> int | None:
        name = e.func.attr if isinstance(e.func, ast.Attribute) else e.func.id if isinstance(e.func, ast.Name) else ""
        if name == "program_id" and isinstance(e.args[0], ast.Constant):
            return self.program[int(str(e.args[0].value))]
        if name == "to" and isinstance(e.func, ast.Attribute):
            return self.value(e.func.value)
        if name == "cast":
            return self.value(e.args[0])
        if name not in _CALLS or e.keywords:
            return None
        given = [self.value(a) for a in e.args]
        return None if None in given else _CALLS[name](*given)
