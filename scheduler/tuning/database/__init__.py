"""The tuning database: what was measured and predicted, of which workloads, on which targets, in which sessions."""

from .database import BUSY_SECONDS, Database
from .decisions import GraphDecisions
from .records import Records
from .rows import (
    NO_PART,
    Part,
    Provenance,
    Record,
    Session,
    Similar,
    Told,
    Tuned,
    Verdict,
    Workload,
    target_key,
)

__all__ = [
    "BUSY_SECONDS",
    "NO_PART",
    "Database",
    "GraphDecisions",
    "Part",
    "Provenance",
    "Record",
    "Records",
    "Session",
    "Similar",
    "Told",
    "Tuned",
    "Verdict",
    "Workload",
    "target_key",
]  # fmt: skip
