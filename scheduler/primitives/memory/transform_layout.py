"""transform_layout."""

from __future__ import annotations

import ast
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from ....ir.errors import IRError
from ....ir.expr.index import Extents, simplify
from ....ir.expr.value import Expr, Index, Load, is_value, rewrite
from ....ir.nest.loops import (
    Access,
    Block,
    Buffer,
    LoopNest,
    Node,
    Statement,
    Store,
    Update,
    contiguous_strides,
    map_nodes,
)
from ....ir.text.parser_expr import index, name_of
from ...error import ScheduleError
from ...facts.views import map_index
from ..analysis.region import at_least, is_disjoint, last_of, terms

Axes = tuple[sympy.Symbol, ...]
# A digit of an index: it over the first number, modulo the second (None: as far as it goes).
Digit = tuple[int, int | None]


def transform_layout(nest: LoopNest, buffer: str, mapping: str) -> LoopNest:
    """Give a buffer of the nest's own other dimensions: permuted, cut into tiles, or put together.

    Rewrites::

        T = local(float32[n, k])                    T = local(float32[ceildiv(n, 16), k, 16])
        T[i, j] = A[i, j]                 ->        T[i // 16, j, i % 16] = A[i, j]
        C[i, j] = T[i, j]                           C[i, j] = T[i // 16, j, i % 16]

    ``mapping`` is text, "n, k -> n // 16, k, n % 16": names of the dimensions, and the new indices in terms of them and
    of sizes. All accesses are rewritten; the elements lie in the order of the new dimensions. What a number that does
    not divide adds is never read.

    Requires: the buffer is no parameter. Each dimension is in the new indices as a whole, by name or as digits
    (``n // 16`` with ``n % 16``); several digits in one index stand side by side, as in ``i * 8 + j`` with ``j`` below
    8.
    Raises: ScheduleError.    Source: TVM ``Schedule.transform_layout``.
    """
    asked = f"transform_layout({buffer}, {mapping!r})"
    if all(b.name != buffer for b in nest.locals):
        names = ", ".join(b.name for b in nest.locals) or "none"
        raise ScheduleError(
            asked, f"{buffer} is no buffer of the nest's own", nest, hint=f"its own are {names}; cache_read makes them"
        )
    old = nest.buffer(buffer)
    axes, indices = _parsed(nest, old, mapping, asked)
    shape = _shape(nest, old, axes, indices, asked)

    def placed(given: tuple[Index, ...], extents: Extents) -> tuple[Index, ...]:
        env = dict(zip(axes, given, strict=True))
        new = (map_index(i, env) for i in indices)
        return tuple(i if is_value(i) else simplify(sympy.expand(i), extents, nest.symbols) for i in new)

    def statement(s: Statement, extents: Extents) -> Statement:
        def leaf(e: Expr) -> Expr | None:
            return Load(buffer, placed(e.indices, extents), e.dtype) if _is_of(e, buffer) else None  # type: ignore[union-attr]

        def at(name: str, given: tuple[Index, ...]) -> tuple[Index, ...]:
            given = tuple(rewrite(i, leaf) if is_value(i) else i for i in given)  # type: ignore[arg-type]
            return placed(given, extents) if name == buffer else given

        match s:
            case Store():
                return replace(s, indices=at(s.buffer, s.indices), value=rewrite(s.value, leaf))
            case Update():
                targets = tuple(Access(t.buffer, at(t.buffer, t.indices)) for t in s.targets)
                return replace(s, targets=targets, values=tuple(rewrite(v, leaf) for v in s.values))

    def visit(n: Node) -> Node | None:
        if not isinstance(n, Block) or buffer not in {ld.buffer for ld in n.reads} | {w.buffer for w in n.writes}:
            return None
        extents = {a.var: a.extent for a in n.axes}
        return replace(n, body=tuple(statement(s, extents) for s in n.body))

    new = replace(old, shape=shape, strides=contiguous_strides(shape))
    own = tuple(new if b is old else b for b in nest.locals)
    return replace(nest, body=map_nodes(nest.body, visit), locals=own)


def _is_of(e: Expr, buffer: str) -> bool:
    return isinstance(e, Load) and e.buffer == buffer


