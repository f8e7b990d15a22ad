"""What tuning needs of a database: what is known, and a place for what is measured."""

from __future__ import annotations

from typing import Protocol

from ....ir.target import Target
from ...schedule.trace import Trace
from .rows import Record, Session, Similar, Verdict, Workload


class Records(Protocol):
    """A tuning database, or what stands for one."""

    def lookup(self, workload: str, target: Target) -> Record | None:
        """The fastest schedule known, or None."""
        ...

    def measured(self, workload: str, target: Target) -> dict[str, float | None]:
        """Every schedule that these versions measured, by the JSON of its trace; None for one that failed."""
        ...

    def by_code(self, workload: str, target: Target) -> dict[str, Record]:
        """What is known of machine code on this part, whatever our sources were, by its hash."""
        ...

    def similar(self, workload: Workload) -> list[Similar]:
        """What was faster than the default, of any workload on any target, as far as its draft is known."""
        ...

    def record(
        self,
        workload: str | Workload,
        target: Target,
        trace: Trace,
        seconds: float | None = None,
        error: str = "",
        *,
        ratio: float | None = None,
        count: int = 1,
        sigma: float | None = None,
        verdict: Verdict | None = None,
        code_hash: str = "",
        against: str = "",
        session: Session | None = None,
        key: str = "",
        draft: str = "",
    ) -> None:
        """Keep one measurement, on disk before this returns."""
        ...
