"""Random small tensor functions and arguments for them: what kernels are made of, in all its odd forms.

Values are small whole numbers, clamped where they would grow, so that sums are exact in any order and answers compare
exactly; what is rounded (Welford, log-sum-exp) is marked, and nothing discontinuous is asked of it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from torch_mlc.ir.expr import monoid as monoids
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import Monoid
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer, LoopNest
from torch_mlc.ir.oracle.oracle import size
from torch_mlc.scheduler.functions.lower import lower_to_loops

Array: TypeAlias = "np.ndarray[Any, Any]"
F32, I64 = DType.FLOAT32, DType.INT64
INPUT_TYPES = (F32, F32, F32, F32, DType.BFLOAT16, DType.FLOAT16, DType.INT32, DType.BOOL)
OUTPUT_TYPES = (F32, F32, F32, DType.BFLOAT16, DType.FLOAT64, DType.INT32)
# Points of the domain at most, and of the tables that gathers look into.
POINTS, TABLE = 60, 5
LIMIT = 8.0


@dataclass(frozen=True, slots=True)
class Program:
    """A tensor function, its nest as lowered, and the sizes at which it is run."""

    seed: int
    function: TensorFunction
    nest: LoopNest
    sizes: tuple[Mapping[str, int], ...]
    # Below this every index that a gather reads stays in range.
    table: int = TABLE
    indices: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Value:
    """A result of a stage: where it is defined, and whether it is exact."""

    name: str
    axes: tuple[sympy.Symbol, ...]
    dtype: DType
    exact: bool
    # False for what may be infinite: a reduction over nothing.
    finite: bool = True
    read: bool = False


@dataclass(slots=True)
class _Maker:
    rng: random.Random
    dims: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    sizes: list[Size] = field(default_factory=list)
    inputs: list[Buffer] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)
    values: list[_Value] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    # --- dimensions ---------------------------------------------------------------------------------------------------

    def extent(self) -> sympy.Expr:
        if self.rng.random() < 0.3 and len(self.sizes) < 2:
            divisor = self.rng.choice((1, 1, 1, 2, 4))
            lower = self.rng.choice((0, 1, 2)) if divisor == 1 else divisor
            name = symbol(f"s{len(self.sizes)}")
            self.sizes.append(Size(name, lower, self.rng.choice((None, 16)), divisor, self.rng.choice((4, 8))))
            return name
        return sympy.Integer(self.rng.choice((1, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 12, 16, 17)))

    def group(self, prefix: str, count: int) -> tuple[Dim, ...]:
        made = []
        for k in range(count):
            var = symbol(f"{prefix}{k}")
            self.dims[var] = self.extent()
            made.append(Dim(var, self.dims[var]))
        return tuple(made)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def buffer(self, shape: list[sympy.Expr], dtype: DType) -> Buffer:
        """An input of that shape: contiguous, transposed, padded or with gaps."""
        order = list(range(len(shape)))
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        strides: list[sympy.Expr] = [sympy.S.One] * len(shape)
        step: sympy.Expr = sympy.Integer(2 if self.rng.random() < 0.1 else 1)
        for d in reversed(order):
            strides[d] = step
            pad = self.rng.choice((1, 3)) if self.rng.random() < 0.15 else 0
            step = sympy.expand(step * (shape[d] + pad))
        b = Buffer(f"in{len(self.inputs)}", tuple(shape), tuple(strides), dtype, align=self.rng.choice((0, 16)))
        self.inputs.append(b)
        return b

    def load(self, axes: tuple[sympy.Symbol, ...]) -> Expr:
        """An input read at some of the axes, as float32."""
        rng = self.rng
        some = [a for a in axes if rng.random() < 0.8]
        if rng.random() < 0.3:
            rng.shuffle(some)
        dtype = rng.choice(INPUT_TYPES)
        shape: list[sympy.Expr] = []
        indices: list[Any] = []
        guards: list[Expr] = []
        while some:
            a = some.pop(0)
            n, kind = self.dims[a], rng.random()
            if kind < 0.08 and some:  # two dimensions seen as one, or as one and cut otherwise
                b = some.pop(0)
                m = self.dims[b]
                flat, total = sympy.expand(a * m + b), sympy.expand(n * m)
                cut = next((c for c in (2, 3, 4) if total.is_Integer and int(total) % c == 0), None)
                if cut is not None and rng.random() < 0.5:
                    shape += [total / cut, sympy.Integer(cut)]
                    indices += [FloorDiv(flat, cut), ModularIndexing(flat, 1, cut)]
                else:
                    shape.append(total)
                    indices.append(flat)
            elif kind < 0.16:  # shifted
                c = rng.choice((1, 2))
                shape.append(n + c)
                indices.append(a + c)
            elif kind < 0.22:  # flipped
                shape.append(n)
                indices.append(sympy.expand(n - 1 - a))
            elif kind < 0.27:  # every second
                shape.append(2 * n)
                indices.append(2 * a + rng.choice((0, 1)))
            elif kind < 0.33:  # padded on the left
                c = rng.choice((1, 2))
                guards.append(call("ge", IndexValue(a, I64), const(c, I64)))
                shape.append(n)
                indices.append(a - c)
            elif kind < 0.40:  # looked up
                table = self.buffer([n], rng.choice((I64, DType.INT32)))
                self.gathered.add(table.name)
                shape.append(sympy.Integer(TABLE))
                indices.append(Load(table.name, (a,), table.dtype))
            else:
                shape.append(n)
                indices.append(a)
        b = self.buffer(shape, dtype)
        value = cast(Load(b.name, tuple(indices), dtype), F32)
        for g in guards:
            value = Select(g, value, const(float(rng.choice((0, 1))), F32))
        return value

    # --- expressions --------------------------------------------------------------------------------------------------

    def leaf(self, axes: tuple[sympy.Symbol, ...]) -> tuple[Expr, bool]:
        rng = self.rng
        known = [v for v in self.values if set(v.axes) <= set(axes)]
        if known and rng.random() < 0.55:
            v = rng.choice(known)
            v.read = True
            return self.bounded(cast(Load(v.name, v.axes, v.dtype), F32)), v.exact
        kind = rng.random()
        if kind < 0.1:
            return const(float(rng.randint(-2, 2)), F32), True
        if kind < 0.2 and axes:
            return self.bounded(cast(IndexValue(rng.choice(axes), I64), F32)), True
        return self.load(axes), True

    def bounded(self, e: Expr) -> Expr:
        return call("maximum", call("minimum", e, const(LIMIT, F32)), const(-LIMIT, F32))

    def expression(self, axes: tuple[sympy.Symbol, ...], depth: int) -> tuple[Expr, bool]:
        rng = self.rng
        if depth == 0 or rng.random() < 0.15:
            return self.leaf(axes)
        a, exact_a = self.expression(axes, depth - 1)
        kind = rng.random()
        if kind < 0.12:
            return call(rng.choice(("neg", "abs")), a), exact_a
        b, exact_b = self.expression(axes, depth - 1)
        exact = exact_a and exact_b
        if kind < 0.22 and exact:
            condition = call(rng.choice(("lt", "ge", "eq")), a, b)
            return Select(condition, *(self.expression(axes, depth - 1)[0] for _ in range(2))), False
        if kind < 0.35:
            return call(rng.choice(("maximum", "minimum")), a, b), exact
        if kind < 0.65:
            return self.bounded(call("mul", a, b)), exact
        return self.bounded(call(rng.choice(("add", "sub")), a, b)), exact

    def exact(self, axes: tuple[sympy.Symbol, ...], depth: int) -> Expr:
        """An expression without rounding."""
        for _ in range(20):
            e, exact = self.expression(axes, depth)
            if exact:
                return e
        return const(1.0, F32)

    # --- stages -------------------------------------------------------------------------------------------------------

    def add(
        self, axes: tuple[sympy.Symbol, ...], dtypes: tuple[DType, ...], exact: bool, finite: bool
    ) -> tuple[str, ...]:
        made = tuple(f"t{len(self.values) + k}" for k in range(len(dtypes)))
        self.values += [_Value(n, axes, d, exact, finite) for n, d in zip(made, dtypes, strict=True)]
        return made

    def pointwise(self, axes: tuple[sympy.Symbol, ...], inner: bool, own: bool) -> None:
        value, exact = self.expression(axes, self.rng.choice((1, 1, 2)))
        names = self.add(axes, (F32,), exact, True)
        self.stages.append(Stage(names, (value,), inner, axes=axes if own else None))

    def reduction(self, kept: tuple[sympy.Symbol, ...], over: tuple[sympy.Symbol, ...], own: bool) -> None:
        axes = tuple(v for v in self.dims if v in (*kept, *over))
        which: Monoid = self.rng.choice(
            (monoids.SUM, monoids.SUM, monoids.SUM, monoids.MAX, monoids.MIN, monoids.ARGMAX, monoids.ARGMIN,
             monoids.WELFORD, monoids.LOGSUMEXP, monoids.ANY, monoids.ALL)
        )  # fmt: skip
        exact = which not in (monoids.WELFORD, monoids.LOGSUMEXP)
        depth = self.rng.choice((0, 1, 1, 2))
        if which in (monoids.SUM, monoids.MAX, monoids.MIN):
            value, exact = self.expression(axes, depth)
            values: tuple[Expr, ...] = (value,)
        elif which in (monoids.ANY, monoids.ALL):
            values = (call("gt", self.exact(axes, depth), const(0.0, F32)),)
        elif which in (monoids.ARGMAX, monoids.ARGMIN):
            flat: sympy.Expr = sympy.S.Zero
            for v in over:
                flat = flat * self.dims[v] + v
            values = (self.exact(axes, depth), IndexValue(sympy.expand(flat), I64))
        else:
            values = which.lift(self.expression(axes, depth)[0])
        names = self.add(kept, tuple(v.dtype for v in values), exact, False)
        self.stages.append(Stage(names, values, False, which, axes=kept if own else None, over=over if own else None))

    def outputs(self) -> tuple[Output, ...]:
        made: list[Output] = []
        kept = [v for v in self.values if not v.read or self.rng.random() < 0.25]
        for v in kept:
            dtype = v.dtype if v.dtype is not F32 or self.rng.random() < 0.6 else self.rng.choice(OUTPUT_TYPES)
            if v.dtype is F32 and not (v.exact and v.finite) and not dtype.is_float:
                dtype = F32
            order = list(v.axes)
            if self.rng.random() < 0.25:
                self.rng.shuffle(order)
            source = self.buffer([self.dims[a] for a in order], dtype)
            self.inputs.pop()
            b = Buffer(f"out{len(made)}", source.shape, source.strides, dtype, align=source.align)
            made.append(Output(b, v.name, tuple(order)))
        return tuple(made)


def make_program(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    while True:
        maker = _Maker(rng)
        program = _program(maker, seed)
        if program is not None:
            return program


def _program(m: _Maker, seed: int) -> Program | None:
    rng = m.rng
    rows = m.group("i", rng.choice((0, 1, 1, 1, 2, 2)))
    reduces = rng.random() < 0.7
    inner = m.group("r", rng.choice((1, 1, 1, 2)) if reduces or not rows else rng.choice((0, 1)))
    extra = m.group("x", 1) if rng.random() < 0.2 else ()
    row_axes, inner_axes = tuple(d.var for d in rows), tuple(d.var for d in inner)
    extra_axes = tuple(d.var for d in extra)
    sizes = _sizes(m)
    if max(_volume(m, s) for s in sizes) > POINTS:
        return None
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        kind = rng.random()
        if not reduces or kind < 0.4:
            m.pointwise((*row_axes, *inner_axes), True, False)
        elif kind < 0.5 and row_axes:
            m.pointwise(row_axes, False, False)
        elif kind < 0.6 and row_axes:
            m.reduction(inner_axes, row_axes, True)  # columns
        elif kind < 0.7 and extra_axes:
            m.reduction((*row_axes, *extra_axes), inner_axes, True)
        elif kind < 0.75 and extra_axes:
            m.reduction((*row_axes, *inner_axes), extra_axes, True)
        else:
            m.reduction(row_axes, inner_axes, False)
    table = SymbolTable(tuple(m.sizes))
    outputs = m.outputs()
    function = TensorFunction("f", rows, inner, tuple(m.inputs), outputs, tuple(m.stages), table, extra)
    return Program(seed, function, lower_to_loops(function), sizes, indices=frozenset(m.gathered))


def _sizes(m: _Maker) -> tuple[Mapping[str, int], ...]:
    """Two or three values of every size: the least, and some that divide nothing, within what is promised."""
    if not m.sizes:
        return ({},)
    found = []
    for base in (0, 3, 5):
        at = {}
        for k, s in enumerate(m.sizes):
            n = max(s.lower, -(-(base + 2 * k) // s.divisor) * s.divisor)
            at[s.symbol.name] = n if s.upper is None else min(n, s.upper // s.divisor * s.divisor)
        if at not in found:
            found.append(at)
    return tuple(found)


def _volume(m: _Maker, sizes: Mapping[str, int]) -> int:
    total = 1
    for e in m.dims.values():
        total *= max(size(e, sizes), 1)
    return total


# --- arguments --------------------------------------------------------------------------------------------------------


def arguments(program: Program, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Small whole numbers for every input; the same for the same program and sizes."""
    rng = np.random.default_rng(program.seed)
    found: dict[str, Array] = {}
    for b in program.nest.params:
        if b.name in program.nest.outputs:
            continue
        shape = tuple(size(e, sizes) for e in b.shape)
        if b.dtype is DType.BOOL:
            found[b.name] = rng.random(shape) < 0.5
        elif b.name in program.indices:
            found[b.name] = rng.integers(0, program.table, shape).astype(b.dtype.numpy)
        else:
            found[b.name] = rng.integers(-3, 4, shape).astype(np.float32).astype(b.dtype.numpy)
    return found


def compare(nest: LoopNest, found: Mapping[str, Array], wanted: Mapping[str, Array], exact: bool = False) -> None:
    """Answers are equal to rounding, and NaN nowhere but where the oracle has it. Raises AssertionError."""
    for name in nest.outputs:
        kind = nest.buffer(name).dtype
        a, b = np.asarray(found[name]), np.asarray(wanted[name])
        assert a.shape == b.shape, (name, a.shape, b.shape)
        if not kind.is_float or exact:
            np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64), err_msg=name)
            continue
        bound = 2e-2 if kind.is_half else 1e-4
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=bound, atol=bound, err_msg=name)
