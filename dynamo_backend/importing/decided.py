"""Sizes and numbers that data decide (``nonzero``, ``item``): what tells each of them, and what holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ...ir.graph.graph import Library, Origin, Ref
from ..converters import SizeMap, Tensor


def is_decided(size: Any) -> bool:
    """Whether a size is a symbol of torch's for one that data decide."""
    return isinstance(size, sympy.Symbol) and symbol_is_type(size, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def is_settled(node: fx.Node, operands: Sequence[Any], sizes: SizeMap) -> bool:
    """Whether a call asserts something of sizes that Dynamo's guards already do; what data decide has to be looked at.

    ``operands`` are the call's, as converters see them.
    """
    if "assert" not in str(node.target) and "sym_constrain" not in str(node.target):
        return False
    if any(isinstance(a, Tensor) for a in operands):
        return False
    symbols = {s for a in operands if isinstance(a, sympy.Basic) for s in sizes.sources(a)}
    return not any(is_decided(s) for s in symbols)


class Decided:
    """The symbols of a graph that data decide and that are told already: by an input, or by a node."""

    def __init__(self, sizes: SizeMap) -> None:
        self.sizes = sizes
        self.told: set[sympy.Basic] = set()

    def tell(self, sizes: Iterable[Any]) -> None:
        self.told.update(s for s in sizes if is_decided(s))

    def is_new(self, size: Any) -> bool:
        """Whether nothing tells a size yet, so that a call has to."""
        return is_decided(size) and size not in self.told

    def given(self, value: Any, fresh: bool) -> sympy.Symbol | None:
        """The symbol that a result of no tensor type gives its value to: itself, or that which is 1 where it is true.
        None for what is known already, as regions give back what they were given.

        A number that is ``fresh`` is looked at even where tracing has found what it has to be: by ``held``.
        """
        told = _given(self.sizes.told(value))
        if not self.is_new(told):
            theirs = _given(value.node._expr) if fresh else None
            told = self.sizes.plain(theirs) if theirs is not None else None
        self.tell((told,))
        return told

    def held(self, given: sympy.Symbol, known: sympy.Basic, target: str, origins: tuple[Origin, ...]) -> list[Library]:
        """Raises where data decide a number otherwise than tracing did, which takes torch's own assertions of it for
        true by then."""
        if _given(known) == given or given in self.sizes.sources(known):
            return []
        message = (
            f"{target} gives another number than {known}, which torch._check, or what is made of the number, "
            "told when the program was traced"
        )
        same = sympy.Eq(given, int(bool(known)) if known in (True, False) else known, evaluate=False)
        return [Library((), (), "aten::_assert_scalar.default", (same, message), (), "a number known before", origins)]

    def read(self, value: torch.Tensor, found: Tensor, origins: tuple[Origin, ...]) -> Iterator[Library]:
        """Sizes of a call's result (``nonzero``, a slice between places that are data) are read back from it, under the
        name of their symbol, before anything needs them."""
        reads: list[tuple[str, Any, tuple[int, ...]]] = [
            ("aten::sym_size.int", self.sizes.told(n), (d,)) for d, n in enumerate(value.shape)
        ]
        if isinstance(offset := value.storage_offset(), torch.SymInt):
            reads.append(("aten::sym_storage_offset.default", self.sizes.told(offset), ()))
        for target, size, where in reads:
            if self.is_new(size):
                self.told.add(size)
                yield Library(
                    (size.name,), (None,), target, (Ref(found.name), *where), (), "size decided by data", origins
                )


def _given(size: Any) -> sympy.Symbol | None:
    match size:
        case sympy.Symbol() | sympy.Eq(args=(sympy.Symbol(), sympy.S.One)):
            return next(iter(size.free_symbols))
    return None
