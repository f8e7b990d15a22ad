"""Scans that are read at other places than their own: what they are up to the element before (exclusive scans), or
behind the first.

A reader shares the loops of a scan only where it reads the element at hand: neighbours are in other lanes, other tiles,
or not made yet. But what a scan is up to ``d`` elements further on is the scan of what lies ``d`` elements further on,
which sees the identity where nothing does; and what it is one element further on is combined of that and one element.
So the scan is moved to where it is read, and its readers read it in place. Source: Blelloch 1990, exclusive scans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.index import simplify
from ....ir.expr.value import Expr, Index, IndexValue, Load, Select, call, is_value, loads, rewrite
from ....ir.graph.graph import Compute, Graph, Node, Scan, TensorType
from ....ir.nest.loops import contiguous_strides
from ...facts.views import map_value
from ..canonical.edit import Edit, Reader, extents_of
from ..canonical.names import fresh_name

_Extents: TypeAlias = dict[sympy.Symbol, sympy.Expr]
# How far in front of a row readers may begin, and how much longer than a scan they may be: further on a scan would
# spend its time on nothing, as for a part of a long join.
NEAR = 8


def shift_scans(graph: Graph) -> Graph:
    """Move scans to where they are read, where all that reads one does so at one place or at two neighbouring ones.

    Readers that use less of a scan than they are given, as of one that was padded and cut, become smaller first. A scan
    of which the elements far apart, single ones, or ones that data name are read stays as it is.
    """
    names = [n.names[0] for n in graph.nodes if isinstance(n, Scan)]
    if not names:
        return graph
    edit = Edit.of(graph)
    for name in names:
        while (site := _Site.of(edit, name)).has_less_to_read():
            pass
        site.move()
    return edit.graph


@dataclass(frozen=True, slots=True)
class _RowWindow:
    """``extent`` elements of a row from ``start`` on, which is before the row where that is negative."""

    start: sympy.Expr
    extent: sympy.Expr


@dataclass(slots=True)
class _Site:
    """One scan of a graph, what is made of its states element by element (``images``), and who reads those."""

    edit: Edit
    scan: Scan
    dim: int
    images: dict[str, Compute]

    @classmethod
    def of(cls, edit: Edit, name: str) -> _Site:
        scan = edit.nodes[name]
        assert isinstance(scan, Scan)
        images: dict[str, Compute] = {}
        for node in edit.readers(scan.names):
            if isinstance(node, Compute) and node.type.shape == scan.types[0].shape:
                read = loads(edit.values[node.name][0])
                if all(ld.buffer in scan.names and ld.indices == node.axes for ld in read):
                    images[node.name] = node
        return cls(edit, scan, scan.axes.index(scan.scan_axis), images)

    @property
    def length(self) -> sympy.Expr:
        return self.scan.types[0].shape[self.dim]

    def has_less_to_read(self) -> bool:
        """Let a reader of the scan read less, or nothing, of it; whether there was one."""
        return self._drops_copy() or self._narrows()

    def move(self) -> None:
        """Move the scan, where that can be and need be."""
        whole = _RowWindow(sympy.S.Zero, self.length)
        windows = {whole} if not self.edit.outside.isdisjoint(self._shown()) else set()
        for node in self._readers():
            for ld in self._read(node, self._shown()):
                found = self._window(node, ld)
                if found is None:
                    return
                windows.add(found)
        if windows <= {whole} or len({w.extent for w in windows}) != 1:
            return
        starts = [w.start for w in windows]
        if not all(s.is_Integer for s in starts):
            return
        base = min(0, *map(int, starts))
        if max(map(int, starts)) > base + 1 or base < -NEAR:
            return
        if any(self._hint(w.extent) > self._hint(self.length) + NEAR for w in windows):
            return
        self._write(base, windows)

    def _hint(self, size: sympy.Expr) -> int:
        return self.edit.start.symbols.hint(size)

    def _readers(self) -> list[Reader]:
        """Everything that reads the scan or an image of it at places of its own."""
        return [n for n in self.edit.readers(self._shown()) if n.names[0] not in self.images]

    def _shown(self) -> set[str]:
        return {*self.scan.names, *self.images}

    def _read(self, node: Reader, names: Iterable[str]) -> list[Load]:
        return [ld for v in self.edit.values[node.names[0]] for ld in loads(v) if ld.buffer in names]

    def _window(self, node: Reader, load: Load) -> _RowWindow | None:
        place = _place(load.indices[self.dim], extents_of(node))
        return None if place is None else place[1]

    def _drops_copy(self) -> bool:
        """Let the readers of the first copy of the scan, in another order, say, read the scan; whether there is one."""
        for node in self._readers():
            value = self.edit.values[node.names[0]][0]
            if isinstance(node, Compute) and node.name not in self.edit.outside and isinstance(value, Load):
                self._replace(node, partial(self._behind, node))
                return True
        return False

    def _behind(self, copy: Compute, load: Load, extents: _Extents) -> Expr:
        """What a load of a copy reads."""
        return self._at(self.edit.values[copy.name][0], dict(zip(copy.axes, load.indices, strict=True)), extents)

    def _replace(self, node: Compute, read: Callable[[Load, _Extents], Expr], new: Compute | None = None) -> None:
        """Put ``new``, or nothing, in the place of a node, and what ``read`` says in that of its loads."""
        for n in self.edit.readers((node.name,)):
            extents = extents_of(n)

            def leaf(e: Expr, extents: _Extents = extents) -> Expr | None:
                return read(e, extents) if isinstance(e, Load) and e.buffer == node.name else None

            self.edit.put(n, [_with(n, [rewrite(v, leaf) for v in self.edit.values[n.names[0]]])])
        self.edit.drop_views(node.name)
        self.edit.put(node, [new] if new is not None else [])

    # --- readers that use less than they are given --------------------------------------------------------------------

    def _narrows(self) -> bool:
        """Let the first reader that computes more along the scan than one window that all its own readers look through
        compute that window; whether there is one."""
        for node in self._readers():
            if isinstance(node, Compute) and node.name not in self.edit.outside:
                cut = self._cut(node)
                if cut is not None:
                    self._cut_to(node, *cut)
                    return True
        return False

    def _cut(self, node: Compute) -> tuple[sympy.Symbol, _RowWindow] | None:
        """The axis of a reader along the scan and the part of it that is read, where that is less than all. What looks
        beyond the reader, as a join looks for each of its parts, is no part."""
        extents = extents_of(node)
        places = [_place(ld.indices[self.dim], extents) for ld in self._read(node, self._shown())]
        axes = {p[0] for p in places if p is not None}
        if len(axes) != 1 or None in places:
            return None
        (axis,) = axes
        at = node.axes.index(axis)
        found: set[_RowWindow] = set()
        for other in self.edit.readers((node.name,)):
            for ld in self._read(other, (node.name,)):
                place = _place(ld.indices[at], extents_of(other))
                if place is None:
                    return None
                found.add(place[1])
        length = node.type.shape[at]
        if len(found) != 1 or (window := found.pop()).extent == length:
            return None
        behind = sympy.expand(length - window.start - window.extent)
        return (axis, window) if window.start.is_nonnegative and behind.is_nonnegative else None

    def _cut_to(self, node: Compute, axis: sympy.Symbol, window: _RowWindow) -> None:
        at = node.axes.index(axis)
        shape = (*node.type.shape[:at], window.extent, *node.type.shape[at + 1 :])
        extents = dict(zip(node.axes, shape, strict=True))
        name = fresh_name(f"{node.name}_part", self.edit.taken)
        value = self._at(self.edit.values[node.name][0], {axis: axis + window.start}, extents)
        part = replace(node, name=name, type=_type(node.type, shape), value=value)

        def read(e: Load, extents: _Extents) -> Expr:
            moved = sympy.expand(e.indices[at] - window.start)  # type: ignore[operator]
            return Load(name, (*e.indices[:at], moved, *e.indices[at + 1 :]), e.dtype)

        self._replace(node, read, part)

    # --- the scan where it is read ------------------------------------------------------------------------------------

    def _write(self, base: int, windows: set[_RowWindow]) -> None:
        """Let there be the scan from ``base`` on, and images of it, and of what it is one element further on."""
        scan, (extent,) = self.scan, {w.extent for w in windows}
        shape = (*scan.types[0].shape[: self.dim], extent, *scan.types[0].shape[self.dim + 1 :])
        types = tuple(_type(t, shape) for t in scan.types)
        whole = _RowWindow(sympy.S.Zero, self.length)

        def name(old: str, start: int) -> str:
            """What a state or an image is called from a place on: as before where something else asks for it."""
            kept = old in self.edit.outside and _RowWindow(sympy.Integer(start), extent) == whole
            return old if kept else fresh_name(f"{old}_moved", self.edit.taken)

        first = tuple(name(n, base) for n in scan.names)
        made: list[Node] = [replace(scan, names=first, types=types, values=self._elements(base, shape))]
        states = {base: first}
        if _RowWindow(sympy.Integer(base + 1), extent) in windows:
            following = tuple(name(n, base + 1) for n in scan.names)
            before = tuple(Load(n, scan.axes, t.dtype) for n, t in zip(first, types, strict=True))
            combined = scan.monoid.combine(before, self._elements(base + 1, shape))
            made += [
                Compute(n, t, scan.axes, v, scan.origins) for n, t, v in zip(following, types, combined, strict=True)
            ]
            states[base + 1] = following
        names = {(n, start): name(n, start) for start in states for n in self.images}
        for start, state in states.items():
            names.update({(n, start): s for n, s in zip(scan.names, state, strict=True)})
        for node in self._readers():
            self.edit.put(node, [_with(node, [self._renamed(node, v, names) for v in self.edit.values[node.names[0]]])])
        for image in self.images.values():
            axis, extents = image.axes[self.dim], dict(zip(image.axes, shape, strict=True))
            images: list[Node] = []
            for start in states:
                # What an image makes of its place along the scan is of the place where the scan is read.
                value = self._at(self.edit.values[image.name][0], {axis: axis + start}, extents)
                value = self._renamed(image, value, names, start)
                kind = image.type if names[image.name, start] == image.name else _type(image.type, shape)
                images.append(replace(image, name=names[image.name, start], type=kind, value=value))
            self.edit.put(image, images)
        self.edit.put(scan, made)
        for shown in self._shown() - self.edit.outside:
            self.edit.drop_views(shown)

    def _elements(self, start: int, shape: tuple[sympy.Expr, ...]) -> tuple[Expr, ...]:
        """What the scan combines, from ``start`` on, and the identity outside of the row."""
        scan, axis = self.scan, self.scan.scan_axis
        place = axis + start
        conditions = [call("ge", _value(place), _value(0))] if start < 0 else []
        if sympy.expand(shape[self.dim] + start - self.length).is_nonpositive is not True:
            conditions.append(call("lt", _value(place), _value(self.length)))
        extents = dict(zip(scan.axes, shape, strict=True))
        values = self._operands()
        if start:
            values = [self._at(v, {axis: place}, extents) for v in values]
        if not conditions:
            return tuple(values)
        inside = conditions[0] if len(conditions) == 1 else call("logical_and", *conditions)
        neutral = scan.monoid.identity(tuple(v.dtype for v in values))
        return tuple(Select(inside, v, n) for v, n in zip(values, neutral, strict=True))

    def _operands(self) -> list[Expr]:
        """What the scan combines, made in place where nobody else reads it: other places of it are wanted now."""
        extents, values = extents_of(self.scan), list(self.edit.values[self.scan.names[0]])

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.buffer in self.edit.outside or len(self.edit.readers((e.buffer,))) > 1:
                return None
            maker = self.edit.nodes.get(e.buffer)
            if not isinstance(maker, Compute):
                return None
            if len({ld for v in values for ld in loads(v) if ld.buffer == e.buffer}) > 1:
                return None
            moved = dict(zip(maker.axes, e.indices, strict=True))
            return self._at(self.edit.values[e.buffer][0], moved, extents)

        while (new := [rewrite(v, leaf) for v in values]) != values:
            values = new
        return values

    def _renamed(self, node: Reader, value: Expr, names: dict[tuple[str, int], str], start: int | None = None) -> Expr:
        """A value that reads the moved states and images: at its own axes, those from ``start`` on, or each where it
        reads the old ones."""
        extents = extents_of(node)

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.buffer not in self._shown():
                return None
            if start is not None:
                return Load(names[e.buffer, start], node.axes, e.dtype)
            place = _place(e.indices[self.dim], extents)
            assert place is not None
            axis, window, runs_back = place
            at = window.extent - 1 - axis if runs_back else axis
            indices = (*e.indices[: self.dim], at, *e.indices[self.dim + 1 :])
            return Load(names[e.buffer, int(window.start)], indices, e.dtype)

        return rewrite(value, leaf)

    def _at(self, value: Expr, moved: dict[sympy.Symbol, Index], extents: _Extents) -> Expr:
        return rewrite(map_value(value, moved), lambda _: None, lambda i: simplify(i, extents, self.edit.start.symbols))


def _place(index: object, extents: _Extents) -> tuple[sympy.Symbol, _RowWindow, bool] | None:
    """The axis that an index moves with, one by one, the window that it looks through, and whether it runs back."""
    if is_value(index):
        return None
    assert isinstance(index, sympy.Expr)
    axes = [s for s in index.free_symbols if s in extents]
    if len(axes) != 1:
        return None
    (axis,) = axes
    for runs_back, start in ((False, index - axis), (True, index + axis - extents[axis] + 1)):
        start = sympy.expand(start)
        if axis not in start.free_symbols:
            return axis, _RowWindow(start, extents[axis]), runs_back
    return None


def _type(like: TensorType, shape: tuple[sympy.Expr, ...]) -> TensorType:
    return replace(like, shape=shape, strides=contiguous_strides(shape))


def _with(node: Reader, values: list[Expr]) -> Node:
    return replace(node, value=values[0]) if isinstance(node, Compute) else replace(node, values=tuple(values))


def _value(index: sympy.Expr | int) -> Expr:
    return IndexValue(sympy.sympify(index), DType.INT64)
