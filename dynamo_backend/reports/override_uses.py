"""Which of a user's schedules were for a kernel, and the warning about those that were not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache

from ...scheduler.schedule.overrides import Overrides


class OverrideWarning(UserWarning):
    """A schedule that was given by hand is for none of the kernels that were compiled."""


class OverrideUses:
    """What happened in this process to the schedules that were given."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._told: set[str] = set()
        self._waiting: list[str] = []

    def tell(self, overrides: Overrides, taken: Iterable[str], graph: str, complete: bool) -> None:
        """Note what a graph took. Once a schedule, warn that it was for no kernel so far.

        A forward graph is not ``complete``: a schedule may be for the backward, which is compiled after it.
        """
        self._taken.update(taken)
        self._waiting.append(graph)
        if not complete:
            return
        for override in map(str, overrides.items):
            if override not in self._taken and override not in self._told:
                self._told.add(override)
                warnings.warn(
                    OverrideWarning(
                        f"torch-mlc: {override} is for none of the kernels of {', '.join(self._waiting)}; "
                        "torch_mlc.explain prints the hashes that there are"
                    ),
                    stacklevel=2,
                )
        self._waiting.clear()


@lru_cache(maxsize=1)
def override_uses() -> OverrideUses:
    """The one of this process."""
    return OverrideUses()
