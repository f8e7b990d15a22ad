"""The page docs/primitives.md, made from the primitives' docstrings:
``python -m torch_mlc.scheduler.schedule.docs``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import dedent
from typing import Any

from ...ir.nest.hints import HINTS, Hint
from ...ir.nest.kinds import LoopKind
from ..primitives.loops.annotate import annotate
from ..primitives.loops.blockize import blockize
from ..primitives.loops.fuse import fuse
from ..primitives.loops.kind import bind, parallel, unroll, vectorize
from ..primitives.loops.merge import merge
from ..primitives.loops.partition import partition
from ..primitives.loops.pipeline import pipeline
from ..primitives.loops.powers_of_two import powers_of_two
from ..primitives.loops.reorder import reorder
from ..primitives.loops.sample import sample_categorical, sample_perfect_tile
from ..primitives.loops.split import split
from ..primitives.loops.tensorize import tensorize
from ..primitives.memory.atomic import atomic
from ..primitives.memory.cache_read import cache_read
from ..primitives.memory.cache_window import cache_window
from ..primitives.memory.cache_write import cache_write
from ..primitives.memory.pack import pack
from ..primitives.memory.pad import pad
from ..primitives.memory.reorder_storage import reorder_storage
from ..primitives.memory.set_scope import set_scope
from ..primitives.memory.transform_layout import transform_layout
from ..primitives.placement.compute_at import compute_at
from ..primitives.placement.compute_inline import compute_inline
from ..primitives.placement.reverse_compute_at import reverse_compute_at
from ..primitives.placement.reverse_compute_inline import reverse_compute_inline
from ..primitives.reductions.decompose_online import decompose_online
from ..primitives.reductions.decompose_reduction import decompose_reduction
from ..primitives.reductions.fuse_reductions import fuse_reductions
from ..primitives.reductions.rfactor import rfactor
from .schedule import Schedule

SECTIONS: tuple[tuple[str, tuple[Callable[..., Any], ...]], ...] = (
    ("Loops", (split, fuse, reorder, merge, partition)),
    ("What a loop becomes", (bind, parallel, vectorize, unroll)),
    ("Where a block is computed", (compute_at, reverse_compute_at, compute_inline, reverse_compute_inline)),
    ("Copies nearer by", (cache_read, cache_write, pack, cache_window)),
    ("Reductions", (rfactor, decompose_reduction, fuse_reductions, decompose_online)),
    ("Layouts and tails", (transform_layout, pad)),
    ("Decisions", (sample_perfect_tile, sample_categorical)),
    ("Units and instructions", (blockize, tensorize, powers_of_two)),
    ("Hints and storage", (annotate, atomic, set_scope, reorder_storage, pipeline)),
)

_HEAD = """\
# Schedule primitives

Made by `python -m torch_mlc.scheduler.schedule.docs` from `scheduler/primitives/`; do not edit.

`s = Schedule(nest)` holds a loop nest, `s.nest`, and rewrites it step by step. Every primitive checks that the nest
keeps its meaning, and otherwise raises `ScheduleError`, whose `.reason` is one sentence and whose text shows the place
in the nest. What was applied is `s.trace`: it prints as Python, is kept as JSON, and `replay(trace, nest)` applies it
again. Loops and blocks are known by their names: `s.get_blocks()`, `s.get_loops(block)` (outermost first).

```python
from torch_mlc.scheduler.schedule.schedule import Schedule

s = Schedule(nest)
outer, inner = s.split("b0_i0", [None, 8])
s.parallel(outer)
s.vectorize(inner)
print(s.trace)
```

A reader may stand in a loop with its producer where one iteration of the loop has written, to the end, all that the
same iteration reads. That one rule decides `merge`, `compute_at`, `reverse_compute_at`, `reorder`, and which loops may
be parallel, vectorized or bound.
"""

_HINTS = """\
## Hints

What `annotate` attaches, and what some primitives and the lowering do. A name, a place, a kind of loop or a value that
is not here is refused: by `annotate`, and by what gives loops their kind, with a `ScheduleError`; in text by the
parser; and by the verifier. A hint for GPUs is refused by the emitter for CPUs, and the other way round. "May change"
is the most that a hint does to results. The table is `ir/nest/hints.py`.

| hint | of a | for | values | by default | given by | may change | what it says | read by |
|---|---|---|---|---|---|---|---|---|"""


def primitives_page() -> str:
    """The page docs/primitives.md."""
    parts = [_HEAD]
    for title, functions in SECTIONS:
        parts.append(f"## {title}\n")
        parts += [_entry(f) for f in functions]
    return "\n".join([*parts, _HINTS, *map(_row, HINTS.values())]) + "\n"


def _row(hint: Hint[Any]) -> str:
    name = hint.key("<parameter>") if hint.of_buffer else hint.name
    places, targets = " or ".join(p.value for p in hint.places), " and ".join(t.upper() for t in hint.targets)
    default = "" if hint.default == "" else f"`{hint.default!r}`"
    readers = ", ".join(f"`{r}`" for r in hint.readers)
    if hint.kinds and set(hint.kinds) != set(LoopKind):
        places += f" ({', '.join(k.value for k in hint.kinds)})"
    cells = (f"`{name}`", places, targets, hint.values, default, hint.given_by, hint.changes.value, hint.says, readers)
    return f"| {' | '.join(cells)} |"


def _entry(function: Callable[..., Any]) -> str:
    name = function.__name__
    method = inspect.signature(getattr(Schedule, name))
    shown = ", ".join(_parameter(p) for p in list(method.parameters.values())[1:])
    return f"### `{name}`\n\n```python\ns.{name}({shown}) -> {method.return_annotation}\n```\n\n{_markdown(function)}"


def _parameter(p: inspect.Parameter) -> str:
    star = "*" if p.kind is inspect.Parameter.VAR_POSITIONAL else ""
    default = "" if p.default is inspect.Parameter.empty else f" = {p.default!r}"
    return f"{star}{p.name}: {p.annotation}{default}".replace("sympy.Expr", "Expr")


def _markdown(function: Callable[..., Any]) -> str:
    """A docstring as Markdown: double back-quotes single, the literal block fenced, closing lines a list."""
    first, _, rest = (function.__doc__ or "").partition("\n")
    lines = [first, *dedent(rest).rstrip().splitlines()]
    out: list[str] = []
    inside = in_list = False
    for line in lines:
        if line.endswith("::"):
            out.append("```text")
            inside = True
        elif inside and (line.startswith("    ") or not line):
            # The blank line after "::" belongs to the notation; the one that ends the block comes before other text.
            if line or out[-1] != "```text":
                out.append(line.removeprefix("    "))
        else:
            if inside:
                while not out[-1]:
                    out.pop()
                out += ["```", ""]
                inside = False
            for key in ("Requires:", "Raises:"):
                if line.startswith(key):
                    line, in_list = f"- *{key[:-1]}*:{line.removeprefix(key)}", True
            in_list &= bool(line)
            out.append(("  " if in_list and not line.startswith("- ") else "") + line.replace("``", "`"))
    text = "\n".join(line.rstrip() for line in out).strip()
    return text.replace(".    Source: ", ".\n- *Source*: ").replace("\n\n- *Raises*", "\n- *Raises*") + "\n"


if __name__ == "__main__":
    print(primitives_page(), end="")
