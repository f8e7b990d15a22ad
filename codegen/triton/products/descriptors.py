"""Tiles that the tensor memory accelerator copies: descriptors of arrays, made once a program, and loads through them.

The hint ``DESCRIPTOR`` of a nest lets the operands of matrix products be read so. A load qualifies where
two of the array's dimensions are crossed by the two axes of the operand's tile, one element a lane, and the others
stand still; rows start at multiples of 16 bytes; and what the tile has beyond the array, which is read as zeros, is
what the block does not want either. Other loads stay as they are.
Source: the tensor maps of CUDA's driver interface; Triton's ``make_tensor_descriptor``.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ....ir.expr.index import simplify
from ....ir.expr.value import Index, Load, is_value, loads
from ....ir.nest.hints import DESCRIPTOR, TRANSPOSED
from ....ir.nest.loops import Buffer, Scope, Update
from ..program import BlockInfo, TritonProgram
from ..values import Values
from ..writer import SourceWriter, Value

# What the hardware takes: dimensions, elements of a tile along one, bytes to which rows are aligned.
MOST_DIMENSIONS, MOST_ELEMENTS, ROW_BYTES = 5, 256, 16


@dataclass(frozen=True, slots=True)
class Box:
    """What a load reads of an array: ``order`` of its dimensions, the contiguous one last, and in that order where the
    tile starts, how many elements it has, and the axis of the tile that crosses it, if any."""

    order: tuple[int, ...]
    origin: tuple[sympy.Expr, ...]
    extents: tuple[int, ...]
    axes: tuple[sympy.Symbol | None, ...]


class Descriptors:
    """The descriptors of a program, by array and shape of the tile."""

    def __init__(self, values: Values, out: SourceWriter) -> None:
        self.values = values
        self.out = out
        self._names: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}

    @property
    def buffers(self) -> tuple[str, ...]:
        """The arrays that are read through descriptors."""
        return tuple(dict.fromkeys(name for name, _, _ in self._names))

    def declare(self) -> None:
        """Write the descriptors that the blocks of the program use, ahead of all of them."""
        program = self.values.program
        for info in program.infos.values():
            for update in info.block.body if info.operands else ():
                assert isinstance(update, Update)
                found = [(side, ld) for v in update.values for ld in loads(v) for side in info.operands]
                for side, ld in found:
                    buffer = program.buffers[ld.buffer]
                    box = box_of(program, side, buffer, ld.indices)
                    if box is not None:
                        self._declare(buffer, box)

    def _declare(self, buffer: Buffer, box: Box) -> None:
        key = (buffer.name, box.order, box.extents)
        if key in self._names:
            return
        shape = ", ".join(self.values.index(buffer.shape[d]) for d in box.order)
        steps = ", ".join([*(self.values.index(buffer.strides[d]) for d in box.order[:-1]), "1"])
        block = ", ".join(map(str, box.extents))
        text = f"tl.make_tensor_descriptor({buffer.name}_ptr, [{shape}], [{steps}], [{block}])"
        self._names[key] = self.out.assign(f"{buffer.name}_map", text)

    def load(self, buffer: Buffer, expr: Load) -> Value | None:
        """The tile of a load, where there is a descriptor for it."""
        info, program = self.values.info, self.values.program
        if not self._names or info is None:
            return None
        box = box_of(program, info, buffer, expr.indices)
        name = None if box is None else self._names.get((buffer.name, box.order, box.extents))
        if box is None or name is None:
            return None
        key = ("load", buffer.name, box)
        known = self.out.known(key)
        if known is not None:
            return known  # type: ignore[return-value]
        own = [(a, n) for a, n in zip(box.axes, box.extents, strict=True) if a is not None]
        # As it lies in memory, by its place alone: for both orientations where the nest wants one load for them.
        lies = ("load", buffer.name, self.out.level, name, box.origin)
        text = str(self.out.known(lies) or "")
        if not text:
            at = ", ".join(self._position(e) for e in box.origin)
            text = f"{name}.load([{at}])"
            if len(own) < len(box.axes):
                text = f"tl.reshape({text}, [{', '.join(str(n) for _, n in own)}])"
            if TRANSPOSED.of(program.nest, buffer.name):
                text = self.out.assign(f"{buffer.name}_", text)
                self.out.remember(lies, text)
        if program.tile[own[0][0]][0] == 1:
            text = f"tl.trans({text})"
        value = Value(self.out.assign(f"{buffer.name}_", text), frozenset(a for a, _ in own), buffer.dtype)
        self.out.remember(key, value)
        return value

    def _position(self, origin: sympy.Expr) -> str:
        text = self.values.index(origin)
        return f"tl.cast({text}, tl.int32)" if self.values.program.wide and origin.free_symbols else text


def box_of(program: TritonProgram, info: BlockInfo, buffer: Buffer, indices: tuple[Index, ...]) -> Box | None:
    """What a load of an operand reads; None where a descriptor cannot say it."""
    if not DESCRIPTOR.of(program.nest, buffer.name) or buffer.scope is not Scope.GLOBAL:
        return None
    if buffer.name in program.nest.outputs or len(indices) > MOST_DIMENSIONS:
        return None
    positions = [
        sympy.expand(simplify(i.xreplace(info.axes), program.ranges.extents, program.nest.symbols))  # type: ignore[union-attr]
        for i in indices
        if not is_value(i)
    ]
    crossing = [p.free_symbols & program.tile.keys() for p in positions]
    if len(positions) != len(indices) or any(len(c) > 1 for c in crossing):
        return None
    axes = [next(iter(c), None) for c in crossing]
    origins = [p if a is None else sympy.expand(p - a) for p, a in zip(positions, axes, strict=True)]
    own = [a for a in axes if a is not None]
    if {program.tile[a][0] for a in own} != {0, 1} or len(own) != 2:
        return None
    if any(a in o.free_symbols for a, o in zip(axes, origins, strict=True) if a is not None):
        return None
    last = [d for d, (a, s) in enumerate(zip(axes, buffer.strides, strict=True)) if a is not None and s == 1]
    if len(last) != 1 or not _rows_are_aligned(program, buffer, last[0]):
        return None
    if not all(_ends_with_array(program, bound, positions, buffer) for bound in _inner_bounds(program, info)):
        return None
    order = (*(d for d in range(len(axes)) if d != last[0]), last[0])
    extents = tuple(1 if (a := axes[d]) is None else program.tile[a][1] for d in order)
    if max(extents) > MOST_ELEMENTS or extents[-1] * buffer.dtype.itemsize < ROW_BYTES:
        return None
    return Box(order, tuple(origins[d] for d in order), extents, tuple(axes[d] for d in order))


def _rows_are_aligned(program: TritonProgram, buffer: Buffer, last: int) -> bool:
    steps = [s * buffer.dtype.itemsize for d, s in enumerate(buffer.strides) if d != last]
    return all(s != 0 and program.nest.symbols.is_divisible(s, ROW_BYTES) for s in steps)


def _inner_bounds(program: TritonProgram, info: BlockInfo) -> list[tuple[sympy.Expr, sympy.Expr]]:
    """The bounds of the summed axis that some lane of some step may break: there operands have to be zero."""
    summed = info.reduced_tile | info.reduced_serial
    own = [(lhs, rhs) for lhs, rhs in info.bounds if (lhs.free_symbols | rhs.free_symbols) & summed]
    return [(lhs, rhs) for lhs, rhs in own if not program.ranges.below(lhs, rhs)]


def _ends_with_array(
    program: TritonProgram, bound: tuple[sympy.Expr, sympy.Expr], positions: list[sympy.Expr], buffer: Buffer
) -> bool:
    lhs, rhs = bound
    return any(sympy.expand(p - lhs) == 0 and e == rhs for p, e in zip(positions, buffer.shape, strict=True))
