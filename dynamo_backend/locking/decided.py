"""What was decided for one graph, as the lines of a section of a lock file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
from torch import fx

from ...ir.expr.dtypes import DType
from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Cast, walk
from ...ir.graph.graph import (
    CallTensor,
    Compute,
    Graph,
    Library,
    Origin,
    Reduction,
    Scan,
    Scatter,
    TensorType,
    node_values,
)
from ...ir.graph.regions import write_out_regions
from ...ir.graph.slices import NOTHING
from ...scheduler.decisions import ChosenFor, DecisionRecord
from ..compiling.compiled import Stages
from ..compiling.kernels import KernelBuild, ScheduleTold
from .lock_text import CALLS, DECISIONS, SAVED, SCHEDULES, SETTINGS, Line
from .names import GRAPH, LayerNames, Names

# Digits of the hash of a kernel before it is scheduled.
DIGITS = 16
# What by cost is always so where it can be: told only where it is otherwise, since the calls tell the rest.
USUAL = {"fuse": "together", "unite": "together", "launch": "shared"}
_WHO = {
    ChosenFor.COST: "", ChosenFor.LOCK: "", ChosenFor.OVERRIDE: ", by hand", ChosenFor.MEASURED: ", by search",
    ChosenFor.RECORDED: ", by search",
}  # fmt: skip
_HALF = (DType.BFLOAT16, DType.FLOAT16)


def decided(stages: Stages, names: Names, gm: fx.GraphModule, saved: int | None, settings: Sequence[str]) -> list[str]:
    """The lines of the section of a graph, below its name. ``saved`` is the first of its results that only the backward
    reads, ``settings`` are told as they are."""
    told = _Told(stages, LayerNames(names, stages.layers))
    parts = {
        SETTINGS: [Line(s) for s in settings],
        CALLS: list(told.calls()),
        SAVED: [Line(n) for n in _saved(gm, names, saved)],
        DECISIONS: list(told.decisions()),
        SCHEDULES: list(told.schedules()),
    }
    return [text for name, below in parts.items() if below for text in Line(name, tuple(below)).written(1)]


def _saved(gm: fx.GraphModule, names: Names, saved: int | None) -> Iterator[str]:
    """What a forward keeps for its backward."""
    if saved is None:
        return
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    for value in values[saved:]:
        if isinstance(value, fx.Node) and value.op == "call_function":
            yield names.of_node(value.name)


@dataclass
class _Told:
    stages: Stages
    layers: LayerNames

    @property
    def names(self) -> Names:
        return self.layers.names

    @cached_property
    def graph(self) -> Graph:
        """The calls of all layers."""
        return write_out_regions(self.stages.fusion.graph, self.layers.called)

    @cached_property
    def device(self) -> str:
        types = (t for n in self.graph.nodes for t in n.types if t is not None)
        return next((t.device for t in types), "")

    # --- calls ----------------------------------------------------------------------------------------------------

    def calls(self) -> Iterator[Line]:
        """Calls in the order in which they run."""
        for node in self.graph.nodes:
            if isinstance(node, CallTensor):
                yield self.kernel(node)
            elif isinstance(node, Library) and node.target not in NOTHING:
                label, below = self.made(node.names, node.types, (), node.origins)
                yield Line(f"library {label}", (Line(f"runs {node.target}"), *below))

    def kernel(self, node: CallTensor) -> Line:
        into = node.into or (None,) * len(node.names)
        label, below = self.made(node.names, node.types, into, node.origins)
        together = (Line(f"launches {node.count} calls as one"),) if node.count > 1 else ()
        schedule = told_schedule(self.stages.kernels.get(node.function))
        runs = "ATen ops" if schedule is None else f"{schedule.workload[:DIGITS]} {schedule.rule}"
        computed = self.computed(node.names, node.origins)
        computes = (Line(f"computes {c}") for c in computed if len(computed) > 1 or c != label)
        return Line(f"kernel {label}", (Line(f"runs {runs}"), *together, *computes, *below))

    def made(
        self,
        results: Sequence[str],
        types: Sequence[TensorType | None],
        into: Sequence[str | None],
        origins: Sequence[Origin],
    ) -> tuple[str, list[Line]]:
        """What a call makes: the name of the first, and a line for each."""
        found = [self.names.of_node(self.layers.node(r)) for r in results]
        if (not found or found[0] == GRAPH) and (nodes := self.nodes_of(results, origins)):
            found[:1] = [self.names.of_node(nodes[-1])]
        over = [f", over {self.operand(t)}" if t is not None else "" for t in into] or [""] * len(results)
        below = [
            Line(f"gives {'' if name == found[0] else f'{name} '}{self.type(t)}{o}")
            for name, t, o in zip(found, types, over, strict=True)
            if t is not None
        ]
        return (found[0] if found else next((o.op for o in origins), GRAPH)), below

    def operand(self, name: str) -> str:
        node = self.layers.node(name)
        return self.names.of_node(node) if node else "an input"

    def nodes_of(self, results: Sequence[str], origins: Sequence[Origin]) -> list[str]:
        """The nodes that a call is made of, those of the layer that it stands in."""
        nodes = [n for o in origins if (n := self.names.at(o.place))]
        shift = self.layers.shift(results, nodes)
        moved = (self.layers.moved(n, shift) for n in nodes)
        return sorted((n for n in moved if n), key=lambda n: self.names.rank(self.names.of_node(n)))

    def computed(self, results: Sequence[str], origins: Sequence[Origin]) -> list[str]:
        """The ops that a kernel computes, by where they stand."""
        by_scope: dict[str, dict[str, None]] = {}
        for node in self.nodes_of(results, origins):
            scope, _, op = self.names.of_node(node).partition(": ")
            by_scope.setdefault(scope, {})[op] = None
        return [f"{scope}: {', '.join(ops)}" for scope, ops in by_scope.items()]

    def type(self, kind: TensorType) -> str:
        shape = ", ".join(map(self.size, kind.shape))
        text = f"{kind.dtype.value}[{shape}]"
        if tuple(kind.strides) != contiguous(kind.shape):
            text += f" strides [{', '.join(map(self.size, kind.strides))}]"
        return text if kind.device == self.device else f"{text} on {kind.device}"

    def size(self, size: sympy.Expr | int) -> str:
        return size_text(size, self.graph.symbols)

    # --- decisions ------------------------------------------------------------------------------------------------

    def decisions(self) -> Iterator[Line]:
        """Decisions by place, places in the order of the model."""
        found: dict[str, dict[str, None]] = {}
        for record in self.stages.decisions:
            if record.kind == "schedules":  # which are told as they are
                continue
            for at, beside in zip(record.at, record.beside or ("",) * len(record.at), strict=True):
                if USUAL.get(record.kind) != record.chosen:
                    for place, text in self.each(record, at, beside):
                        found.setdefault(place, {})[text] = None
        for place, text in self.roundings():
            found.setdefault(place, {})[text] = None
        for place in sorted(found, key=lambda p: (self.names.rank(p), p)):
            yield Line(place, tuple(Line(text) for text in sorted(found[place])))

    def each(self, record: DecisionRecord, at: str, beside: str) -> Iterator[tuple[str, str]]:
        """A decision at all places that it stands for."""
        for by in self.layers.each(at):
            other = f" (with {self.layers.of(beside, by)})" if beside else ""
            yield self.layers.of(at, by), f"{record.kind}: {record.chosen}{other}{_WHO[record.source]}"

    def roundings(self) -> Iterator[tuple[str, str]]:
        """Which conversions to half types round at once, and which only what is stored."""
        graph = self.stages.graph
        if not any(t is not None and t.dtype in _HALF for t in graph.types().values()):
            return
        for node in graph.nodes:
            if isinstance(node, (Compute, Reduction, Scan, Scatter)):
                for text in sorted({x for value in node_values(node) for x in _rounds(value)}):
                    for by in self.layers.each(node.names[0]):
                        yield self.layers.of(node.names[0], by), text

    # --- schedules ------------------------------------------------------------------------------------------------

    def schedules(self) -> Iterator[Line]:
        """The schedule of each kernel, in the order of their hashes."""
        known = {s.workload: s for b in self.stages.kernels.values() if (s := told_schedule(b)) is not None}
        for workload in sorted(known):
            schedule = known[workload]
            yield Line(
                f"{workload[:DIGITS]} on {schedule.target}: {schedule.rule}, {schedule.by}",
                tuple(map(Line, schedule.steps)),
            )


def told_schedule(build: KernelBuild | None) -> ScheduleTold | None:
    """The schedule of a kernel; None where ATen ops run in its place."""
    if build is None or build.code is None:
        return None
    return ScheduleTold.of(build.code)


def contiguous(shape: Iterable[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Strides of a tensor without gaps in the order of its dimensions."""
    strides: list[sympy.Expr] = []
    step: sympy.Expr = sympy.S.One
    for size in reversed(tuple(shape)):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def size_text(size: sympy.Expr | int, table: SymbolTable) -> str:
    """A size with its symbols numbered as they come among the graph's inputs: their names may be others elsewhere."""
    if isinstance(size, int) or not size.free_symbols:
        return str(size)
    numbered: Mapping[sympy.Symbol, sympy.Symbol] = {
        s: sympy.Symbol(f"n{k}", integer=True) for k, s in enumerate(table.symbols)
    }
    return str(size.xreplace(dict(numbered)))


def _rounds(value: object) -> Iterator[str]:
    for e in walk(value):  # type: ignore[arg-type]
        if isinstance(e, Cast) and e.dtype in _HALF and e.value.dtype in (DType.FLOAT32, DType.FLOAT64):
            yield f"rounding: to {e.dtype.value} {'when stored' if e.when_stored else 'at once'}"
