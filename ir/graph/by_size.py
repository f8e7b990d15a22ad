"""A library call that has two forms by a size: which of two ops is called, a call says when it runs.

Two libraries that compute the same may each be faster at some sizes. Where those vary, a program has both calls, and a
comparison in front of them: no second program and no guard. It is a library node whose ``args`` hold both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy

from .graph import Library, Node

BY_SIZE = "mlc::by_size"


@dataclass(frozen=True, slots=True)
class Forms:
    """The call ``fewer`` where ``size`` is below ``least``, and ``more`` elsewhere."""

    size: sympy.Expr
    least: int
    fewer: Library
    more: Library

    def at(self, size: int) -> Library:
        """The call that is made at a size."""
        return self.fewer if size < self.least else self.more


def by_size(size: sympy.Expr, least: int, fewer: Library, more: Library) -> Library:
    """Both calls as one node, which has the results of both. Neither has keywords."""
    assert fewer.names == more.names and fewer.types == more.types and not (fewer.kwargs or more.kwargs)
    args = (size, least, fewer.target, fewer.args, more.target, more.args)
    return replace(more, target=BY_SIZE, args=args)


def forms_of(node: Node) -> Forms | None:
    """The two calls of such a node; None where it is another."""
    if not isinstance(node, Library) or node.target != BY_SIZE:
        return None
    size, least, few, few_args, many, many_args = node.args
    fewer, more = replace(node, target=few, args=tuple(few_args)), replace(node, target=many, args=tuple(many_args))
    return Forms(size, int(least), fewer, more)


def call_at(node: Library, hint: Callable[[sympy.Expr], int]) -> Library:
    """The call that a node is at typical sizes, itself where it has one form."""
    forms = forms_of(node)
    return node if forms is None else forms.at(hint(forms.size))


__all__ = ["BY_SIZE", "Forms", "by_size", "call_at", "forms_of"]
