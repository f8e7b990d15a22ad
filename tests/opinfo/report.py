"""What a sweep found: differences by cause for those who mend them, and the table of operators for users."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .cases import DTYPES, Job

Records = Mapping[tuple[Job, int], dict[str, Any]]
FAULTS = ("wrong", "raises", "crash", "hang")
SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool", "complex64": "c64",
}  # fmt: skip

_HEAD = """# Operators

Every operator of torch's own database (`op_db` of torch {version}, on a CPU), compiled and compared with eager: values,
element types, shapes, strides and gradients. `python -m tests.opinfo` runs the comparison and `--table` writes this
page; it is not edited by hand.

**{share:.2%}** of {samples:,} samples equal eager. Of {total} operators {generated} run in generated kernels, {views}
are views or sizes that cost nothing, {both} need both kernels and library calls (in some of their samples, or side by
side), {library} are library calls. Half types are compared within the error of eager's own rounding.

| operator | runs as | library calls | element types that agree | differences |
|---|---|---|---|---|
"""


def differences(records: Records) -> str:
    """Every fault, those of one operator together, then the sums."""
    faults: dict[str, list[tuple[Job, int, dict[str, Any]]]] = defaultdict(list)
    for (job, sample), record in records.items():
        if record["status"] in FAULTS:
            faults[job.op].append((job, sample, record))
    lines: list[str] = []
    for op, found in sorted(faults.items()):
        lines.append(f"{op}: {len(found)} samples")
        kinds = Counter((r["status"], re.sub(r"\d+", "#", r["detail"])[:160]) for _, _, r in found)
        for (status, text), count in kinds.most_common(3):
            job, sample = next(
                (j, n) for j, n, r in found if (r["status"], re.sub(r"\d+", "#", r["detail"])[:160]) == (status, text)
            )
            lines.append(f"    {count} {status} ({job.dtype} {job.mode} [{sample}]): {text}")
    counts = Counter(r["status"] for r in records.values())
    lines.append(f"{len(records)} samples: " + ", ".join(f"{n} {k}" for k, n in counts.most_common()))
    good = counts["equal"]
    bad = sum(counts[s] for s in FAULTS)
    if good + bad:
        lines.append(f"equal to eager: {good / (good + bad):.2%} of {good + bad}")
    return "\n".join(lines)


def kind_of(found: list[dict[str, Any]]) -> str:
    """How an operator runs, from its outcomes: ``generated``, ``view``, ``library`` or ``generated and library``."""
    kernels = any(r["kernels"] for r in found)
    library = any(r["library"] for r in found)
    if kernels and library:
        return "generated and library"
    return "generated" if kernels else "library" if library else "view"


def write_table(records: Records, path: Path) -> None:
    """The page of operators."""
    by_op: dict[str, list[tuple[Job, dict[str, Any]]]] = defaultdict(list)
    for (job, _), record in records.items():
        by_op[job.op].append((job, record))
    rows: list[str] = []
    counts: Counter[str] = Counter()
    for op in sorted(by_op):
        tried = [(j, r) for j, r in by_op[op] if r["status"] not in ("invalid", "torch")]
        forward = [r for j, r in tried if j.mode == "forward" and j.dtype != "complex64"]
        if not tried:
            continue
        kind = kind_of(forward or [r for _, r in tried])
        counts[kind] += 1
        library = Counter(op for r in forward for op in r["library"])
        names = ", ".join(f"`{name.removeprefix('aten::')}`" for name, _ in library.most_common(3))
        rows.append(f"| `{op}` | {kind} | {names} | {_types(tried)} | {_faults(tried)} |")
    total = sum(counts.values())
    said = {r["status"]: 0 for r in records.values()}
    for r in records.values():
        said[r["status"]] += 1
    good, bad = said.get("equal", 0), sum(said.get(s, 0) for s in FAULTS)
    version = torch.__version__.split("+")[0]
    head = _HEAD.format(
        version=version, share=good / max(good + bad, 1), samples=good + bad, total=total,
        generated=counts["generated"], views=counts["view"], both=counts["generated and library"],
        library=counts["library"],
    )  # fmt: skip
    path.write_text(head + "\n".join(rows) + "\n")


def _types(found: list[tuple[Job, dict[str, Any]]]) -> str:
    bad = {j.dtype for j, r in found if r["status"] in FAULTS}
    good = [d for d in DTYPES if d not in bad and any(j.dtype == d for j, _ in found)]
    return " ".join(SHORT[d] for d in good)


def _faults(found: list[tuple[Job, dict[str, Any]]]) -> str:
    faults = [(j, r) for j, r in found if r["status"] in FAULTS]
    if not faults:
        return ""
    kinds = Counter((SHORT[j.dtype], j.mode, r["status"]) for j, r in faults)
    return "; ".join(f"{d} {mode}: {n} {status}" for (d, mode, status), n in kinds.most_common(4))
