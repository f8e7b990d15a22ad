"""What `torch-mlc doctor` found, one line each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

Mark: TypeAlias = Literal["ok", "warning", "failed", "not done"]
MARKS: tuple[Mark, ...] = get_args(Mark)
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: of a check of a stage, ``what`` was looked at, what was ``found``, and how to ``mend`` it ("" where
    nothing needs to be). ``figures`` are numbers in plain JSON. "not done" is neither good nor bad."""

    stage: str
    check: str
    mark: Mark
    what: str
    found: str
    mend: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def row(mark: Mark, found: str, mend: str = "", *, what: str = "", **figures: Any) -> Row:
    """A finding as a check tells it; ``what`` is the check's name unless given."""
    return {"mark": mark, "what": what, "found": found, "mend": mend, "figures": figures}


def finding_of(stage: str, check: str, told: Row) -> Finding:
    """The finding in a row of a process: one that a check told, an error that it raised, or how it was lost."""
    if "lost" in told:
        return Finding(stage, check, "failed", check, told["lost"], _REPORT, {"output": told.get("output", "")})
    if "error" in told:
        return Finding(stage, check, "failed", check, told["error"], _REPORT)
    if told.get("mark") not in MARKS:
        return Finding(stage, check, "failed", check, f"told something that is no finding: {told}", _REPORT)
    return Finding(
        stage, check, told["mark"], told.get("what") or check, told["found"], told.get("mend", ""),
        told.get("figures", {}),
    )  # fmt: skip


_REPORT = "report it, with what `torch-mlc doctor --json` prints"
