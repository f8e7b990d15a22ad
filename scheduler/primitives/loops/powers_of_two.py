"""powers_of_two."""

from __future__ import annotations

import math
from dataclasses import replace

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Expr, call, const, rewrite, walk
from ....ir.nest.loops import LoopNest, Statement, Store, Update
from ...error import ScheduleError
from ..analysis.tree import find_block, with_node

FUNCTIONS = ("exp2", "exp2_approx")


def powers_of_two(nest: LoopNest, block: str, function: str) -> LoopNest:
    """Write exponentials of float32 in a block as powers of two of what is multiplied by log2(e).

    Rewrites::

        for i in range(n):                    for i in range(n):
            p[i] = exp(a[i] - t[i])    ->         p[i] = exp2((a[i] - t[i]) * 1.442695)

    A GPU has an instruction for powers of two, and takes several more for an exponential. ``function`` is "exp2", or
    "exp2_approx", which may take results below 2**-126 for zero. The result for x differs by about ``|x| * 2**-24``
    more, relative: of weights beside their maximum, small ones alone by much.

    Requires: the block has such an exponential.
    Raises: ScheduleError.    Source: Dao et al. 2022, whose kernels take powers of two.
    """
    asked = f"powers_of_two({block}, {function!r})"
    node, _ = find_block(nest, block, asked)
    if function not in FUNCTIONS:
        raise ScheduleError(asked, f"function is {function!r}, not one of {', '.join(FUNCTIONS)}", nest, block)
    body = tuple(_changed(s, function) for s in node.body)
    if body == node.body:
        raise ScheduleError(asked, "it has no exponential of float32", nest, block)
    return with_node(nest, node, replace(node, body=body))


def has_exponential(value: Expr) -> bool:
    """Whether a value has an exponential that can be written as a power of two."""
    return any(isinstance(e, Call) and e.fn == "exp" and e.dtype is DType.FLOAT32 for e in walk(value))


def _changed(statement: Statement, function: str) -> Statement:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Call) and e.fn == "exp" and e.dtype is DType.FLOAT32:
            inner = rewrite(e.args[0], leaf)
            return call(function, call("mul", inner, const(DType.FLOAT32.rounded(math.log2(math.e)), DType.FLOAT32)))
        return None

    if isinstance(statement, Store):
        return replace(statement, value=rewrite(statement.value, leaf))
    assert isinstance(statement, Update)
    return replace(statement, values=tuple(rewrite(v, leaf) for v in statement.values))
