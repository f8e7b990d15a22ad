"""The program in front of several programs of one graph: it reads sizes and calls the one that is for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ....ir.expr.size_regions import Fork, Leaf, Tree
from ..steps.step import BindSize


def print_dispatch(tree: Tree, bound: Sequence[BindSize], places: Mapping[str, int], head: str) -> str:
    """Python source of ``call(args)``, which hands its arguments on to ``variant0_``, ``variant1_``, …

    ``places`` are the positions of arguments by name. Nothing is asserted: each size is in exactly one region, which
    is proved where the tree is made.
    """
    lines = [f"# {head}", "def call(args):"]
    lines += [f"    {b.symbol} = {_read(b, places)}" for b in bound]
    return "\n".join([*lines, *_branches(tree, "    ")]) + "\n"


def variable(number: int) -> str:
    """What the program calls one of the others."""
    return f"variant{number}_"


def _branches(tree: Tree, indent: str) -> Iterator[str]:
    match tree:
        case Leaf(number):
            yield f"{indent}return {variable(number)}(args)"
        case Fork(condition, yes, no):
            yield f"{indent}if {condition.text()}:"
            yield from _branches(yes, indent + "    ")
            yield from _branches(no, indent)


def _read(bind: BindSize, places: Mapping[str, int]) -> str:
    value = f"args[{places[str(bind.source)]}]"
    if bind.dim is not None:
        value += f".stride({bind.dim})" if bind.stride else f".size({bind.dim})"
    if bind.shift:
        value = f"({value} - {bind.shift})"
    return value if bind.scale == 1 else f"{value} // {bind.scale}"
