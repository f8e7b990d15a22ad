"""What ``torch_mlc.explain`` gives: the reports of all graphs of a model, as text, as JSON, and as a page."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...runtime.model.predict import microseconds
from ...runtime.plain_text import counted, readable
from .costs import legends_once
from .page.data import report_data
from .page.html import framed, page_of, write_report
from .report import GraphBreak, GraphReport, KernelReport


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """Every graph of a model, in the order in which they were compiled; ``str`` is the summary.

    ``breaks`` say why there are several, where there are. ``unmatched`` are the entries of
    ``options={"numerics": …}`` and ``{"schedules": …}`` that are for none of the kernels. ``capture_s`` are the seconds
    of Dynamo, AOTAutograd, and eager's run of the model in between; each graph has its own phases.
    """

    graphs: tuple[GraphReport, ...]
    unmatched: tuple[str, ...] = ()
    capture_s: float = 0.0
    breaks: tuple[GraphBreak, ...] = ()

    @property
    def script(self) -> str:
        """The schedules of all kernels as one script, to be edited and given to ``options={"schedules": path}``."""
        parts = dict.fromkeys(k.script for k in self.kernels if k.script)
        return "\n\n\n".join(["import torch_mlc", *parts]) + "\n"

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """The kernels of all graphs."""
        return tuple(k for g in self.graphs for k in g.kernels)

    @property
    def fallbacks(self) -> tuple[KernelReport, ...]:
        """The kernels of all graphs that did not compile."""
        return tuple(k for g in self.graphs for k in g.fallbacks)

    @property
    def predicted_seconds(self) -> float | None:
        """What all graphs are predicted to take on a GPU, once each; None where that is not known of one."""
        found = [g.predicted.seconds for g in self.graphs]
        known = [s for s in found if s is not None]
        return sum(known) if known and len(known) == len(found) else None

    def show(self, details: bool = False) -> str:
        """The text of every graph; with ``details`` everything that is known."""
        return "\n\n".join(g.show(details) for g in self.graphs)

    def __str__(self) -> str:
        hint = (
            'More: report.save("report.html") for a browser; report.show(details=True); '
            "report.kernels[0].source, .schedule, .loops; report.graphs[0].program"
        )
        missed = [f"{o} is for no kernel here" for o in self.unmatched]
        last = hint if self.graphs else "no graph: nothing was compiled"
        spent = [f"Dynamo and AOTAutograd took {self.capture_s * 1e3:.0f} ms"] if self.capture_s else []
        total = self.predicted_seconds if len(self.graphs) > 1 else None
        spent += [f"All graphs are predicted to take {microseconds(total)}"] if total is not None else []
        graphs = legends_once([str(g) for g in self.graphs])
        return readable("\n\n".join([*graphs, *map(str, self.breaks), *spent, *missed, last]))

    def __repr__(self) -> str:
        launches, kernels = sum(g.launches for g in self.graphs), len(self.kernels)
        calls = sum(c.calls for g in self.graphs for c in g.libraries)
        return (
            f"<Report: {counted(len(self.graphs), 'graph')}, "
            f"{counted(launches, 'launch', 'launches')} of {counted(kernels, 'kernel')}, "
            + (f"{counted(calls, 'library call')}; print it, or save it as a page>")
        )

    def to_json(self, indent: int | None = None) -> str:
        """Everything that is told, as JSON for other programs: bytes, seconds and texts. ``schema`` changes with the
        fields."""
        return json.dumps(report_data(self), indent=indent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file: a page for a browser (``.html``), JSON (``.json``) or text (``.txt``).

        A page is one file that asks no network for anything. Raises: ValueError for another ending, OSError where the
        file cannot be written.
        """
        write_report(
            Path(path),
            {".html": self.to_html, ".json": partial(self.to_json, 1), ".txt": partial(self.show, details=True)},
        )

    def to_html(self) -> str:
        """The page as text."""
        return page_of(report_data(self), str(self))

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        return framed(self.to_html())
