"""What a sweep found: differences by cause for those who mend them, and the table of operators for users."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .cases import DTYPES, MODES, REFUSALS, Job, jobs
from .sweep import FAULTS, latest

Records = Mapping[tuple[Job, int], dict[str, Any]]
# Differences that are understood: what a sample's job, status and detail say, and why it is so.
CAUSES: dict[str, str] = {
    r"(copysign|div.floor_rounding|floor_divide) float32 overlapping wrong": (
        "torch's fake tensors, which say what strides a compiled result has, order the dimensions otherwise than eager"
    ),
}
SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool", "complex64": "c64",
}  # fmt: skip
# Modes as they are written in the page, and in its rows.
SAID = {
    "forward": ("forward", ""), "gradient": ("gradient", "g"), "inplace": ("in place", "i"), "out": ("out", "o"),
    "transposed": ("transposed", "t"), "sliced": ("sliced", "s"), "expanded": ("expanded", "x"),
    "overlapping": ("overlapping", "v"), "channels_last": ("channels last", "c"), "empty": ("empty", "e"),
    "errors": ("errors", ""), "refused": ("refused types", ""),
}  # fmt: skip

_HEAD = """# Operators

Every operator of torch's own database (`op_db` of torch {version}, on a CPU), compiled with `backend="mlc"` and
compared with eager: values, element types, shapes, strides and gradients. Half types are compared within the error of
eager's own rounding. This page is not edited by hand: `python -m tests.opinfo --table` writes it from the results of

```sh
{commands}
```

and of what a sweep for all samples had got to when it was stopped. A sweep goes on where it was stopped, so samples are
of several commits.

**{share:.3%}** of {samples:,} samples equal eager.

| runs as | operators | share |
|---|---|---|
| generated: kernels alone | {generated} | {generated_share:.1%} |
| view: views and sizes, which cost nothing | {view} | {view_share:.1%} |
| generated and library: both, side by side or in different samples | {both} | {both_share:.1%} |
| library: calls of torch alone | {library} | {library_share:.1%} |
| eager: torch breaks its graph at the operator | {eager} | {eager_share:.1%} |

This is what was seen in the forward samples that were compared: an operator may need a library call for others. Random
operators are compared under `options={{"fallback_random": True}}`, where they call torch's; how they run is what is
seen without, where the numbers are others and only element types, shapes and strides are compared.

## What was compared

`in place` is the variant that writes to its operand, `out` the one that writes to a tensor it is given. The six modes
after those are forward, with operands that lie otherwise in memory: with the first dimension fastest; in the middle of
a larger tensor; with stride 0; with rows that overlap; with channels that lie together; without elements. `errors` are
the calls of which the database says that they raise (wrong indices, shapes, devices, types), `refused types` those on
an element type that eager has no kernel for: an error of eager's class is asked for. Of the other modes, samples of
which eager itself raises are left out. Where torch's own tracing fails, or differs from eager, so does the backend
`aot_eager`, which compiles nothing; such samples count as neither. A sweep that was stopped has fewer samples of its
later operators, or none: the columns say how many there were.

| mode | element type | operators | samples | equal | differ | torch's tracing fails |
|---|---|---|---|---|---|---|
{sums}

## What differs

{faults}

## Operator by operator

The last column has the modes in which all samples agree: {legend}.

| operator | runs as | library calls | element types that agree | modes |
|---|---|---|---|---|
{rows}
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
        lines.append(f"equal to eager: {good / (good + bad):.3%} of {good + bad}")
    return "\n".join(lines)


def kind_of(found: list[dict[str, Any]]) -> str:
    """How an operator runs, from its outcomes: ``generated``, ``view``, ``library``, ``generated and library``, or
    ``eager``, where torch captures nothing.
    """
    if not any(r["graphs"] for r in found):
        return "eager"
    kernels = any(r["kernels"] for r in found)
    library = any(r["library"] for r in found)
    if kernels and library:
        return "generated and library"
    return "generated" if kernels else "library" if library else "view"


