"""Scans along an axis of the program's tile: the states of a tile at once by ``tl.associative_scan``, and a state for
each row that a loop over tiles carries from one to the next.

What is behind the last element of a row comes after all that is there, so lanes without an element spoil nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...ir.expr.dtypes import DType
from ...ir.nest.loops import AxisKind, Update
from ..kernel import EmitError
from .program import BlockInfo
from .reduce import Reductions
from .types import literal, type_text
from .values import Tile, Values
from .writer import Dims, SourceWriter, Value


@dataclass(frozen=True, slots=True)
class Carried:
    """The state up to the tile before, while a loop over tiles runs: a name a component, varying along ``dims``."""

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    dims: Dims


class Scans:
    """Emits the updates of blocks that scan."""

    def __init__(self, values: Values, writer: SourceWriter, reductions: Reductions) -> None:
        self.values = values
        self.out = writer
        self.reductions = reductions
        self.open: dict[str, Carried] = {}

    def starts(self, info: BlockInfo, var: sympy.Symbol) -> bool:
        """Whether this loop is the outermost along which the block scans."""
        return info.block.is_scan and var in _along(info) and info.block.name not in self.open

    def begin(self, info: BlockInfo) -> None:
        """Before the outermost loop of a scan: its state at the identity."""
        update = _update(info)
        dtypes = tuple(v.dtype.compute for v in update.values)
        dims = info.spatial - self._lanes(info)
        names = tuple(self.out.fresh("carry") for _ in dtypes)
        for name, start, dtype in zip(names, update.monoid.identity(dtypes), dtypes, strict=True):
            shape = self.values.shape(dims) if dims else "[]"
            self.out.line(f"{name} = tl.full({shape}, {literal(start.value)}, {type_text(dtype)})")
        self.open[info.block.name] = Carried(names, dtypes, dims)

    def end(self, info: BlockInfo) -> None:
        """After that loop."""
        del self.open[info.block.name]

    def step(self, info: BlockInfo, update: Update) -> None:
        """The states of one tile, under the names of the targets until ``leave``."""
        lanes = self._lanes(info)
        states = tuple(self.values.broadcast(self.reductions.state(v), info.spatial) for v in update.values)
        monoid = update.monoid
        if lanes:
            states = self._scanned(info, update, states, lanes)
        carried = self.open.get(info.block.name)
        if carried is not None:
            before = tuple(Value(n, carried.dims, d) for n, d in zip(carried.names, carried.dtypes, strict=True))
            combined = self.reductions.combined(monoid, before, states, monoid.after)
            states = tuple(self.values.broadcast(s, info.spatial) for s in combined)
            # The names of the loop's variables are about to mean the state after this tile.
            states = tuple(Value(self.out.assign("state", s.text), s.dims, s.dtype) for s in states)
            for name, state in zip(carried.names, states, strict=True):
                self.out.line(f"{name} = {self._last(state, lanes)}")
                self.out.forget_value(name)
        for target, state in zip(update.targets, states, strict=True):
            buffer = self.values.program.buffers[target.buffer]
            if state.dtype is not buffer.dtype:
                text = self.out.assign("v", self.values.program.types.cast(state.text, state.dtype, buffer.dtype))
                state = Value(text, state.dims, buffer.dtype)
            position = self.values.position(target.indices)
            self.values.tiles[target.buffer] = Tile(state, position, tuple(self.values.serial))
        self.values.enter(info)

    def leave(self, info: BlockInfo) -> None:
        """After the block: what the state is up to an element is known to the block alone."""
        for target in _update(info).targets:
            self.values.tiles.pop(target.buffer, None)

    def _lanes(self, info: BlockInfo) -> Dims:
        """The tile axis along which a block scans, if there is one."""
        lanes = self.values.program.dims(_along(info))
        if len(lanes) > 1:
            raise EmitError(
                f"block {info.block.name} scans along {len(lanes)} axes of the tile: fuse the loops, or leave all but "
                "the innermost one serial"
            )
        return lanes

    def _scanned(self, info: BlockInfo, update: Update, states: tuple[Value, ...], lanes: Dims) -> tuple[Value, ...]:
        (axis,) = lanes
        dim, _ = self.values.program.tile[axis]
        monoid = update.monoid
        fn = self.reductions.combine_function(monoid, tuple(s.dtype for s in states), monoid.after)
        names = tuple(self.out.fresh("scan") for _ in states)
        operand = states[0].text if len(states) == 1 else f"({', '.join(s.text for s in states)})"
        self.out.line(f"{', '.join(names)} = tl.associative_scan({operand}, {dim}, {fn})")
        return tuple(Value(n, info.spatial, s.dtype) for n, s in zip(names, states, strict=True))

    def _last(self, state: Value, lanes: Dims) -> str:
        """The state at the end of a tile: a sum in which every other lane is zero, of bits so that all stays as it
        is."""
        if not lanes:
            return state.text
        (axis,) = lanes
        dim, extent = self.values.program.tile[axis]
        kept = state.dims - lanes
        bits = _BITS.get(state.dtype)
        whole = state.text
        if state.dtype.is_float:
            whole = f"{whole}.to({type_text(bits)}, bitcast=True)" if bits is not None else whole
        elif bits is not None:
            whole = f"{whole}.to({type_text(bits)})"
        at_end = f"tl.where({axis.name} == {extent - 1}, {whole}, 0)"
        total = f"tl.sum({at_end}, {dim}, keep_dims=True)" if kept or self.values.program.rank > 1 else at_end
        if not kept:
            total = at_end
            for d in reversed(range(self.values.program.rank)):
                total = f"tl.sum({total}, {d})"
        if state.dtype.is_float and bits is not None:
            return f"{total}.to({type_text(state.dtype)}, bitcast=True)"
        return f"{total} != 0" if state.dtype is DType.BOOL else f"{total}.to({type_text(state.dtype)})"


# The integer type in which the last state of a tile is found: the bits of a float, the value of a small integer.
_BITS = {
    DType.FLOAT32: DType.INT32, DType.FLOAT64: DType.INT64, DType.BOOL: DType.INT32, DType.INT8: DType.INT32,
    DType.INT16: DType.INT32, DType.UINT8: DType.INT32, DType.UINT16: DType.INT32,
}  # fmt: skip


def _update(info: BlockInfo) -> Update:
    return next(s for s in info.block.body if isinstance(s, Update))


def _along(info: BlockInfo) -> set[sympy.Symbol]:
    """The symbols that make up the axes along which a block scans."""
    return {s for a in info.block.axes_of(AxisKind.SCAN) for s in info.axes[a.var].free_symbols}
