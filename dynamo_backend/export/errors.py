"""Why a program cannot become a library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.errors import MlcError


class ExportError(MlcError):
    """A program cannot be exported; the text says what of it, where in the model, why, and how to mend it."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One thing that no library can do: an op, the line of the model, the reason, and how to mend it."""

    op: str
    line: str
    reason: str
    mend: str = ""

    def __str__(self) -> str:
        place = f" at {self.line}" if self.line else ""
        mend = f" ({self.mend})" if self.mend else ""
        return f"{self.op}{place}: {self.reason}{mend}"


def refuse(name: str, refusals: Iterable[Unsupported]) -> None:
    """Raise ExportError with every refusal of a function, where there are any."""
    found = list(dict.fromkeys(refusals))
    if not found:
        return
    count = (
        "an operation that a library cannot do"
        if len(found) == 1
        else f"{len(found)} operations that a library cannot do"
    )
    told = "".join(f"\n  {r}" for r in found)
    raise ExportError(
        f"{name} has {count}, since nothing but kernels of its own is in it:{told}\n"
        "To mend: write these in operations that become kernels, or keep them outside of the exported program."
    )
