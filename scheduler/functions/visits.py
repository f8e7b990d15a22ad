"""A function whose elements wait for its reductions, as two: the first visit of the elements, and the others.

A kernel goes over elements again for that. Where its programs are too few, as those of columns are, two kernels read
just as much and may each have the programs that they want.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import sympy

from ...ir.expr.value import Expr, Load, rewrite
from ...ir.expr.value import loads as _loads
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.graph.graph import CallTensor, TensorType
from ...ir.nest.loops import PARAM_ALIGN, Buffer, contiguous_strides

# What the names of functions of later visits end with.
AGAIN = "_again"


@dataclass(frozen=True, slots=True)
class VisitHalves:
    """``first`` has the results of the whole whose places are ``leading``, and behind them those of rows that ``rest``
    reads. That reads inputs of the whole, whose places are ``taken``, then ``results`` of ``first``."""

    first: TensorFunction
    rest: TensorFunction
    leading: tuple[int, ...]
    taken: tuple[int, ...]
    results: tuple[int, ...]

    def calls(self, call: CallTensor) -> tuple[CallTensor, CallTensor]:
        """A call of the whole as calls of the two."""
        symbols = dict(zip(self.first.symbols.symbols, call.sizes, strict=True))
        names, types = list(call.names), list(call.types)
        depth = self.rest.name.count(AGAIN)  # of visits of visits, or two would have one name
        ours = [names[k] for k in self.leading]
        kinds = [types[k] for k in self.leading]
        for o in self.first.outputs[len(ours) :]:
            ours.append(f"{names[0]}_row{depth}_{len(ours)}")
            shape, strides = (tuple(e.xreplace(symbols) for e in of) for of in (o.buffer.shape, o.buffer.strides))
            kinds.append(TensorType(shape, strides, o.buffer.dtype, types[0].device))
        last = [k for k in range(len(names)) if k not in self.leading]
        first = replace(call, names=tuple(ours), types=tuple(kinds), function=self.first.name)
        rest = replace(
            call, names=tuple(names[k] for k in last), types=tuple(types[k] for k in last), function=self.rest.name,
            args=(*(call.args[k] for k in self.taken), *(ours[k] for k in self.results)),
        )  # fmt: skip
        return first, rest


def in_visits(function: TensorFunction) -> VisitHalves | None:
    """The function as the first visit of its elements and the others; None where one visit makes everything.

    Reductions are over all inner dimensions.
    """
    early = _early(function)
    if len(early) == len(function.stages):
        return None
    here = {r for s in early for r in s.results}
    of_rows = {r for s in early if not s.inner or s.monoid is not None for r in s.results}
    late = _with_elements(function, here, of_rows)
    needed = dict.fromkeys(ld.buffer for s in late for v in s.values for ld in _loads(v) if ld.buffer in of_rows)
    leading = tuple(k for k, o in enumerate(function.outputs) if o.result in here)
    outputs = [replace(o, buffer=replace(o.buffer, name=f"out{k}")) for k, o in
               enumerate(function.outputs[k] for k in leading)]  # fmt: skip
    shape, where = tuple(d.extent for d in function.rows), tuple(d.var for d in function.rows)
    kinds = {r: v.dtype for s in early for r, v in zip(s.results, s.values, strict=True)}
    for result in needed:
        buffer = Buffer(f"out{len(outputs)}", shape, contiguous_strides(shape), kinds[result], align=PARAM_ALIGN)
        outputs.append(Output(buffer, result, where))
    first = replace(function, outputs=tuple(outputs), stages=early)
    added = tuple(range(len(leading), len(outputs)))
    given = dict(zip(needed, (outputs[k].buffer for k in added), strict=True))
    rest, taken = _rest(function, late, given, here)
    return VisitHalves(first, rest, leading, taken, added)


def _early(function: TensorFunction) -> tuple[Stage, ...]:
    """The stages that the first visit makes: nothing with elements that waits for a reduction."""
    reduced: set[str] = set()
    late: set[str] = set()
    early: list[Stage] = []
    for s in function.stages:
        read = {ld.buffer for v in s.values for ld in _loads(v)}
        if read & late or (s.inner and read & reduced):
            late |= {*s.results}
            continue
        early.append(s)
        if s.monoid is not None or read & reduced:
            reduced |= {*s.results}
    return tuple(early)


def _with_elements(function: TensorFunction, here: Collection[str], of_rows: Collection[str]) -> tuple[Stage, ...]:
    """The stages that are not ``here``, and those with elements that they read, which are made again."""
    wanted: set[str] = set()
    chosen: list[Stage] = []
    for s in reversed(function.stages):
        if not wanted.isdisjoint(s.results) or not set(s.results) <= set(here):
            chosen.append(s)
            wanted |= {ld.buffer for v in s.values for ld in _loads(v)} - set(of_rows)
    return tuple(reversed(chosen))


def _rest(
    function: TensorFunction, late: tuple[Stage, ...], given: dict[str, Buffer], here: Collection[str]
) -> tuple[TensorFunction, tuple[int, ...]]:
    """The function of the late stages; the places of the inputs that it takes."""
    read = {ld.buffer for s in late for v in s.values for ld in _loads(v)}
    taken = tuple(k for k, b in enumerate(function.inputs) if b.name in read)
    inputs = [replace(function.inputs[k], name=f"in{j}") for j, k in enumerate(taken)]
    names = {function.inputs[k].name: f"in{j}" for j, k in enumerate(taken)}
    for result, buffer in given.items():
        names[result] = f"in{len(inputs)}"
        inputs.append(replace(buffer, name=names[result]))
    rows, inner = function.rows, function.inner
    ours = [o for o in function.outputs if o.result not in here]
    if not any(s.monoid is not None for s in late):
        rows, inner = _by_memory(function, ours[0]), ()  # without reductions all dimensions are rows
    points: tuple[sympy.Expr, ...] = tuple(d.var for d in (*rows, *inner))
    made = {r for s in late if s.inner and s.monoid is None for r in s.results}

    def leaf(e: Expr) -> Expr | None:
        if not isinstance(e, Load):
            return None
        return Load(names.get(e.buffer, e.buffer), points if e.buffer in made else e.indices, e.dtype)

    stages = tuple(replace(s, values=tuple(rewrite(v, leaf) for v in s.values)) for s in late)
    outputs = tuple(replace(o, buffer=replace(o.buffer, name=f"out{k}")) for k, o in enumerate(ours))
    name = f"{function.name}{AGAIN}"
    return replace(
        function, name=name, rows=rows, inner=inner, inputs=tuple(inputs), outputs=outputs, stages=stages
    ), taken


def _by_memory(function: TensorFunction, output: Output) -> tuple[Dim, ...]:
    """The dimensions of the elements, those outermost that are outermost in the memory of a result."""
    place = sympy.expand(sympy.Add(*(i * s for i, s in zip(output.indices, output.buffer.strides, strict=True))))
    return tuple(
        sorted((*function.inner, *function.rows), key=lambda d: -abs(function.symbols.hint(place.coeff(d.var))))
    )
