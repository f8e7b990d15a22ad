"""``options={"memory_limit": …}``: graphs that would hold more than they may are refused, with what they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import sympy

from ...codegen.host.memory.liveness import Storage, peaks_of, storages
from ...codegen.host.steps.lines import origin_text
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.step import BindSize, LimitMemory
from ...ir.errors import MemoryLimitError
from ...ir.graph.facts import makers_of
from ...ir.graph.graph import Graph
from ..reports.report import bytes_text

# The largest tensors that an error tells of.
TOLD = 6


def limited(program: HostProgram, graph: Graph, limit: int, given: Collection[str] = ()) -> HostProgram:
    """The program, which refuses sizes that take more than ``limit`` bytes beyond its inputs before anything runs.

    ``given`` are inputs that count, since nobody else holds them: what a forward saved. Raises MemoryLimitError where
    fixed or typical sizes take more.
    """
    held = storages(program, given)
    peaks = peaks_of(held)
    value = typical(peaks, graph)
    told = f"{program.name} holds {_largest(peaks, graph)} bytes beyond parameters and the caller's inputs"
    allowed = f"memory_limit (MLC_MEMORY_LIMIT) is {bytes_text(limit)}.\n{_culprits(held, graph)}\n{MEND}"
    if value > limit:
        raise MemoryLimitError(f"{told}, {bytes_text(value)}{_at(graph)}; {allowed}")
    # Sizes that data decide are not known before anything runs.
    decided = tuple(p for p in peaks if p.free_symbols and p.free_symbols <= set(program.symbols))
    if not decided:
        return program
    bound = next(k for k, s in enumerate(program.steps) if not isinstance(s, BindSize))
    check = LimitMemory(decided, limit, f"{told}; {allowed}")
    return replace(program, steps=(*program.steps[:bound], check, *program.steps[bound:]))


MEND = (
    "To mend: smaller inputs, torch.utils.checkpoint around parts of the model, options={'loss_chunk': …} where logits "
    "are among them, or a higher limit."
)


def typical(peaks: Sequence[sympy.Expr], graph: Graph) -> int:
    """The greatest of some sums of bytes, at typical sizes."""
    return max((graph.symbols.hint(p) for p in peaks), default=0)


def _largest(peaks: Sequence[sympy.Expr], graph: Graph) -> sympy.Expr:
    return max(peaks, key=graph.symbols.hint) if peaks else sympy.S.Zero


def _at(graph: Graph) -> str:
    sizes = [f"{s.symbol} = {s.hint}" for s in graph.symbols.sizes if s.hint is not None]
    return f" at {', '.join(sizes)}" if sizes else ""


def _culprits(held: Sequence[Storage], graph: Graph) -> str:
    """What is held at the moment when it is most, the largest first, each with the lines of the model that make it."""
    hint = graph.symbols.hint
    now, highest, peak_at = 0, -1, 0
    ends = sorted(held, key=lambda s: s.end, reverse=True)
    for s in sorted(held, key=lambda s: s.begin):
        while ends[-1].end < s.begin:
            now -= hint(ends.pop().type.nbytes)
        now += hint(s.type.nbytes)
        if now > highest:
            highest, peak_at = now, s.begin
    most = [s for s in held if s.begin <= peak_at <= s.end]
    makers = makers_of(graph)
    lines = []
    for s in sorted(most, key=lambda s: -hint(s.type.nbytes))[:TOLD]:
        where = origin_text(next((makers[n].origins for n in s.names if n in makers), ()))
        shape = ", ".join(map(str, s.type.shape))
        lines.append(
            f"  {bytes_text(hint(s.type.nbytes)):>9}  {s.name}: {s.type.dtype.value}[{shape}]  {where}".rstrip()
        )
    rest = len(most) - len(lines)
    return "\n".join(["At its peak it holds:", *lines, *([f"  … and {rest} smaller tensors"] if rest > 0 else [])])
