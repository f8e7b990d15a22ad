"""Sizes that a program was not traced for: torch takes each size for two or more, and a program may allow 0 and 1.

A part of a tensor (``x[0]``, ``x[:2]``) may be smaller then, or not be there. What torch says of its size is so of
larger tensors alone, so calls with such sizes are refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ...ir.expr.value import symbol
from ..importing.regions import regions_of

aten = torch.ops.aten
# Ops that take a part of a tensor by its place, or write to one.
_PARTS = frozenset(
    (aten.slice.Tensor, aten.select.int, aten.narrow.default, aten.split.Tensor, aten.split_with_sizes.default,
     aten.unbind.int, aten.unfold.default, aten.diagonal.default, aten.slice_scatter.default,
     aten.select_scatter.default, aten.slice_copy.Tensor, aten.select_copy.int, aten.split_with_sizes_copy.default)
)  # fmt: skip
# What each size is traced for at least.
_TRACED = 2
# A size for those that are not asked about, where the tracing knows none.
_OTHER = 16


def served_sizes(
    gm: fx.GraphModule,
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]],
    conditions: Sequence[sympy.Basic],
    hints: Mapping[Any, Any],
) -> list[sympy.Basic]:
    """What has to hold of sizes that may be less than torch has traced for, beside ``conditions``: comparisons in our
    symbols. ``hints`` are typical values of torch's symbols."""
    parts = list(_parts(gm))
    found: list[sympy.Basic] = []
    for size, (low, _) in ranges.items():
        mine = [n for n in parts if size.name in _names(n)]
        wrong = [
            k for k in range(low, _TRACED) if not all(_is_served(n, size.name, k, conditions, hints) for n in mine)
        ]
        ours = symbol(size.name)
        if wrong and wrong == [*range(low, wrong[-1] + 1)]:
            found.append(sympy.Ge(ours, wrong[-1] + 1))
        else:
            found += [sympy.Ne(ours, k) for k in wrong]
    return [c for c in found if c != sympy.true]


def _parts(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for node in gm.graph.nodes:
        if node.target in _PARTS:
            yield node
    for body in regions_of(gm).values():
        yield from _parts(body)


def _names(node: fx.Node) -> set[str]:
    """The sizes that a node's operands have, by name."""
    values = (n.meta.get("val") for n in node.all_input_nodes)
    sizes = (s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,)))
    return {s.name for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


def _is_served(
    node: fx.Node, name: str, value: int, conditions: Sequence[sympy.Basic], hints: Mapping[Any, Any]
) -> bool:
    """Whether an op gives what it was traced to give where a size has a value, or calls with it are refused anyway."""

    def number(size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        at = {s: value if s.name == name else int(hints.get(s, _OTHER)) for s in expr.free_symbols}
        return int(expr.xreplace({s: sympy.Integer(n) for s, n in at.items()}))

    def given(operand: fx.Node) -> Any:
        held = operand.meta.get("val")
        if isinstance(held, torch.Tensor):
            return torch.empty([number(n) for n in held.shape], dtype=held.dtype, device="meta")
        return number(held) if isinstance(held, (int, torch.SymInt)) else held

    alone = {s: sympy.Integer(value) for c in conditions for s in c.free_symbols if s.name == name}  # type: ignore[attr-defined]
    if any(c.xreplace(alone) == sympy.false for c in conditions):
        return True
    args, kwargs = (fx.node.map_arg(a, given) for a in (node.args, node.kwargs))
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (IndexError, RuntimeError):
        return False
    said = node.meta["val"]
    pairs = zip(*((v if isinstance(v, (list, tuple)) else (v,)) for v in (made, said)), strict=False)
    count = len(made) == len(said) if isinstance(said, (list, tuple)) else True
    return count and all([*m.shape] == [number(n) for n in s.shape] for m, s in pairs)


__all__ = ["served_sizes"]
