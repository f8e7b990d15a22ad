"""Two reports side by side: what is the same, what became more or less, and which schedules differ."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ....runtime.model.predict import microseconds
from ....runtime.plain_text import counted, readable
from ..model_report import Report
from ..report import GraphReport, KernelReport, bytes_text
from .html import framed, page_of, write_report

# Lines of a schedule's differences that the text shows.
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of both reports; None where one of them does not tell it. ``unit`` is "", "bytes" or "seconds"."""

    name: str
    first: float | None
    second: float | None
    unit: str = ""

    @property
    def ratio(self) -> float | None:
        """The second to the first."""
        return self.second / self.first if self.first and self.second is not None else None

    def __str__(self) -> str:
        ratio = f"  {self.ratio:.3f} x" if self.ratio is not None and self.ratio != 1 else ""
        return f"{self.name:32}  {self._text(self.first):>12}  {self._text(self.second):>12}{ratio}"

    def _text(self, value: float | None) -> str:
        if value is None:
            return "?"
        return bytes_text(value) if self.unit == "bytes" else microseconds(value) if self.unit else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Change:
    """A kernel of one graph or both. ``kind`` is "same", "changed", "gone" (of the first alone) or "new" (of the second
    alone); ``what`` says in words what changed, and ``schedule`` how its schedule differs, as lines of a diff."""

    kind: str
    name: str
    lines: tuple[str, ...]
    what: tuple[str, ...] = ()
    schedule: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class GraphComparison:
    """A graph of both reports: its figures, and its kernels."""

    name: str
    figures: tuple[Figure, ...]
    kernels: tuple[Change, ...]

    @property
    def changes(self) -> tuple[Change, ...]:
        """The kernels that are not the same."""
        return tuple(c for c in self.kernels if c.kind != "same")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Two reports of a model, graph by graph in their order. ``only`` names the graphs that one of them alone has."""

    graphs: tuple[GraphComparison, ...]
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return readable("\n\n".join(["\n".join(_text(g)) for g in self.graphs] + [f"only in {o}" for o in self.only]))

    def __repr__(self) -> str:
        changes = sum(len(g.changes) for g in self.graphs)
        graphs, kernels = counted(len(self.graphs), "graph"), counted(changes, "kernel")
        return f"<Comparison: {graphs}, {kernels} that are not the same; print it, or save it as a page>"

    def to_json(self, indent: int | None = None) -> str:
        """Everything that is told, as JSON."""
        return json.dumps(self._data(), indent=indent)

    def to_html(self) -> str:
        """The page as text."""
        return page_of(self._data(), str(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file: a page (``.html``), JSON (``.json``) or text (``.txt``).

        Raises: ValueError for another ending, OSError where the file cannot be written.
        """
        write_report(Path(path), {".html": self.to_html, ".json": partial(self.to_json, 1), ".txt": partial(str, self)})

    def _repr_html_(self) -> str:
        return framed(self.to_html())

    def _data(self) -> dict[str, Any]:
        return {
            "compared": True,
            "only": list(self.only),
            "graphs": [
                {
                    "name": g.name,
                    "figures": [
                        {"name": f.name, "first": f.first, "second": f.second, "unit": f.unit} for f in g.figures
                    ],
                    "kernels": [
                        {
                            "kind": c.kind, "name": c.name, "lines": list(c.lines), "what": list(c.what),
                            "schedule": list(c.schedule),
                        }
                        for c in g.kernels
                    ],
                }
                for g in self.graphs
            ],
        }  # fmt: skip


def compare(first: Report, second: Report) -> Comparison:
    """Compare two reports of ``torch_mlc.explain``: of one model with other options, of two versions of a model, or
    before and after tuning. Graphs are compared in their order.

    Kernels belong together where they compute the same in the same layout (their workload); of the others those with
    the same operations from the same lines.
    """
    pairs = zip(first.graphs, second.graphs)
    both = tuple(_compared(a, b) for a, b in pairs)
    rest = [f"the first: {g.name}" for g in first.graphs[len(both) :]]
    return Comparison(both, (*rest, *(f"the second: {g.name}" for g in second.graphs[len(both) :])))


