"""Names by position: nests that differ only in names have the same ones, so that what speaks of names serves them all.

Sizes keep their names: lowering numbers them in order of appearance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import sympy

from ..expr.value import Expr, Index, Load, is_value, rewrite, symbol
from .hints import HINTS, Annotations
from .loops import Access, Axis, Block, Bound, Buffer, DimKind, Loop, LoopNest, Node, Statement, Store, walk_nodes

_DIM = {DimKind.ROW: "i", DimKind.INNER: "r"}


@dataclass(slots=True)
class Naming:
    """What becomes of the names of a nest; the kinds are apart, since a loop and an axis may have one name."""

    buffers: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    # Of each block, since a block that a schedule made may have names that others have too.
    axes: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        """Whether any name becomes another."""
        every = (self.buffers, self.blocks, self.loops, *self.axes.values())
        return any(a != b for names in every for a, b in names.items())


def named_by_position(nest: LoopNest) -> LoopNest:
    """The nest with names by position: parameters in0, … and out0, …, locals t0, …, blocks b0, …, axes i0, … and r0, …
    and x0, …, loops by the first block and axis that they move. The same object where it has them already."""
    naming = _positions(nest)
    return _renamed(nest, naming) if naming.changes else nest


def matched(nest: LoopNest, other: LoopNest) -> Naming | None:
    """Which name of the ``other`` stands where one of the nest does; None where they are not built alike."""
    naming = Naming()
    if len(nest.params) != len(other.params) or len(nest.locals) != len(other.locals):
        return None
    for ours, theirs in zip((*nest.params, *nest.locals), (*other.params, *other.locals), strict=True):
        naming.buffers[ours.name] = theirs.name
    here, there = list(walk_nodes(nest.body)), list(walk_nodes(other.body))
    if len(here) != len(there):
        return None
    for (a, above), (b, beside) in zip(here, there, strict=True):
        if isinstance(a, Loop) != isinstance(b, Loop) or len(above) != len(beside):
            return None
        if isinstance(a, Loop) and isinstance(b, Loop):
            naming.loops[a.var.name] = b.var.name
        elif isinstance(a, Block) and isinstance(b, Block):
            if len(a.axes) != len(b.axes):
                return None
            naming.blocks[a.name] = b.name
            naming.axes[a.name] = {x.var.name: y.var.name for x, y in zip(a.axes, b.axes, strict=True)}
    return naming


def _positions(nest: LoopNest) -> Naming:
    naming = Naming()
    for k, name in enumerate(nest.outputs):
        naming.buffers[name] = f"out{k}"
    given = (b.name for b in nest.params if b.name not in naming.buffers)
    naming.buffers |= {name: f"in{k}" for k, name in enumerate(given)}
    naming.buffers |= {b.name: f"t{k}" for k, b in enumerate(nest.locals)}
    counts: dict[str, int] = {}
    axes: dict[str, str] = {}
    taken: set[str] = set()
    for node, path in walk_nodes(nest.body):
        if not isinstance(node, Block):
            continue
        block = naming.blocks[node.name] = f"b{len(naming.blocks)}"
        for axis in node.axes:
            if axis.var.name not in axes:
                kind = _DIM.get(axis.dim, "x")
                axes[axis.var.name] = f"{kind}{counts.get(kind, 0)}"
                counts[kind] = counts.get(kind, 0) + 1
        naming.axes[node.name] = {a.var.name: axes[a.var.name] for a in node.axes}
        moved = {e: axes[a.var.name] for a, e in zip(node.axes, node.bindings, strict=True)}
        for loop in path:
            if loop.var.name not in naming.loops:
                name = f"{block}_{moved.get(loop.var, 'l')}"
                while name in taken:
                    name += "_"
                taken.add(name)
                naming.loops[loop.var.name] = name
    for node, _ in walk_nodes(nest.body):  # a loop without a block
        if isinstance(node, Loop):
            naming.loops.setdefault(node.var.name, f"l{len(naming.loops)}")
    return naming


def _renamed(nest: LoopNest, naming: Naming) -> LoopNest:
    loops = {symbol(a): symbol(b) for a, b in naming.loops.items()}

    def node(n: Node) -> Node:
        if isinstance(n, Block):
            return _block(n, naming, loops)
        body = tuple(map(node, n.body))
        return replace(n, var=loops[n.var], body=body, annotations=_annotations(n.annotations, naming))

    def buffer(b: Buffer) -> Buffer:
        return replace(b, name=naming.buffers[b.name])

    return replace(
        nest,
        params=tuple(map(buffer, nest.params)),
        locals=tuple(map(buffer, nest.locals)),
        outputs=tuple(naming.buffers[n] for n in nest.outputs),
        body=tuple(map(node, nest.body)),
        annotations=_annotations(nest.annotations, naming),
    )


def _block(block: Block, naming: Naming, loops: Mapping[sympy.Symbol, sympy.Symbol]) -> Block:
    axes = {a.var: symbol(naming.axes[block.name][a.var.name]) for a in block.axes}
    # Predicates are about loops, or axes.
    both = {**loops, **axes}

    def value(e: Expr) -> Expr:
        def leaf(x: Expr) -> Expr | None:
            if isinstance(x, Load) and x.buffer in naming.buffers:
                return Load(naming.buffers[x.buffer], x.indices, x.dtype)
            return None

        return rewrite(e, leaf, lambda i: i.xreplace(axes))

    def indices(given: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(value(i) if is_value(i) else i.xreplace(axes) for i in given)  # type: ignore[attr-defined]

    def statement(s: Statement) -> Statement:
        if isinstance(s, Store):
            return replace(s, buffer=naming.buffers[s.buffer], indices=indices(s.indices), value=value(s.value))
        targets = tuple(Access(naming.buffers[t.buffer], indices(t.indices)) for t in s.targets)
        return replace(s, targets=targets, values=tuple(map(value, s.values)))

    return replace(
        block,
        name=naming.blocks[block.name],
        axes=tuple(Axis(axes[a.var], a.extent.xreplace(both), a.kind, a.dim) for a in block.axes),
        bindings=tuple(e.xreplace(loops) for e in block.bindings),
        predicate=tuple(Bound(b.lhs.xreplace(both), b.rhs.xreplace(both)) for b in block.predicate),
        body=tuple(map(statement, block.body)),
        annotations=_annotations(block.annotations, naming),
    )


def _annotations(annotations: Annotations, naming: Naming) -> Annotations:
    """Hints that speak of buffers, by key or by value."""
    return tuple((renamed_key(k, naming), _value(k, v, naming)) for k, v in annotations)


def renamed_key(key: str, naming: Naming) -> str:
    """A hint's key, which may name a buffer behind a colon."""
    hint, colon, buffer = key.partition(":")
    return f"{hint}:{naming.buffers.get(buffer, buffer)}" if colon else key


def _value(key: str, value: bool | int | float | str, naming: Naming) -> bool | int | float | str:
    hint = HINTS.get(key)
    if hint is None or not isinstance(value, str):
        return value
    if hint.of_locals:
        pairs = (pair.partition(":") for pair in value.split(","))
        return ",".join(f"{naming.loops.get(lp, lp)}:{naming.buffers.get(b, b)}" for lp, _, b in pairs)
    if not hint.of_outputs:
        return value
    return ",".join(naming.buffers.get(n, n) for n in value.split(","))
