"""What follows a product, for a part of its columns at a time: registers then hold a part of what is made of a tile of
results, beside the results.

The hint ``COLUMN_PARTS`` of a nest asks for it. The columns of a tile are cut into parts of neighbours, the tiles of
products are dealt out to them, and the blocks that follow are written once for each part.
Source: the epilogues in sub-tiles of Triton's persistent matrix product, and of CUTLASS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import sympy

from ....ir.expr.value import symbol
from ....ir.nest.hints import COLUMN_PARTS
from ....ir.nest.loops import Block, Loop, Node, Update, walk_nodes
from ...kernel import EmitError
from ..program import BlockInfo, TritonProgram
from ..values import Tile, Values
from ..writer import SourceWriter, Value


class ColumnParts:
    """The parts of a program's columns; ``count`` is 1 where there are none."""

    def __init__(self, program: TritonProgram, values: Values, out: SourceWriter) -> None:
        """Raises EmitError where columns are no tile that has so many parts."""
        self.program = program
        self.values = values
        self.out = out
        self.count = COLUMN_PARTS.of(program.nest)
        if self.count == 1:
            return
        self._products = frozenset(name for name, info in program.infos.items() if info.operands)
        axes = {s for name in self._products for s in program.infos[name].spatial if program.tile[s][0] == 1}
        if len(axes) != 1 or program.tile[next(iter(axes))][1] % self.count:
            raise EmitError(
                f"columns have no {self.count} parts: the nest needs a block that is tensorized as a dot, with one "
                "tile axis of columns that they divide"
            )
        (self._whole,) = axes
        dim, extent = program.tile[self._whole]
        self._part = symbol(f"{self._whole.name}_part")
        program.tile[self._part] = dim, extent // self.count
        program.ranges.loop(self._part, sympy.Integer(extent // self.count))

    def following(self, nodes: Sequence[Node]) -> int:
        """How many of some nodes that stand in a row go before those that are written by parts."""
        if self.count == 1:
            return len(nodes)
        first = next((k for k in range(len(nodes)) if all(map(self._is_plain, nodes[k:]))), len(nodes))
        made = any(self._multiplies(node) for node in nodes[:first])
        return first if made else len(nodes)

    def write(self, nodes: Sequence[Node], block: Callable[[BlockInfo], None]) -> None:
        """Blocks, each part of the columns after the other; ``block`` writes one."""
        infos = [self.program.infos[n.name] for n in nodes if isinstance(n, Block)]
        before = dict(self.values.tiles)
        dealt = {name: self._dealt(tile) for name, tile in before.items() if self._whole in tile.value.dims}
        for k in range(self.count):
            self.out.comment(f"columns, part {k}")
            here = {self._whole: self._part + k * self.program.tile[self._part][1]}
            for name, parts in dealt.items():
                position = tuple(p.xreplace(here) for p in before[name].position)
                self.values.tiles[name] = replace(before[name], value=parts[k], position=position)
            for info in infos:
                block(self._at(info, here))
        self.values.tiles = before

    def _is_plain(self, node: Node) -> bool:
        """Whether a node may be written for some of the columns: a block that reduces and scatters nothing."""
        if not isinstance(node, Block) or node.is_reduction or node.is_scan or node.is_scatter:
            return False
        return not any(isinstance(s, Update) for s in node.body)

    def _multiplies(self, node: Node) -> bool:
        if isinstance(node, Loop):
            return any(isinstance(n, Block) and n.name in self._products for n, _ in walk_nodes(node.body))
        return node.name in self._products

    def _at(self, info: BlockInfo, here: dict[sympy.Symbol, sympy.Expr]) -> BlockInfo:
        """A block in a part of the columns."""
        spatial = frozenset(self._part if s == self._whole else s for s in info.spatial)
        axes = {v: e.xreplace(here) for v, e in info.axes.items()}
        bounds = tuple((lhs.xreplace(here), rhs.xreplace(here)) for lhs, rhs in info.bounds)
        return replace(info, axes=axes, bounds=bounds, spatial=spatial)

    def _dealt(self, tile: Tile) -> list[Value]:
        """A tile of all columns, for each part its own."""
        levels = self.count.bit_length() - 1
        rows = next((self.program.tile[s][1] for s in tile.value.dims if self.program.tile[s][0] == 0), 1)
        parts = [f"{rows}", *["2"] * levels, f"{self.program.tile[self._part][1]}"]
        order = ", ".join(map(str, (0, levels + 1, *range(1, levels + 1))))
        texts = [f"tl.permute(tl.reshape({tile.value.text}, [{', '.join(parts)}]), ({order}))"]
        for _ in range(levels):
            texts = [name for text in texts for name in self._halves(text)]
        # The last of the new dimensions, which is taken apart first, is the lowest bit of a part's number.
        found = [texts[int(f"{k:0{levels}b}"[::-1], 2)] for k in range(self.count)]
        dims = frozenset(self._part if s == self._whole else s for s in tile.value.dims)
        return [replace(tile.value, text=text, dims=dims) for text in found]

    def _halves(self, text: str) -> tuple[str, str]:
        names = self.out.fresh("part"), self.out.fresh("part")
        self.out.line(f"{names[0]}, {names[1]} = tl.split({text})")
        return names