def _compared(a: GraphReport, b: GraphReport) -> GraphComparison:
    figures = (
        Figure("kernel launches", a.launches, b.launches),
        Figure("different kernels", len(a.kernels), len(b.kernels)),
        Figure("library calls", sum(c.calls for c in a.libraries), sum(c.calls for c in b.libraries)),
        Figure("read and written", a.traffic.moved, b.traffic.moved, "bytes"),
        Figure("memory beside the inputs", a.typical_peak, b.typical_peak, "bytes"),
        Figure("predicted time", a.predicted.seconds, b.predicted.seconds, "seconds"),
        Figure("time to compile", sum(a.times.values()), sum(b.times.values()), "seconds"),
    )
    told = tuple(f for f in figures if f.first is not None or f.second is not None)
    return GraphComparison(a.name if a.name == b.name else f"{a.name} | {b.name}", told, tuple(_changes(a, b)))


def _changes(a: GraphReport, b: GraphReport) -> Iterator[Change]:
    left, found = [*b.kernels], dict[str, KernelReport]()
    for same in (_same_workload, _same_place):
        for k in a.kernels:
            other = next((o for o in left if k.name not in found and same(k, o)), None)
            if other is not None:
                left.remove(other)
                found[k.name] = other
    for k in a.kernels:
        yield _change(k, found[k.name]) if k.name in found else Change("gone", k.name, k.lines)
    yield from (Change("new", o.name, o.lines) for o in left)


def _same_workload(a: KernelReport, b: KernelReport) -> bool:
    return bool(a.workload) and a.workload == b.workload


def _same_place(a: KernelReport, b: KernelReport) -> bool:
    return a.ops == b.ops and a.lines == b.lines


def _change(a: KernelReport, b: KernelReport) -> Change:
    what = [*_moved(a, b)]
    if a.calls != b.calls:
        what.append(f"runs {a.calls} and {b.calls} times")
    if a.rule != b.rule:
        what.append(f"scheduled by {a.rule or 'no rule'} and {b.rule or 'no rule'}")
    if a.chosen != b.chosen:
        what.append(f"schedule chosen {a.chosen or 'by default'} and {b.chosen or 'by default'}")
    if a.workload != b.workload:
        what.append("computes something else, or in another layout")
    schedule = _difference(a.schedule.splitlines(), b.schedule.splitlines())
    if schedule:
        what.append("has another schedule")
    name = a.name if a.name == b.name else f"{a.name} | {b.name}"
    return Change("changed" if what else "same", name, a.lines, tuple(what), schedule)


def _moved(a: KernelReport, b: KernelReport) -> Iterator[str]:
    if a.traffic is not None and b.traffic is not None and a.traffic.moved != b.traffic.moved:
        yield f"moves {bytes_text(a.traffic.moved)} and {bytes_text(b.traffic.moved)}"
    one, other = a.prediction, b.prediction
    if one is not None and other is not None and one.seconds != other.seconds:
        yield f"predicted to take {microseconds(one.seconds)} and {microseconds(other.seconds)}"


def _difference(a: Sequence[str], b: Sequence[str]) -> tuple[str, ...]:
    return tuple(line for line in difflib.unified_diff(a, b, lineterm="", n=1) if not line.startswith(("---", "+++")))


def _text(graph: GraphComparison) -> Iterator[str]:
    yield f"{graph.name}: {len(graph.changes)} of {counted(len(graph.kernels), 'kernel')} differ"
    yield from (f"  {f}" for f in graph.figures)
    for c in graph.changes:
        told = "; ".join(c.what) or {"gone": "only in the first", "new": "only in the second"}[c.kind]
        yield f"  {c.name}: {told}"
        yield from (f"      {line}" for line in c.schedule[:_SHOWN])
        if len(c.schedule) > _SHOWN:
            yield f"      … and {counted(len(c.schedule) - _SHOWN, 'more line')}, which a saved page has"