def write_table(written: Sequence[dict[str, Any]], path: Path) -> None:
    """The page of operators, from what a sweep has written down."""
    records = latest(written)
    by_op: dict[str, list[tuple[Job, dict[str, Any]]]] = defaultdict(list)
    for (job, _), record in records.items():
        if job.mode not in REFUSALS and record["status"] not in ("invalid", "torch"):
            by_op[job.op].append((job, record))
    rows: list[str] = []
    kinds: Counter[str] = Counter()
    for op, tried in sorted(by_op.items()):
        forward = [r for j, r in tried if j.mode == "forward" and j.dtype != "complex64"]
        kind = kind_of(forward or [r for _, r in tried])
        kinds[kind] += 1
        library = Counter(name for r in forward for name in r["library"])
        names = ", ".join(f"`{name.removeprefix('aten::')}`" for name, _ in library.most_common(3))
        rows.append(f"| `{op}` | {kind} | {names} | {_types(tried)} | {_modes(tried)} |")
    counts = Counter(r["status"] for r in records.values())
    good, bad = counts["equal"], sum(counts[s] for s in FAULTS)
    total = max(len(by_op), 1)
    both = kinds["generated and library"]
    text = _HEAD.format(
        version=torch.__version__.split("+")[0], commands="\n".join(commands(written)),
        share=good / max(good + bad, 1), samples=good + bad,
        generated=kinds["generated"], generated_share=kinds["generated"] / total,
        view=kinds["view"], view_share=kinds["view"] / total, both=both, both_share=both / total,
        library=kinds["library"], library_share=kinds["library"] / total,
        eager=kinds["eager"], eager_share=kinds["eager"] / total,
        legend=", ".join(f"{letter} {said}" for said, letter in SAID.values() if letter),
        sums="\n".join(_sums(records)), faults=_faults(records), rows="\n".join(rows),
    )  # fmt: skip
    path.write_text(text)


def commands(written: Iterable[dict[str, Any]]) -> list[str]:
    """The calls of this program that make such records, of those element types and modes of which every job is
    finished; the rest is what a longer sweep, or one of some operators, got to."""
    bounds: dict[Job, float] = {}
    for r in written:
        if r["sample"] is None:
            bound = r["most"] if 0 < r["most"] <= r["samples"] else math.inf
            bounds[Job.of(r)] = max(bounds.get(Job.of(r), 0), bound)
    most: dict[tuple[str, str], float] = {}
    for job, bound in bounds.items():
        most[job.dtype, job.mode] = min(most.get((job.dtype, job.mode), math.inf), bound)
    most = {pair: n for pair, n in most.items() if bounds.keys() >= set(jobs((pair[0],), (pair[1],)))}
    alike: dict[tuple[tuple[str, ...], float], list[str]] = defaultdict(list)
    for dtype in DTYPES:
        for count in sorted({n for (d, _), n in most.items() if d == dtype}):
            alike[tuple(m for m in MODES if most.get((dtype, m)) == count), count].append(dtype)
    return [
        f"python -m tests.opinfo --dtypes {','.join(dtypes)} --modes {','.join(modes)}"
        + ("" if count == math.inf else f" --samples {count}")
        for (modes, count), dtypes in alike.items()
    ]


def _sums(records: Records) -> Iterator[str]:
    for mode in MODES:
        for dtype in DTYPES:
            found = [(j.op, r["status"]) for (j, _), r in records.items() if (j.mode, j.dtype) == (mode, dtype)]
            counts = Counter(status for _, status in found if status != "invalid")
            if counts:
                operators, faults = len({op for op, s in found if s != "invalid"}), sum(counts[s] for s in FAULTS)
                yield (
                    f"| {SAID[mode][0]} | {dtype} | {operators} | {counts.total()} | {counts['equal']} | {faults} "
                    f"| {counts['torch']} |"
                )


def _types(found: list[tuple[Job, dict[str, Any]]]) -> str:
    bad = {j.dtype for j, r in found if r["status"] in FAULTS}
    good = [d for d in DTYPES if d not in bad and any(j.dtype == d for j, _ in found)]
    return " ".join(SHORT[d] for d in good)


def _modes(found: list[tuple[Job, dict[str, Any]]]) -> str:
    tried, bad = {j.mode for j, _ in found}, {j.mode for j, r in found if r["status"] in FAULTS}
    return "".join(SAID[mode][1] for mode in MODES if mode in tried - bad)


def _faults(records: Records) -> str:
    """Each difference, those of one operator, mode and cause in one line."""
    alike: dict[tuple[str, str, str], list[tuple[Job, dict[str, Any]]]] = defaultdict(list)
    for (job, _), r in records.items():
        if r["status"] in FAULTS:
            alike[job.op, job.mode, cause_of(job, r)].append((job, r))
    if not alike:
        return "Nothing that was compared."
    lines = ["| operator | mode | element types | samples | cause |", "|---|---|---|---|---|"]
    for (op, mode, cause), found in sorted(alike.items()):
        types = " ".join(SHORT[d] for d in DTYPES if any(j.dtype == d for j, _ in found))
        lines.append(f"| `{op}` | {mode} | {types} | {len(found)} | {cause} |")
    return "\n".join(lines)


def cause_of(job: Job, record: dict[str, Any]) -> str:
    """Why a sample differs, as far as anybody knows; else what was seen."""
    for pattern, text in CAUSES.items():
        if re.search(pattern, f"{job} {record['status']}: {record['detail']}"):
            return text
    seen = record["detail"].replace("|", "\\|").replace("\n", " ")[:160]
    return f"{record['status']}: {seen}"
