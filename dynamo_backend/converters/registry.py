"""The table of converters: which function turns a call of an ATen op into nodes of the IR.

Adding an op is one decorated function in the file of its family::

    @converter("aten.relu.default")
    def relu(ctx: ImportContext, x: Tensor) -> Tensor:
        return ctx.pointwise(lambda v: call("maximum", v, const(0, v.dtype)), x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Converter: TypeAlias = Callable[..., Any]

# Filled while the family files are imported and never afterwards.
CONVERTERS: dict[str, Converter] = {}
# Ops that stay library calls on purpose, with the reason that reports give.
LIBRARY_REASONS: dict[str, str] = {}


def converter(*targets: str) -> Callable[[Converter], Converter]:
    """Register a converter for ATen overloads such as ``"aten.add.Tensor"``.

    The function is called as ``fn(ctx, *args, **kwargs)`` with the node's arguments, tensors as ``Tensor`` and sizes
    as sympy expressions, and returns one ``Tensor`` or a tuple with one entry per result (None where the result is
    never read). It raises ``NoConversion`` to leave the call to the library.
    """

    def register(fn: Converter) -> Converter:
        for target in targets:
            if target in CONVERTERS:
                raise AssertionError(f"two converters for {target}")
            CONVERTERS[target] = fn
        return fn

    return register


def library(reason: str, *targets: str) -> None:
    """Declare ops that are left to torch's libraries, and why."""
    for target in targets:
        LIBRARY_REASONS[target] = reason


class NoConversion(Exception):
    """Raised by a converter for a call that it cannot express; the call goes to the library with this text as the
    reason.
    """
