"""The rules of tensor functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import sympy

from ..expr.symbols import Interval
from ..expr.value import is_value, loads, symbol
from ..function.function import Stage, TensorFunction
from .expr import AccessShape, Fault, access, expression, index_symbols
from .roles import roles_hold


def names_are_unique(function: TensorFunction) -> Iterator[Fault]:
    """Parameters, results and dimensions each have a name of their own."""
    owners: list[tuple[str, object]] = [(b.name, b) for b in function.params]
    owners += [(r, s) for s in function.stages for r in s.results]
    owners += [(d.var.name, d) for d in function.dims]
    owners += [(s.symbol.name, s) for s in function.symbols.sizes]
    for name, count in Counter(name for name, _ in owners).items():
        if count > 1:
            yield Fault([o for n, o in owners if n == name][-1], f"{count} things are called {name!r}")


def dimensions_are_known(function: TensorFunction) -> Iterator[Fault]:
    """Extents, shapes and strides speak of sizes; axes and what is combined over are dimensions, each once."""
    sizes = set(function.symbols.symbols)
    for d in function.dims:
        yield from index_symbols(d, d.extent, sizes)
        if symbol(d.var.name) != d.var:
            yield Fault(d, f"{d.var} is not ir.expr.value.symbol({d.var.name!r})", "make symbols with it")
    for b in function.params:
        for e in (*b.shape, *b.strides):
            yield from index_symbols(b, e, sizes)
        if len(b.shape) != len(b.strides):
            yield Fault(b, f"{b.name} has {len(b.shape)} dimensions and {len(b.strides)} strides")
    known = {d.var for d in function.dims}
    for stage in function.stages:
        own = (*(stage.axes or ()), *(stage.over or ()))
        for v in own:
            if v not in known:
                told = ", ".join(d.var.name for d in function.dims) or "none"
                yield Fault(stage, f"{v} is no dimension of the function; they are {told}")
        for v, count in Counter(own).items():
            if count > 1:
                yield Fault(stage, f"{v} is {count} times among its axes and what it combines over")


def stages_fit(function: TensorFunction) -> Iterator[Fault]:
    """Values and results are as many as the kind of a stage has."""
    for stage in function.stages:
        if stage.into:
            yield from _scatter_fits(function, stage)
            continue
        wanted = 1 if stage.monoid is None else len(stage.monoid.components)
        if not len(stage.results) == len(stage.values) == wanted:
            what = "a stage without a monoid" if stage.monoid is None else stage.monoid.name
            yield Fault(stage, f"{what} has {wanted} values and results, here {len(stage.values)} and "
                               f"{len(stage.results)}")  # fmt: skip
        if stage.over is not None and (stage.monoid is None or stage.scan):
            yield Fault(stage, "only a reduction combines over dimensions", "leave out what it combines over")
        if stage.scan and (stage.monoid is None or stage.axes is not None):
            says = "a scan goes along the inner dimensions by a monoid, at points"
            yield Fault(stage, says, "scan(monoid, points, (values,))")
        if stage.scan and not function.inner:
            yield Fault(
                stage, "a scan of a function without inner dimensions", "make the dimension it goes along inner"
            )


def _scatter_fits(function: TensorFunction, stage: Stage) -> Iterator[Fault]:
    before = function.stages[: _place(function, stage)]
    if stage.into not in {r for s in before for r in s.results}:
        yield Fault(stage, f"no stage above makes {stage.into!r}", "begin the result before it is scattered into")
    buffers = [o.buffer for o in function.outputs if o.result == stage.into]
    if len(buffers) != 1:
        yield Fault(stage, f"{stage.into!r} leaves the function {len(buffers)} times, and has to once")
    elif len(stage.values) != 1 + len(buffers[0].shape):
        rank, given = len(buffers[0].shape), len(stage.values) - 1
        yield Fault(stage, f"{given} places for {buffers[0].name} of {rank} dimensions")
    for place in stage.values[1:]:
        if not place.dtype.is_int:
            yield Fault(place, f"a place is an integer, not {place.dtype.value}", "cast it")
    if stage.results or stage.axes is None or stage.over is not None or stage.scan:
        yield Fault(stage, "a scatter has axes of its own, and no result", "scatter(monoid, result, [axes], …)")
    if stage.monoid is not None and len(stage.monoid.components) != 1:
        count = len(stage.monoid.components)
        yield Fault(stage, f"{stage.monoid.name} has {count} components; a scatter combines one")


def values_are_sound(function: TensorFunction) -> Iterator[Fault]:
    """Types, ranks and ranges inside the stages; loads are of inputs and of results above."""
    shapes = {b.name: AccessShape(b.dtype, b.shape) for b in function.inputs}
    sizes, known = set(function.symbols.symbols), {d.var for d in function.dims}
    scattered = {s.into for s in function.stages if s.into}
    for stage in function.stages:
        if not {*(stage.axes or ()), *(stage.over or ())} <= known:
            continue  # told of already
        over = function.over_of(stage)
        axes = function.axes_of(stage)
        dims = (*axes, *over)
        ranges: dict[sympy.Symbol, Interval] = {}
        # An empty domain reaches nothing, so nothing in it is out of range.
        if not any(d.extent.is_zero for d in dims):
            ranges = {d.var: (0, int(d.extent) - 1 if d.extent.is_Integer else None) for d in dims}
        for value in stage.values:
            yield from expression(value, shapes, sizes | {d.var for d in dims}, ranges)
            for ld in loads(value):
                if ld.buffer in scattered:
                    yield Fault(ld, f"{ld.buffer} is read, and written where data say", "read it in another function")
        shape = tuple(d.extent for d in axes)
        shapes.update({r: AccessShape(v.dtype, shape) for r, v in zip(stage.results, stage.values)})


def outputs_fit(function: TensorFunction) -> Iterator[Fault]:
    """Outputs are results at places in their buffers; a buffer takes one, and one with an input's name is that."""
    makers = {r: s for s in function.stages for r in s.results}
    inputs = {b.name: b for b in function.inputs}
    sizes, known = set(function.symbols.symbols), {d.var for d in function.dims}
    taken: set[str] = set()
    for o in function.outputs:
        if o.buffer.name in taken:
            yield Fault(o, f"two results go to {o.buffer.name}")
        taken.add(o.buffer.name)
        if inputs.get(o.buffer.name, o.buffer) != o.buffer:
            yield Fault(o.buffer, f"{o.buffer.name} is the name of an input that is not the same")
        maker = makers.get(o.result)
        if maker is None:
            yield Fault(o, f"no stage makes {o.result!r}; there are {', '.join(makers) or 'none'}")
            continue
        if not {*(maker.axes or ())} <= known:
            continue
        dims = function.axes_of(maker)
        ranges = {d.var: (0, int(d.extent) - 1 if d.extent.is_Integer else None) for d in dims}
        shapes = {o.buffer.name: AccessShape(o.buffer.dtype, o.buffer.shape)}
        ranges = {} if any(d.extent.is_zero for d in dims) else ranges
        yield from access(o, o.buffer.name, o.indices, shapes, sizes | {d.var for d in dims}, ranges)
        if any(map(is_value, o.indices)):
            yield Fault(o, "data decide where an output goes", "scatter into it")


