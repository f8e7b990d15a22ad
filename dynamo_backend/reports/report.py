"""What ``torch_mlc.explain`` tells: every kernel, library call and missed fusion of a graph, as objects and as text.

Texts that are meant to be printed are such that standard output can show them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from ...codegen.kernel import KernelSource
from ...ir.function.function import TensorFunction
from ...ir.nest.loops import LoopNest
from ...ir.passes import StepRecord
from ...ir.target import Target
from ...ir.text.printer import show
from ...runtime.frozen.recipe import KeptResult
from ...runtime.machine_code.issue import IssueReport, issue_report
from ...runtime.model.predict import Prediction
from ...runtime.plain_text import counted, readable
from ...runtime.triton.compile import GpuBinary
from ...runtime.triton.report import ResourceReport
from ...scheduler.decisions import ChosenFor, DecisionRecord
from ...scheduler.decisions.decide import table
from ...scheduler.schedule.overrides import SHORT, workload_of
from ...scheduler.schedule.trace import Trace
from .costs import CostRow, bytes_text, cost_lines, together
from .flow import RunFlow
from .graph_traffic import GraphTraffic
from .predicted_run import PredictedRun, predicted_run
from .prediction import predicted
from .segments import contiguous_bytes
from .traffic import Traffic

_SHOWN, _NAMED = 8, 3
_BRACKETS = re.compile(r" \([^()]*\)")
_OPERANDS = re.compile(r"; nothing to read in packed form( \(.*\))?")


def _loops(lines: tuple[int, ...]) -> str:
    """Loops by their lines in the source, 0 where the compiler made one."""
    named = [f"the loop of line {n}" for n in dict.fromkeys(lines) if n]
    return " and ".join([*named, *(["a loop of the compiler's"] if 0 in lines else [])])


@dataclass(frozen=True, slots=True, repr=False)
class KernelReport:
    """One kernel.

    ``calls`` is how often the graph runs it; ``traffic`` is of one run. ``ops`` are the ATen ops in it and ``lines``
    the model lines that they come from; ``notes`` say why what could have been a library call is computed here.
    ``error`` is why it did not compile, and then its ATen ops run instead.
    ``nest`` is the kernel as it was lowered, ``scheduled`` what ``trace`` made of it for ``target``. ``resources`` is
    what the machine code, ``binary``, takes of a GPU; ``kernel`` is what it was compiled from. ``chosen`` says who
    chose the schedule, and ``candidates``, line by line, what tuning knows of others. A call over a table does on
    average ``rows`` times what the nest has at typical sizes, of which ``traffic`` tells.
    """

    name: str
    calls: int
    rule: str
    ops: tuple[str, ...]
    lines: tuple[str, ...]
    traffic: Traffic | None
    language: str = ""
    source: str = ""
    function: TensorFunction | None = None
    nest: LoopNest | None = None
    scheduled: LoopNest | None = None
    trace: Trace | None = None
    error: str = ""
    notes: tuple[str, ...] = ()
    target: Target | None = None
    resources: ResourceReport | None = None
    kernel: KernelSource | None = None
    binary: GpuBinary | None = None
    chosen: str = ""
    candidates: tuple[str, ...] = ()
    rows: float = 1.0

    def __repr__(self) -> str:
        runs = self.language or "ATen ops"
        return f"<Kernel {self.name}: {', '.join(self.ops)}; {self.rule or 'no rule'}, {runs}; print it>"

    @property
    def issue(self) -> IssueReport | None:
        """The instruction slots of a launch at typical sizes; None on CPUs, and where machine code cannot be read."""
        if self.binary is None or self.kernel is None or self.nest is None:
            return None
        symbols = self.nest.symbols
        return issue_report(self.binary, self.kernel, {s.name: symbols.hint(s) for s in symbols.symbols}, self.rows)

    @property
    def slots_a_byte(self) -> float | None:
        """Instruction slots for each byte that the kernel has to move: above its GPU's ``issued / bandwidth``
        (``Target.machine``; 7 to 8) it is bound by its instructions rather than by memory. None where it is not known
        how often a loop runs, as where data end it (``issue.guessed``)."""
        slots = self.issue.known_slots if self.issue is not None else None
        least = self.traffic.least * self.rows if self.traffic else 0
        return slots / least if slots is not None and least else None

    @property
    def bytes_in_flight(self) -> float | None:
        """Bytes of loads in flight on each multiprocessor while its threads wait for memory. Some 25 KB keep the memory
        of an H200 busy; a launch that reads no more than that in all cannot have it. None where machine code does not
        tell: on CPUs, and of tiles that are copied by descriptors."""
        issue, r = self.issue, self.resources
        if issue is None or r is None or r.occupancy is None or self.target is None:
            return None
        return issue.on_multiprocessor(r.threads, r.occupancy, self.target.machine)

    @property
    def prediction(self) -> Prediction | None:
        """The time of a launch at typical sizes by the model of ``runtime/model``, and what bounds it. None on CPUs,
        and where machine code cannot be read."""
        if self.binary is None or self.kernel is None or self.scheduled is None or self.target is None:
            return None
        return predicted(self.binary, self.kernel, self.scheduled, self.target, self.rows)

    @property
    def contiguous_bytes(self) -> int | None:
        """The least that lies together of what a warp asks for at a time, of the arrays that are most of the traffic:
        below 128 lines of the caches are fetched in part. None on CPUs."""
        if self.scheduled is None or self.traffic is None or self.target is None:
            return None
        return contiguous_bytes(self.scheduled, self.traffic, self.target.warp)

    @property
    def workload(self) -> str:
        """The hash of the kernel as it was lowered: under this name it is tuned, and may be scheduled by hand."""
        return "" if self.nest is None else workload_of(self.nest)

    @property
    def definition(self) -> str:
        """What the kernel computes, before any order of loops."""
        return "" if self.function is None else show(self.function)

    @property
    def loops(self) -> str:
        """The loop nest as it was lowered."""
        return "" if self.nest is None else show(self.nest)

    @property
    def schedule(self) -> str:
        """The primitives that the rule applied, one a line."""
        return "" if self.trace is None else str(self.trace)

    @property
    def script(self) -> str:
        """The schedule as a function for a script that ``torch.compile(options={"schedules": path})`` takes."""
        if self.trace is None or self.target is None:
            return ""
        told = [f"# {self.name}, by {self.rule}", *(f"# {line}" for line in self.lines)]
        head = f'@torch_mlc.schedule("{self.workload[:SHORT]}", target="{self.target.kind}")'
        steps = [f"    {step}" for step in self.trace.steps] or ["    pass"]
        return "\n".join([*told, head, "def _(s):", *steps])

    def show(self) -> str:
        """Everything about the kernel."""
        of = f", workload {self.workload}" if self.workload else ""
        parts = [f"== {self.name}: {self.calls} calls, rule {self.rule or 'none'}{of}"]
        parts += [f"   {line}" for line in self.lines]
        parts += [f"   decomposed: {note}" for note in self.notes]
        parts += [f"   scheduled {self.chosen}"] if self.chosen else []
        if self.error:
            parts.append(f"   ATen ops run instead: {self.error}")
        parts += [f"   takes {self.resources}"] if self.resources is not None else []
        slots = self.slots_a_byte
        parts += [f"   issues {slots:.2f} instruction slots a byte"] if slots is not None else []
        guessed = self.issue.guessed if self.issue is not None else ()
        parts += [f"   how often {_loops(guessed)} runs is not known, and once is taken"] if guessed else []
        parts += [f"   is predicted to take {self.prediction}"] if self.prediction is not None else []
        flight, segment = self.bytes_in_flight, self.contiguous_bytes
        parts += [f"   has {flight / 1024:.1f} KiB of loads in flight a multiprocessor"] if flight is not None else []
        parts += [f"   asks for {segment} contiguous bytes or more at a time"] if segment is not None else []
        scheduled = show(self.scheduled) if self.scheduled is not None else ""
        for title, text in (
            ("loops", self.loops),
            ("schedule", self.schedule),
            ("candidates", "\n".join(self.candidates)),
            ("scheduled", scheduled),
            (f"source ({self.language})", self.source),
        ):
            if text:
                parts += [f"-- {title}", text.rstrip()]
        return readable("\n".join(parts))


@dataclass(frozen=True, slots=True)
class LibraryReport:
    """Calls of one ATen op, why it is a library call, and the bytes that all of them read and write. ``seconds`` is
    what they take together on a GPU by its data sheet, None on CPUs."""

    op: str
    calls: int
    reason: str
    lines: tuple[str, ...] = ()
    moved: int = 0
    seconds: float | None = None

    @property
    def plain_reason(self) -> str:
        """The reason without what it tells of the form that operands are read in."""
        return _OPERANDS.sub("", self.reason)


@dataclass(frozen=True, slots=True)
class MissedFusion:
    """Two ops that read or make the same ``bytes`` in different kernels, and why."""

    first: str
    second: str
    reason: str
    bytes: int


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One of the programs of a graph with a size that varies: for which sizes, and the report of it; whether typical
    sizes are among them."""

    condition: str
    graph: GraphReport
    is_typical: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class GraphReport:
    """One graph: ``peak_bytes`` is the memory it holds at most beyond its inputs, in size symbols; ``times`` seconds by
    phase; ``traffic`` the bytes of one run, library calls among them. ``python`` says what of a host program that was
    to be machine code is not, and why; ``steps`` are what was done, in order. ``frozen`` is what is computed once and
    kept beside the parameters; ``flow`` are the calls of one run in their order; ``decisions`` what was chosen by cost
    or otherwise, that with most at stake first; ``numerics`` what keeps eager's, where that is told by places.

    Of a graph with ``variants``, one of which runs by its sizes, this is what the one does that runs at typical sizes,
    with the peak of all; ``proof`` shows that each size has exactly one, and ``shared_kernels`` are in several."""

    name: str
    target: str
    kernels: tuple[KernelReport, ...]
    libraries: tuple[LibraryReport, ...]
    not_fused: tuple[MissedFusion, ...]
    peak_bytes: sympy.Expr
    typical_peak: int
    times: Mapping[str, float]
    traffic: GraphTraffic
    program: str
    python: str = ""
    steps: tuple[StepRecord, ...] = ()
    frozen: tuple[KeptResult, ...] = ()
    flow: RunFlow = RunFlow()
    decisions: tuple[DecisionRecord, ...] = ()
    variants: tuple[VariantReport, ...] = ()
    proof: str = ""
    shared_kernels: int = 0
    numerics: tuple[str, ...] = ()

    def __repr__(self) -> str:
        launches = f"{counted(self.launches, 'launch', 'launches')} of {counted(len(self.kernels), 'kernel')}"
        calls = counted(sum(c.calls for c in self.libraries), "library call")
        return f"<Graph {self.name} for {self.target}: {launches}, {calls}; print it>"

    @property
    def fallbacks(self) -> tuple[KernelReport, ...]:
        """Kernels that did not compile."""
        return tuple(k for k in self.kernels if k.error)

    @property
    def record(self) -> str:
        """The steps that changed something, in order, those over single kernels together."""
        found: dict[tuple[str, str, int], list[StepRecord]] = {}
        for k, step in enumerate(self.steps):
            found.setdefault((step.level, step.name, 0 if step.of else k + 1), []).append(step)
        found = {key: changed for key, steps in found.items() if (changed := [s for s in steps if s.changed])}
        width = max((len(name) for _, name, _ in found), default=0)
        lines = [f"  {'step':{width}}  {'level':8}  {'ms':>7}  {'before':>6}  {'after':>6}"]
        for (level, name, _), steps in found.items():
            ms, many = (
                sum(s.seconds for s in steps) * 1e3,
                f"  of {counted(len(steps), 'kernel')}" if steps[0].of else "",
            )
            before, after = sum(s.before for s in steps), sum(s.after for s in steps)
            lines.append(f"  {name:{width}}  {level:8}  {ms:>7.2f}  {before or '':>6}  {after:>6}{many}")
        return "\n".join(lines)

    @property
    def decided(self) -> str:
        """The decisions as a table: time and bytes at stake by the cost model, places, what was chosen, what else there
        was and how many times as long that would take."""
        return "\n".join(table(self.decisions))

    @property
    def predicted(self) -> PredictedRun:
        """What is predicted of a run on a GPU, of kernels and library calls one after the other."""
        return predicted_run(self.kernels, self.libraries)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of what is computed once and kept between calls; the peak does not have them."""
        return sum(r.nbytes for r in self.frozen)

    @property
    def launches(self) -> int:
        return sum(k.calls for k in self.kernels)

    @property
    def moved(self) -> int:
        """Bytes that all kernels together read and write."""
        return sum(k.traffic.moved * k.calls for k in self.kernels if k.traffic is not None)

    @property
    def least(self) -> int:
        """The least bytes that these kernels had to move."""
        return sum(k.traffic.least * k.calls for k in self.kernels if k.traffic is not None)

    def __str__(self) -> str:
        calls = sum(c.calls for c in self.libraries)
        head = (
            f"{self.name} for {self.target}: {counted(self.launches, 'kernel launch', 'kernel launches')} "
            f"({counted(len(self.kernels), 'kernel')}), {counted(calls, 'library call')}, "
            f"peak memory {bytes_text(self.typical_peak)}"
        )
        symbols = f" = {self.peak_bytes} bytes" if self.peak_bytes.free_symbols else ""
        t, run = self.traffic, self.predicted
        moves = (
            f"  moves {bytes_text(t.kernels)} in kernels and {bytes_text(t.libraries)} in library calls, "
            f"{t.ratio:.2f} times the {bytes_text(t.compulsory)} of its inputs and outputs"
        )
        lines = [
            head + symbols,
            moves,
            *self._variant_lines(),
            *self._frozen_lines(),
            *self._cost_lines(run),
            *self._resource_lines(),
        ]
        lines += [f"  {line}" for line in run.lines]
        if self.python:
            lines.append(f"  host program: {self.python}")
        for k in self.fallbacks:
            lines.append(f"  fallback: {k.name} runs as {', '.join(k.ops)}, because {k.error.splitlines()[0]}")
        for d in self.decisions:
            if d.source is not ChosenFor.COST:
                lines.append(f"  decided {d.source.value}: {d.name} is {d.chosen} ({d.default} by cost)")
        lines += [f"  keeps eager's {told}" for told in self.numerics[:_SHOWN]]
        if len(self.numerics) > _SHOWN:
            lines.append(f"  … and {len(self.numerics) - _SHOWN} more in .numerics")
        lines += self._missed_lines()
        if self.times:
            spent = ", ".join(f"{name} {s * 1e3:.0f}" for name, s in self.times.items())
            lines.append(f"  compile time {sum(self.times.values()) * 1e3:.0f} ms: {spent}")
        return "\n".join(lines)

    def _variant_lines(self) -> list[str]:
        if not self.variants:
            return []
        width = max(len(v.condition) for v in self.variants)
        lines = [f"  {len(self.variants)} programs, one of which runs by the size; what follows is of that marked *:"]
        for v in self.variants:
            own, calls = v.graph, sum(c.calls for c in v.graph.libraries)
            mark = "*" if v.is_typical else " "
            lines.append(
                f"  {mark} {v.condition:{width}}  {counted(own.launches, 'kernel launch', 'kernel launches')} "
                f"({counted(len(own.kernels), 'kernel')}), {counted(calls, 'library call')}"
            )
        return [*lines, f"  {counted(self.shared_kernels, 'kernel')} in more than one; {self.proof}"]

    def _frozen_lines(self) -> list[str]:
        if not self.frozen:
            return []
        spared = sum(r.calls for r in self.frozen)
        head = f"  keeps {bytes_text(self.frozen_bytes)} between calls; {spared} ops are not computed again:"
        found: dict[str, list[KeptResult]] = {}
        for r in self.frozen:
            found.setdefault(r.told, []).append(r)
        lines = [f"    {len(rs):>3} x {bytes_text(sum(r.nbytes for r in rs)):>9}  {told}" for told, rs in found.items()]
        more = len(lines) - _SHOWN
        return [head, *lines[:_SHOWN], *([f"    … and {more} more in .frozen"] if more > 0 else [])]

    def _cost_lines(self, run: PredictedRun) -> list[str]:
        """Kernels and library calls in one table, what was tuned, and why things are where they are."""
        if not (self.kernels or self.libraries):
            return ["  nothing runs"]
        times = {name: calls * p.seconds for name, calls, p in run.kernels}
        rows = []
        for k in self.kernels:
            t = k.traffic
            moved, least, done = (t.moved * k.calls, t.least * k.calls, t.operations * k.calls) if t else (None,) * 3
            seconds, lines = times.get(k.name), k.lines or k.ops
            row = CostRow(k.name, k.calls, moved, least, done, seconds, k.rule or "ATen", k.workload[:SHORT], lines)
            rows.append(row)
        by_op: dict[str, list[LibraryReport]] = {}
        for c in self.libraries:
            by_op.setdefault(c.op, []).append(c)
        for op, calls in by_op.items():
            known = [c.seconds for c in calls if c.seconds is not None]
            lines = tuple(dict.fromkeys(line for c in calls for line in c.lines))
            moved, spent = sum(c.moved for c in calls), sum(known) if len(known) == len(calls) else None
            rows.append(CostRow(op, sum(c.calls for c in calls), moved, seconds=spent, rule="a library", lines=lines))
        told = cost_lines(rows)
        told += [f"  {k.name} is scheduled {k.chosen}" for k in self.kernels if k.chosen not in ("", "by default")]
        notes = together(((k.name, note) for k in self.kernels for note in k.notes), _NAMED)
        told += [f"  not left to a library: {line}" for line in notes]
        # In brackets stands what is so of one call alone; ``libraries`` have it.
        left = together(((c.op, _BRACKETS.sub("", c.plain_reason)) for c in self.libraries), _NAMED)
        return told + [f"  left to a library: {line}" for line in left]

    def _resource_lines(self) -> list[str]:
        """What the kernels take of a GPU, as their machine code says."""
        taking = [(k.name, k.resources) for k in self.kernels if k.resources is not None]
        if not taking:
            return []
        width = max(len("kernel"), *(len(name) for name, _ in taking))
        head = (
            f"  {'kernel':{width}}  {'registers':>9}  {'spills':>6}  {'shared':>9}  {'wide loads':>10}  {'stores':>6}"
        )
        lines = [f"{head}  {'wgmma':>5}  {'mma':>5}  {'threads':>7}  {'occupancy':>9}"]
        for name, r in taking:
            occupied = "?" if r.occupancy is None else f"{r.occupancy:.0%}"
            lines.append(
                f"  {name:{width}}  {r.registers:>9}  {r.spills:>6}  {bytes_text(r.shared):>9}  {r.wide_loads:>10.0%}  "
                f"{r.wide_stores:>6.0%}  {r.group_products:>5}  {r.warp_products:>5}  {r.threads:>7}  {occupied:>9}"
            )
        return lines

    def _missed_lines(self) -> list[str]:
        """What is not fused, by reason; reasons with most bytes first."""
        bytes_by: dict[str, int] = {}
        for m in self.not_fused:
            bytes_by[m.reason] = bytes_by.get(m.reason, 0) + m.bytes
        ordered = sorted(self.not_fused, key=lambda m: -bytes_by[m.reason])
        pairs = ((f"{m.first} with {m.second} ({bytes_text(m.bytes)} shared)", m.reason) for m in ordered)
        lines = [f"  not fused: {line}" for line in together(pairs, _NAMED)]
        rest = len(lines) - _SHOWN
        return [*lines[:_SHOWN], f"  … and {counted(rest, 'more reason')} in .not_fused"] if rest > 0 else lines

    def show(self, details: bool = False) -> str:
        """The table; with ``details`` the source, schedule and loops of every kernel and the host program too."""
        if not details:
            return str(self)
        steps = f"== steps\n{self.record}"
        return readable(
            "\n\n".join([str(self), steps, *(k.show() for k in self.kernels), f"== host program\n{self.program}"])
        )


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why Dynamo could not go on with one graph: its reason, in full, and the line of the model ("file:line: text")."""

    reason: str
    line: str = ""

    def __str__(self) -> str:
        told = next((line.strip() for line in self.reason.splitlines() if line.strip()), "no reason given")
        return f"graph break: {told}" + (f"\n  at {self.line}" if self.line else "")
