"""Measures of a nest: what its blocks compute, and what their accesses touch inside of each loop.

Sizes are typical values (hints), so that a nest of symbolic sizes has the measures of the static nest that it stands
for. Everything is an estimate: it serves models and never legality.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import sympy
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from ...ir.expr.ops import OPS
from ...ir.expr.value import Call, Cast, Expr, Index, Load, Select, walk
from ...ir.nest.loops import AxisKind, Block, Buffer, Loop, LoopKind, LoopNest, Update, blocks
from ..cost.cpu_kernels import LINE

# Classes of operations, and what belongs to each; all other functions are "rare".
CLASSES = ("plain", "divisions", "functions", "compared", "integers", "casts", "rare")
_DIVISIONS = frozenset(
    ("div", "sqrt", "rsqrt", "reciprocal", "floordiv", "remainder", "truncdiv", "fmod", "div_approx")
)
_FUNCTIONS = frozenset(
    (
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sigmoid",
        "tanh",
        "erf",
        "erfc",
        "exp2_approx",
        "tanh_approx",
    )
)
_COMPARED = frozenset(
    ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_and", "logical_or", "logical_xor", "logical_not")
)
_PLAIN = frozenset(
    (
        "add",
        "sub",
        "mul",
        "fma",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "trunc",
        "round",
    )
)
# States that functions are computed for, and how many plain operations an update of one takes.
HEAVY_MONOIDS, HEAVY = ("logsumexp", "attention", "welford"), 24.0
Steps: TypeAlias = dict[sympy.Symbol, float]
Sizes: TypeAlias = tuple[tuple[sympy.Symbol, int], ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """One access of a block. ``dims`` has of each dimension its extent, its stride, and the step of its index along
    each loop; an index that data give may be anywhere. ``steps`` are elements along each loop."""

    buffer: str
    itemsize: int
    is_write: bool
    is_gather: bool
    dims: tuple[tuple[int, int, Mapping[str, float]], ...]
    steps: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BlockWork:
    """One block: the loops around it with their extents, how often it runs (``iterations``, of which ``useful`` are in
    its domain), the operations of one iteration by class, and its accesses."""

    block: Block
    path: tuple[Loop, ...]
    extents: Mapping[str, int]
    iterations: float
    useful: float
    operations: Mapping[str, float]
    references: tuple[Reference, ...]
    over: frozenset[str]

    @property
    def cost(self) -> float:
        """Operations and accesses of one iteration."""
        return sum(self.operations.values()) + len(self.references)

    @property
    def lanes(self) -> int:
        return math.prod(self.extents[lp.var.name] for lp in self.path if lp.kind is LoopKind.VECTORIZED)


@dataclass(slots=True)
class NestMeasures:
    """All blocks of a nest, and what their loops are."""

    nest: LoopNest
    works: tuple[BlockWork, ...]
    # What is asked again and again: bytes by loops, the loops in each, what they touch, and lines by the identity of
    # references.
    _touched: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict)
    _inside: dict[str, frozenset[str]] = field(default_factory=dict)
    _held: dict[str, float] = field(default_factory=dict)
    _lines: dict[int, float] = field(default_factory=dict)

    def touched(self, loops: frozenset[str]) -> dict[str, float]:
        """Bytes of each buffer that the given loops touch together, in whole lines, all others standing still."""
        key = tuple(sorted(loops))
        if key not in self._touched:
            found: dict[str, float] = {}
            for w in self.works:
                if loops.isdisjoint(w.extents):
                    continue
                for r in w.references:
                    found[r.buffer] = max(found.get(r.buffer, 0.0), LINE * lines(r, w.extents, loops))
            self._touched[key] = found
        return self._touched[key]

    def held(self, loop: Loop) -> float:
        """Bytes that the loops in a loop touch together."""
        name = loop.var.name
        if name not in self._held:
            self._held[name] = sum(self.touched(self.inside(loop)).values())
        return self._held[name]

    def lines(self, work: BlockWork, reference: Reference) -> float:
        """How many cache lines an access of a block meets in all of its loops."""
        key = id(reference)
        if key not in self._lines:
            self._lines[key] = lines(reference, work.extents, work.extents)
        return self._lines[key]

    def inside(self, loop: Loop) -> frozenset[str]:
        """The loops in a loop, and not itself."""
        known = self._inside.get(loop.var.name)
        if known is None:
            known = self._inside[loop.var.name] = self._loops_in(loop)
        return known

    def _loops_in(self, loop: Loop) -> frozenset[str]:
        found: set[str] = set()
        stack = list(loop.body)
        while stack:
            n = stack.pop()
            if isinstance(n, Loop):
                found.add(n.var.name)
                stack.extend(n.body)
        return frozenset(found)


def measured(nest: LoopNest) -> NestMeasures:
    """Look at a nest, scheduled or not."""
    sizes: Sizes = tuple((s, nest.symbols.hint(s)) for s in nest.symbols.symbols)
    buffers = nest.buffers
    return NestMeasures(nest, tuple(_work(nest, b, path, buffers, sizes) for b, path in blocks(nest)))


def _work(
    nest: LoopNest, block: Block, path: tuple[Loop, ...], buffers: Mapping[str, Buffer], sizes: Sizes
) -> BlockWork:
    hint = nest.symbols.hint
    extents = {lp.var.name: max(hint(lp.extent), 0) for lp in path}
    bound = {a.var: steps(e, sizes) for a, e in zip(block.axes, block.bindings, strict=True)}
    over = {
        s.name
        for a, e in zip(block.axes, block.bindings, strict=True)
        if a.kind is not AxisKind.SPATIAL
        for s in e.free_symbols
    }
    references = [
        _reference(buffers[site.buffer], site.indices, is_write, bound, sizes, hint_of=nest)
        for is_write, sites in ((False, block.reads), (True, block.writes))
        for site in sites
    ]
    return BlockWork(
        block, path, extents, float(math.prod(extents.values())),
        float(math.prod(max(hint(a.extent), 0) for a in block.axes)), _operations(block.body), tuple(references),
        frozenset(over & extents.keys()),
    )  # fmt: skip


def _reference(
    buffer: Buffer, indices: Sequence[Index], is_write: bool, bound: Mapping[sympy.Symbol, Steps], sizes: Sizes,
    hint_of: LoopNest,
) -> Reference:  # fmt: skip
    hint = hint_of.symbols.hint
    dims: list[tuple[int, int, Mapping[str, float]]] = []
    total: dict[str, float] = {}
    gather = False
    for index, extent, stride in zip(indices, buffer.shape, buffer.strides, strict=True):
        along: dict[str, float] = {}
        size, step = hint(extent), hint(stride)
        if isinstance(index, sympy.Expr):
            for axis, factor in steps(index, sizes).items():
                for loop, by in bound.get(axis, {}).items():
                    along[loop.name] = along.get(loop.name, 0.0) + factor * by
        else:
            gather = True
            moving = {
                s
                for e in walk(index)
                if isinstance(e, Load)
                for i in e.indices
                if isinstance(i, sympy.Expr)
                for s in i.free_symbols
            }
            for axis in moving:  # anywhere in the dimension, and elsewhere in each iteration
                along.update((loop.name, size / 2 + 1) for loop in bound.get(axis, {}))
        for loop, by in along.items():
            total[loop] = total.get(loop, 0.0) + by * step
        dims.append((max(size, 1), step, along))
    return Reference(buffer.name, buffer.dtype.itemsize, is_write, gather, tuple(dims), total)


@lru_cache(maxsize=1 << 14)
def steps(expr: sympy.Expr, sizes: Sizes) -> Steps:
    """How far an index moves with each of its variables, on average where it is not linear in them."""
    if expr.is_Symbol:
        return {} if any(s == expr for s, _ in sizes) else {expr: 1.0}
    if expr.is_number:
        return {}
    if expr.is_Add:
        found: Steps = {}
        for part in expr.args:
            for s, by in steps(part, sizes).items():
                found[s] = found.get(s, 0.0) + by
        return found
    if expr.is_Mul:
        factor, moving = 1.0, Steps()
        for part in expr.args:
            inner = steps(part, sizes)
            if inner:
                moving.update(inner)
            else:
                factor *= _number(part, sizes)
        return {s: by * factor for s, by in moving.items()}
    if isinstance(expr, (FloorDiv, CeilDiv, CleanDiv)):
        by = max(_number(expr.args[1], sizes), 1.0)
        return {s: step / by for s, step in steps(expr.args[0], sizes).items()}
    if isinstance(expr, ModularIndexing):
        by = max(_number(expr.args[1], sizes), 1.0)
        return {s: step / by for s, step in steps(expr.args[0], sizes).items()}
    if isinstance(expr, (Mod, PythonMod)):
        return dict(steps(expr.args[0], sizes))
    known = {s for s, _ in sizes}
    return {s: 1.0 for s in sorted(expr.free_symbols - known, key=lambda s: s.name)}


def _number(expr: sympy.Expr, sizes: Sizes) -> float:
    value = expr.xreplace({s: sympy.Integer(n) for s, n in sizes})
    return float(value) if value.is_number else 1.0


def elements(reference: Reference, extents: Mapping[str, int], loops: Iterable[str]) -> float:
    """How many different elements an access meets in some loops."""
    chosen = [lp for lp in loops if lp in extents]
    return math.prod(_span(d, extents, chosen) for d in reference.dims)


def _span(dim: tuple[int, int, Mapping[str, float]], extents: Mapping[str, int], loops: Sequence[str]) -> float:
    extent, _, along = dim
    reached = 1.0 + sum(abs(along[lp]) * (extents[lp] - 1) for lp in loops if lp in along and extents[lp] > 0)
    steps_ = math.prod(extents[lp] for lp in loops if lp in along)
    return max(min(float(extent), reached, float(max(steps_, 1)) if along else 1.0), 1.0)


def lines(reference: Reference, extents: Mapping[str, int], loops: Iterable[str]) -> float:
    """How many cache lines an access meets in some loops."""
    chosen = [lp for lp in loops if lp in extents]
    total, dense = 1.0, float(reference.itemsize)
    for dim in sorted(reference.dims, key=lambda d: d[1]):
        span = _span(dim, extents, chosen)
        if dim[1] * reference.itemsize <= dense:  # goes on where the dimensions inside end
            dense = max(dense, dim[1] * reference.itemsize * span)
        elif dim[1] * reference.itemsize < LINE and span > 1:
            dense = dim[1] * reference.itemsize * span
        else:
            total *= span
    return total * max(math.ceil(dense / LINE), 1)


@lru_cache(maxsize=4096)
def _operations(body: tuple[object, ...]) -> Mapping[str, float]:
    """Operations of one iteration by class, in units of a plain one."""
    found = dict.fromkeys(CLASSES, 0.0)
    for s in body:
        is_update = isinstance(s, Update)
        for v in s.values if is_update else (s.value,):  # type: ignore[attr-defined]
            for e in walk(v):
                kind, by = _class(e)
                if kind:
                    found[kind] += by
        if is_update:
            name = s.monoid.name  # type: ignore[attr-defined]
            heavy = name in HEAVY_MONOIDS
            found["functions" if heavy else "plain"] += HEAVY if heavy else float(len(s.values))  # type: ignore[attr-defined]
    return found


def _class(e: Expr) -> tuple[str, float]:
    if isinstance(e, Select):
        return "compared", 1.0
    if isinstance(e, Cast):
        return "casts", 1.0
    if not isinstance(e, Call):
        return "", 0.0
    flops = float(OPS[e.fn].flops)
    if e.fn in _COMPARED:
        return "compared", flops
    if e.dtype.is_int:
        return "integers", flops
    if e.fn in _PLAIN:
        return "plain", flops
    return ("divisions" if e.fn in _DIVISIONS else "functions" if e.fn in _FUNCTIONS else "rare"), flops
