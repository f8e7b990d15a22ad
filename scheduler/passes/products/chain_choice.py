"""Which products are streamed, and which of them share a function: see ``chain_products``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import sympy

from ....ir.graph.graph import Compute, View, uses
from ....ir.target import TargetOf
from ...context import PassContext
from ...cost.attention import multiplies, widths
from ...cost.chains import ChainSize, chain_times, decide_chain_gpu, seen_share
from ...decisions import Alternative, place_key
from ...facts.definitions import Definitions
from ...primitives.analysis.empty import zero
from ...rules import Capability, can
from .chain_elements import BATCH, COLUMN, FEATURE, ROW, ChainedProduct
from .chain_totals import Total
from .operands import made_of

# Fewer rows or columns fill no tile.
MIN_ROWS = 4


def refused_of(found: Definitions, chains: list[ChainedProduct | Total], context: PassContext) -> dict[str, str]:
    """The products that have to stay as they are, and why."""
    refused: dict[str, str] = {}
    hint, target_of = found.graph.symbols.hint, context.target_of
    for c in chains:
        wide = [*([c.extents[FEATURE]] if isinstance(c, ChainedProduct) else ()), *(s.width for s in c.scores)]
        machine = target_of(c.device).machine
        if not multiplies(machine, c.dtype):
            refused[c.name] = "float64 is not for the tensor cores"
        elif not all(w.is_Integer and int(w) in widths(machine) for w in wide):
            refused[c.name] = f"operands are {', '.join(map(str, wide))} elements wide"
        elif min(hint(c.extents[ROW]), hint(c.extents[COLUMN])) < MIN_ROWS:
            refused[c.name] = "it has too few rows for tiles of them"
    known = {c.name: c for c in chains}
    while True:
        fresh: dict[str, str] = {}
        left = [c for c in chains if c.name not in refused]
        groups = list(groups_of(found, left, target_of))
        for group in groups:
            plain = all(isinstance(c, ChainedProduct) and not c.is_softmax for c in group)
            # Without a softmax no product is repeated in another kernel.
            allowed = [c.name for c in group] if plain else known.keys() - refused.keys()
            for c in group:
                for s in c.scores:
                    other = _other_reader(found, s.product.name, allowed)
                    if other is not None:
                        fresh[c.name] = f"{other} needs what is made of {s.product.name}"
            if plain and not any(c.name in fresh for c in group):
                fresh |= _slower(found, group, context)
        for group in groups:
            shared = can(target_of(group[0].device), Capability.SHARED_TOTALS)
            if shared and all(isinstance(c, Total) for c in group):
                fresh |= dict.fromkeys((c.name for c in group), "no product takes up the same tiles")
        if not fresh:
            return refused
        refused |= fresh


def _slower(found: Definitions, group: Sequence[ChainedProduct | Total], context: PassContext) -> dict[str, str]:
    """Why the products of a group stay, where one kernel for them is not faster."""
    hint, first = found.graph.symbols.hint, group[0]
    scores = {(s.query, s.key): s for c in group for s in c.scores}
    width = sum(int(s.width) for s in scores.values())
    width += sum(int(c.extents[FEATURE]) for c in group if isinstance(c, ChainedProduct))
    batch, rows, columns = (hint(first.extents.get(x, sympy.S.One)) for x in (BATCH, ROW, COLUMN))
    size = ChainSize(batch, rows, columns, width, len(scores), first.dtype.itemsize, _seen(group, rows, columns, hint))
    machine = context.target_of(first.device).machine
    gains, told = decide_chain_gpu(size, machine)
    ours, library = chain_times(size, machine)
    chosen = context.decide(
        "chain", lambda: place_key(found.graph, tuple(c.name for c in group)),
        (Alternative("one kernel", ours), Alternative("library", library)), "one kernel" if gains else "library",
        at=first.name, nbytes=2 * batch * rows * columns * len(scores) * size.itemsize, reason=told,
    )  # fmt: skip
    return {} if chosen == "one kernel" else dict.fromkeys((c.name for c in group), told)


def _seen(group: Sequence[ChainedProduct | Total], rows: int, columns: int, hint: Callable[[sympy.Expr], int]) -> float:
    """The share of tiles of scores that a mask of positions leaves to a group."""
    elements = [c.element for c in group if isinstance(c, ChainedProduct)]
    if len(elements) < len(group):
        return 1.0
    facts = [[g for g in zero(e) if g.free_symbols and g.free_symbols <= {ROW, COLUMN}] for e in elements]

    def is_empty(row: int, last_row: int, column: int, last_column: int) -> bool:
        corners = [{ROW: r, COLUMN: c} for r in (row, last_row) for c in (column, last_column)]
        # What is below zero at all corners is so between them: such expressions are linear.
        return all(any(all(hint(g.xreplace(at)) < 0 for at in corners) for g in own) for own in facts)

    return seen_share(rows, columns, is_empty) if all(facts) else 1.0


def _other_reader(found: Definitions, name: str, allowed: Collection[str]) -> str | None:
    """Who reads a product's results, through views and element-wise nodes, and is none of some products."""
    outputs = {o for o in found.graph.outputs if isinstance(o, str)}
    stack, seen = [name], {name}
    while stack:
        current = stack.pop()
        if current in outputs:
            return f"the graph's output {current}"
        for reader in found.readers(current):
            if isinstance(reader, (Compute, View)):
                if reader.name not in seen:
                    seen.add(reader.name)
                    stack.append(reader.name)
            elif not set(reader.names) <= set(allowed):
                return reader.names[0]
    return None


def groups_of(
    found: Definitions, chains: list[ChainedProduct | Total], target_of: TargetOf
) -> Iterator[list[ChainedProduct | Total]]:
    """Chains over the same tiles, none of which needs the result of another."""
    left = list(chains)
    while left:
        group = [left.pop(0)]
        for c in list(left):
            same = (
                _may_share(c, group, target_of)
                and c.space == group[0].space
                and {(s.query, s.key) for s in c.scores} & {(s.query, s.key) for g in group for s in g.scores}
            )
            if same and not any(made_of(found, g.name) & {*uses(c.node)} for g in group):
                group.append(c)
                left.remove(c)
        yield group


def _may_share(c: ChainedProduct | Total, group: list[ChainedProduct | Total], target_of: TargetOf) -> bool:
    """Whether a sum may be of one function with some, where their tiles are the same: totals are of one function over
    the same parts of the batch, for targets with a rule for that, and functions of their own elsewhere."""
    totals = [t for t in (c, *group) if isinstance(t, Total)]
    if not totals:
        return True
    shared = can(target_of(c.device), Capability.SHARED_TOTALS)
    return shared and all((t.kept, t.over) == (totals[0].kept, totals[0].over) for t in totals)


__all__ = ["MIN_ROWS", "groups_of", "refused_of"]