def _parsed(nest: LoopNest, old: Buffer, mapping: str, asked: str) -> tuple[Axes, tuple[sympy.Expr, ...]]:
    """The names of the dimensions, and the new indices."""
    left, arrow, right = mapping.partition("->")
    if not arrow:
        raise ScheduleError(asked, "the mapping has no arrow", hint="write 'i, j -> j, i'")
    try:
        given, wanted = ast.parse(f"({left},)", mode="eval").body, ast.parse(f"({right},)", mode="eval").body
        assert isinstance(given, ast.Tuple) and isinstance(wanted, ast.Tuple)
        axes = tuple(index(ast.Name(name_of(e))) for e in given.elts)
        extents = dict(zip(axes, old.shape, strict=False))
        indices = tuple(simplify(index(e), extents, nest.symbols) for e in wanted.elts)
    except (SyntaxError, IRError, AssertionError) as error:
        raise ScheduleError(asked, f"the mapping cannot be read ({error})", hint="write 'i, j -> j, i'") from None
    if len(set(axes)) != len(axes) or set(axes) & set(nest.symbols.symbols):
        raise ScheduleError(asked, "the mapping needs a name of its own for each dimension before the arrow")
    if len(axes) != len(old.shape):
        raise ScheduleError(
            asked, f"{old.name} has {len(old.shape)} dimensions, and the mapping names {len(axes)}", nest
        )
    unknown = {s for i in indices for s in i.free_symbols} - set(axes) - set(nest.symbols.symbols)
    if unknown:
        raise ScheduleError(asked, f"the mapping speaks of {min(map(str, unknown))}, which is nothing", nest)
    return axes, indices


def _shape(
    nest: LoopNest, old: Buffer, axes: Axes, indices: tuple[sympy.Expr, ...], asked: str
) -> tuple[sympy.Expr, ...]:
    """The new extents; refuses a mapping that may put two elements in one place."""
    extents = dict(zip(axes, old.shape, strict=True))
    digits: dict[sympy.Symbol, list[Digit]] = {a: [] for a in axes}
    shape: list[sympy.Expr] = []
    for i in indices:
        steps: list[tuple[sympy.Expr, sympy.Expr]] = []
        for term in terms(i) if i != 0 else ():
            step, found = _digit(term, axes)
            last = None if found is None else last_of(found[2], extents, nest.symbols)
            if found is None or last is None:
                raise ScheduleError(
                    asked, f"{term} is no digit of a dimension", nest, hint="digits are n, n // 16, n % 16"
                )
            digits[found[0]].append(found[1])
            steps.append((step, sympy.expand(last + 1)))
        if not is_disjoint(nest, sympy.S.One, steps):
            raise ScheduleError(asked, f"the digits in {i} run into each other", nest)
        last = last_of(i, extents, nest.symbols)
        assert last is not None
        shape.append(simplify(sympy.expand(last + 1), {}, nest.symbols))
    for axis, size in extents.items():
        if not _is_told(nest, digits[axis], size):
            raise ScheduleError(asked, f"the new indices do not tell all of {axis}", nest, hint=_hint(axis))
    return tuple(shape)


def _hint(axis: sympy.Symbol) -> str:
    return f"use {axis} itself, or {axis} // 16 with {axis} % 16"


def _digit(term: sympy.Expr, axes: Axes) -> tuple[sympy.Expr, tuple[sympy.Symbol, Digit, sympy.Expr] | None]:
    """A term as a factor and a digit of one dimension; no digit where it is something else."""
    factors = sympy.Mul.make_args(term)
    mine = [f for f in factors if any(a in f.free_symbols for a in axes)]
    step = sympy.Mul(*(f for f in factors if f not in mine))
    if len(mine) != 1 or step.could_extract_minus_sign():
        return step, None
    match mine[0]:
        case sympy.Symbol():
            return step, (mine[0], (1, None), mine[0])
        case FloorDiv(args=(sympy.Symbol() as var, sympy.Integer() as by)):
            return step, (var, (int(by), None), mine[0])
        case ModularIndexing(args=(sympy.Symbol() as var, sympy.Integer() as by, sympy.Integer() as modulus)):
            return step, (var, (int(by), int(modulus)), mine[0])
        case (
            Mod(args=(sympy.Symbol() as var, sympy.Integer() as modulus))
            | PythonMod(args=(sympy.Symbol() as var, sympy.Integer() as modulus))
        ):
            return step, (var, (1, int(modulus)), mine[0])
    return step, None


def _is_told(nest: LoopNest, digits: list[Digit], size: sympy.Expr) -> bool:
    """Whether digits make up a number below ``size``: each begins where the one before ends."""
    reached: int | None = 1
    for by, modulus in sorted(digits, key=lambda d: (d[0], d[1] or 0)):
        if by != reached:
            return False
        reached = None if modulus is None else by * modulus
    return reached is None or at_least(sympy.Integer(reached), size, nest.symbols)
