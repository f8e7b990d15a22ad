"""The page docs/primitives.md, made of the primitives' docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap

from . import schedule
from .schedule import PRIMITIVES, Schedule

_HEAD = """# Schedule primitives

Made from the docstrings in `scheduler/primitives/` by `pytest tests/scheduler/test_primitives_docs.py --update-golden`;
do not edit.

`Schedule(nest)` rewrites a loop nest step by step. Loops are named by their variables, blocks by their names;
`get_blocks()` and `get_loops(block)` list them. A primitive that would change what the nest computes, or that cannot be
expressed, raises `ScheduleError` and leaves the nest as it was; the error's text shows the nest with the culprit
underlined. What was applied is `schedule.trace`, which turns to JSON (`to_json`, `from_json`) and is applied to an
equal nest by `replay(trace, nest)`.

What the kinds of loops mean. On a GPU a loop bound to `blockIdx.x`, `.y` or `.z` is a program id; loops bound to
`threadIdx.x` are the axes of a program's tile, which Triton lays over `num_warps × 32` threads (single threads are
Triton's); serial loops are loops. On a CPU a parallel loop is a team of threads, a vectorized one SIMD lanes, an
unrolled one is written out. A `LOCAL` buffer is a register tile on a GPU and, on a CPU, scratch of what one iteration
of the loops around its uses touches.
"""


def primitives_markdown() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(section(name) for name in PRIMITIVES)])


def section(name: str) -> str:
    """One primitive: its signature as a method of Schedule, and its docstring as Markdown."""
    signature = inspect.signature(getattr(Schedule, name))
    shown = [str(p.replace(annotation=p.empty)) for k, p in signature.parameters.items() if k != "self"]
    doc = inspect.getdoc(getattr(schedule, name)) or ""
    return f"## {name}\n\n`{name}({', '.join(shown)})`\n\n{_markdown(doc)}\n"


def _markdown(doc: str) -> str:
    paragraphs: list[str] = []
    code: list[str] = []
    for line in doc.splitlines():
        if line.startswith("    ") or (code and not line):
            code.append(line)
            continue
        if code:
            paragraphs += _fenced(code)
            code = []
        if line != "Rewrites::":
            for label in ("Requires:", "Raises:", "Returns:"):
                line = f"\n**{label}**{line.removeprefix(label)}" if line.startswith(label) else line
            paragraphs.append(line.replace("``", "`").replace("    Source:", "\\\n**Source:**"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*paragraphs, *_fenced(code)])).strip()


def _fenced(code: list[str]) -> list[str]:
    text = textwrap.dedent("\n".join(code)).strip("\n")
    return ["```python", text, "```", ""] if text else []
