"""What passes over one tensor function may ask of the compilation that they are part of."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.function.function import TensorFunction
from ...ir.passes import Setting
from ...ir.target import Target


@dataclass(frozen=True, slots=True)
class FunctionContext:
    """``given`` is the function before the first pass; ``target`` the machine that it is compiled for, None where
    nobody says; ``fast`` whether it need not round where eager does."""

    given: TensorFunction
    target: Target | None = None
    fast: bool = False


# What a scatter names is kept as it is.
NO_SCATTER: Setting[FunctionContext] = Setting("no scatter", lambda c: not c.given.scatters)
# Exact functions are what eager has.
APPROXIMATIONS_PAY: Setting[FunctionContext] = Setting(
    "fast numerics, for a target, all of which have shorter code for approximations",
    lambda c: c.fast and c.target is not None,
)
