"""What tuning needs of whoever runs candidates: code is built, runs once, and is timed in turns, or fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...ir.errors import MlcError
from ..schedule.schedule import Schedule
from .database import Verdict

# Seconds a call, or why there are none (it did not compile, it gave a wrong answer).
Measurement: TypeAlias = float | Exception


class MeasuringError(MlcError):
    """Nothing can be measured, whatever the candidate: the text says why."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A candidate that was built and ran once, with the default's results; ``code_hash`` is that of its machine
    code."""

    number: int
    code_hash: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no time of a candidate."""

    verdict: Verdict
    reason: str


class Measurer(Protocol):
    """Runs scheduled nests on the target, or predicts what that would take. All methods raise MeasuringError."""

    def enter(self, candidates: Sequence[Schedule]) -> Iterable[Entered | Failure]:
        """Build each, run it once and compare its results with those of the first; in order, each as soon as it is
        known."""
        ...

    def copy(self, number: int) -> Entered | Failure:
        """The same code once more, elsewhere in memory."""
        ...

    def samples(self, numbers: Sequence[int], rounds: int) -> Mapping[int, Sequence[float] | Failure]:
        """Seconds a call of each in so many rounds, or fewer, in which they take turns. One that ends there has a
        failure, whatever becomes of the others."""
        ...

    def leave(self, numbers: Sequence[int]) -> None:
        """Forget what takes part no more."""
        ...

    def close(self) -> None:
        """Give back what measuring holds."""
        ...
