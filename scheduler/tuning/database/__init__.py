"""The tuning database: what was measured and predicted, of which workloads, on which targets, in which sessions."""

from .database import BUSY_SECONDS, Database, Records
from .rows import NO_PART, Measured, Part, Provenance, Record, Session, Tuned, Verdict, Workload, target_key

__all__ = [
    "BUSY_SECONDS", "NO_PART", "Database", "Measured", "Part", "Provenance", "Record", "Records", "Session", "Tuned",
    "Verdict", "Workload", "target_key",
]  # fmt: skip
