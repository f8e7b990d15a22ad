"""What the primitives share: finding loops and blocks, replacing them, and moving bindings along."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import sympy

from ....ir.expr.index import expanded, simplify
from ....ir.expr.value import Index, is_value
from ....ir.nest.hints import Value
from ....ir.nest.loops import Block, Bound, DimKind, Loop, LoopNest, Node, walk_nodes
from ...error import ScheduleError


def find_loop(nest: LoopNest, name: str, asked: str) -> tuple[Loop, tuple[Loop, ...]]:
    """The loop over a variable, and the loops around it, outermost first. Raises ScheduleError."""
    for node, outer in walk_nodes(nest.body):
        if isinstance(node, Loop) and node.var.name == name:
            return node, outer
    known = ", ".join(n.var.name for n, _ in walk_nodes(nest.body) if isinstance(n, Loop))
    raise ScheduleError(asked, f"there is no loop {name}", nest, hint=f"the loops are {known}")


def find_block(nest: LoopNest, name: str, asked: str) -> tuple[Block, tuple[Loop, ...]]:
    """A block by name, and the loops around it. Raises ScheduleError."""
    for node, outer in walk_nodes(nest.body):
        if isinstance(node, Block) and node.name == name:
            return node, outer
    known = ", ".join(n.name for n, _ in walk_nodes(nest.body) if isinstance(n, Block))
    raise ScheduleError(asked, f"there is no block {name}", nest, hint=f"the blocks are {known}")


def blocks_under(node: Node) -> list[Block]:
    """The blocks of a subtree in order."""
    if isinstance(node, Block):
        return [node]
    found: list[Block] = []
    _collect(node.body, found)
    return found


def _collect(body: tuple[Node, ...], found: list[Block]) -> None:
    for n in body:
        if isinstance(n, Block):
            found.append(n)
        else:
            _collect(n.body, found)


def replace_node(body: tuple[Node, ...], target: Node, new: Callable[[Node], tuple[Node, ...]]) -> tuple[Node, ...]:
    """The tree with one node, found by identity, replaced; a loop that is left empty disappears."""
    for k, n in enumerate(body):
        if n is target:
            return (*body[:k], *new(n), *body[k + 1 :])
        if isinstance(n, Loop):
            inner = replace_node(n.body, target, new)
            if inner is not n.body:
                kept = (Loop(n.var, n.extent, inner, n.kind, n.annotations),) if inner else ()
                return (*body[:k], *kept, *body[k + 1 :])
    return body


def with_node(nest: LoopNest, target: Node, *new: Node) -> LoopNest:
    """The nest with one node replaced by others."""
    return replace(nest, body=replace_node(nest.body, target, lambda _: new))


def find_place(nest: LoopNest, at: str, asked: str) -> LoopNest | Loop | Block:
    """The loop or block of a name; of an empty one the nest. Raises ScheduleError."""
    if not at:
        return nest
    for node, _ in walk_nodes(nest.body):
        if at == (node.var.name if isinstance(node, Loop) else node.name):
            return node
    raise ScheduleError(asked, f"there is no loop or block {at}", nest)


def with_annotation(nest: LoopNest, node: LoopNest | Loop | Block, key: str, value: Value) -> LoopNest:
    """A nest in which a loop, a block or the nest itself says something more."""
    annotations = (*(a for a in node.annotations if a[0] != key), (key, value))
    if isinstance(node, LoopNest):
        return replace(node, annotations=annotations)
    return with_node(nest, node, replace(node, annotations=annotations))


def dims_of_loops(block: Block) -> dict[sympy.Symbol, DimKind]:
    """Of which dimensions of the function the loops are that the axes of a block are bound to."""
    return {s: a.dim for a, b in zip(block.axes, block.bindings, strict=True) for s in b.free_symbols}


def substitute(
    nodes: tuple[Node, ...],
    mapping: Mapping[sympy.Symbol, sympy.Expr],
    extents: Mapping[sympy.Symbol, sympy.Expr],
    nest: LoopNest,
    extra: tuple[Bound, ...] = (),
) -> tuple[Node, ...]:
    """Replace loop variables in the bindings and predicates of a subtree; add ``extra`` bounds to every block in it.

    ``extents`` are those of the loops in scope outside the subtree, the new ones included.
    """
    out: list[Node] = []
    for n in nodes:
        if isinstance(n, Loop):
            inner = {**extents, n.var: n.extent}
            out.append(replace(n, body=substitute(n.body, mapping, inner, nest, extra)))
            continue
        bindings = tuple(_moved(b, mapping, extents, nest) for b in n.bindings)
        predicate = tuple(Bound(_moved(p.lhs, mapping, extents, nest), p.rhs) for p in n.predicate)
        out.append(replace(n, bindings=bindings, predicate=(*predicate, *(e for e in extra if e not in predicate))))
    return tuple(out)


def _moved(
    e: sympy.Expr,
    mapping: Mapping[sympy.Symbol, sympy.Expr],
    extents: Mapping[sympy.Symbol, sympy.Expr],
    nest: LoopNest,
) -> sympy.Expr:
    if e.is_Symbol:
        return mapping.get(e, e)
    if not any(v in mapping for v in e.free_symbols):
        return e
    return simplify(expanded(e.xreplace(mapping)), extents, nest.symbols)


def in_loops(indices: tuple[Index, ...], block: Block) -> tuple[sympy.Expr | None, ...]:
    """Indices of an access in terms of loop variables; None for an index computed from data."""
    env = {a.var: b for a, b in zip(block.axes, block.bindings, strict=True)}
    return tuple(None if is_value(i) else env.get(i, i) if i.is_Symbol else i.xreplace(env) for i in indices)


def linear_part(e: sympy.Expr, var: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr] | None:
    """``(c, rest)`` with ``e == c*var + rest`` and neither mentioning var; None where e is not linear in it."""
    if e == var:
        return sympy.S.One, sympy.S.Zero
    if var not in e.free_symbols:
        return sympy.S.Zero, e
    total: list[sympy.Expr] = []
    rest: list[sympy.Expr] = []
    for term in sympy.Add.make_args(e):
        if var not in term.free_symbols:
            rest.append(term)
            continue
        c = sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f != var))
        if var in c.free_symbols:
            return None
        total.append(c)
    return sympy.Add(*total), sympy.Add(*rest)


def fresh(nest: LoopNest, base: str, also: Collection[str] = ()) -> str:
    """A loop variable's name that the nest does not use, nor ``also`` does."""
    taken = {n.var.name for n, _ in walk_nodes(nest.body) if isinstance(n, Loop)}.union(also)
    if base not in taken:
        return base
    k = 1
    while f"{base}_{k}" in taken:
        k += 1
    return f"{base}_{k}"