def nothing_is_read_after_it_is_written(function: TensorFunction) -> Iterator[Fault]:
    """What goes over an input is there once a row, and is made of no element but the one whose place it takes."""
    inputs = {b.name for b in function.inputs}
    makers = {r: s for s in function.stages for r in s.results}
    for o in function.outputs:
        if o.buffer.name not in inputs or o.result not in makers:
            continue
        maker = makers[o.result]
        if maker.axes is not None or (function.inner and function.axes_of(maker) != function.rows):
            yield Fault(o, f"{o.result} is no result of a row, and goes over the input {o.buffer.name}",
                        "make its dimensions rows, or let it go to a buffer of its own")  # fmt: skip
        for ld in (ld for s in function.stages for v in s.values for ld in loads(v)):
            if ld.buffer == o.buffer.name and ld.indices != o.indices:
                says = f"{ld.buffer} is read where another point may have written"
                yield Fault(ld, says, "read it only at the element that is written")


def tables_fit(function: TensorFunction) -> Iterator[Fault]:
    """What does the work of several calls writes where its dimensions say."""
    if function.table and function.scatters:
        yield Fault(function, "a function over a table scatters", "call it once for each")


def _place(function: TensorFunction, stage: Stage) -> int:
    return next(k for k, s in enumerate(function.stages) if s is stage)


FUNCTION_RULES: tuple[Callable[[TensorFunction], Iterator[Fault]], ...] = (
    names_are_unique,
    dimensions_are_known,
    stages_fit,
    values_are_sound,
    outputs_fit,
    nothing_is_read_after_it_is_written,
    tables_fit,
    roles_hold,
)
