"""What was decided for one graph, as the lines of a section of a lock file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import sympy
from torch import fx

from ...ir.expr.dtypes import DType
from ...ir.expr.size_regions import SizeRegion
from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Cast, walk
from ...ir.graph.facts import makers_of
from ...ir.graph.graph import (
    CallRegion,
    CallTensor,
    Compute,
    Library,
    Node,
    Reduction,
    Scan,
    Scatter,
    TensorType,
    View,
    node_values,
    uses,
)
from ...ir.graph.slices import NOTHING
from ...scheduler.decisions import ChosenFor, DecisionRecord
from ...scheduler.regions.choose import ONE, REGIONS
from ..compiling.compiled import Stages
from ..compiling.kernels import KernelBuild, ScheduleTold
from .lock_text import CALLS, DECISIONS, PROGRAMS, SAVED, SCHEDULES, SETTINGS, LockLine
from .names import GRAPH, LayerNames, NodeNames

# Digits of the hash of a kernel before it is scheduled.
DIGITS = 16
# What by cost is always so where it can be: told only where it is otherwise, since the calls tell the rest.
USUAL = {"fuse": "together", "unite": "together", "launch": "shared", REGIONS: ONE}
_WHO = {
    ChosenFor.COST: "", ChosenFor.LOCK: "", ChosenFor.OVERRIDE: ", by hand", ChosenFor.MEASURED: ", by search",
    ChosenFor.RECORDED: ", by search",
}  # fmt: skip
_HALF = (DType.BFLOAT16, DType.FLOAT16)


def decided(
    stages: Stages, names: NodeNames, gm: fx.GraphModule, saved: int | None, settings: Sequence[str]
) -> list[str]:
    """The lines of the section of a graph, below its name. ``saved`` is the first of its results that only the backward
    reads, ``settings`` are told as they are."""
    told = _SectionWriter(stages, LayerNames(names, stages.layers))
    parts = {
        SETTINGS: [LockLine(s) for s in settings],
        CALLS: list(told.calls()),
        SAVED: [LockLine(n) for n in _saved(gm, names, saved)],
        DECISIONS: list(_decisions(stages.decisions, told.layers, told.roundings())),
        SCHEDULES: list(told.schedules()),
    }
    return _written(parts)


def decided_programs(
    records: Iterable[DecisionRecord], names: NodeNames, programs: Mapping[str, str], settings: Sequence[str]
) -> list[str]:
    """The lines of the section of a graph of several programs, each of which has a section of its own: what was decided
    for the graph. ``programs`` are the conditions on their sizes, and what is told of other sizes that they were
    planned for."""
    return _written({
        SETTINGS: [LockLine(s) for s in settings],
        PROGRAMS: [LockLine(c, (LockLine(p),) if p else ()) for c, p in programs.items()],
        DECISIONS: list(_decisions(records, LayerNames(names, None))),
    })  # fmt: skip


def _written(parts: Mapping[str, Sequence[LockLine]]) -> list[str]:
    return [text for name, below in parts.items() if below for text in LockLine(name, tuple(below)).written(1)]


def condition_text(region: SizeRegion, table: SymbolTable) -> str:
    """The sizes that a program is for, numbered as in types."""
    return region.renamed(_numbered(table)).text


def planned_text(region: SizeRegion, table: SymbolTable) -> str:
    """That a program was planned for a region."""
    return f"planned for {condition_text(region, table) if region.literals else 'all sizes'}"


def _saved(gm: fx.GraphModule, names: NodeNames, saved: int | None) -> Iterator[str]:
    """What a forward keeps for its backward."""
    if saved is None:
        return
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    for value in values[saved:]:
        if isinstance(value, fx.Node) and value.op == "call_function":
            yield names.of_node(value.name)


@dataclass(frozen=True, slots=True)
class _Where:
    """Of which layer a call is: so many layers on of the one that stands for it, None for outside of those that were
    left out; and what its operands and results are called in the few layers."""

    by: int | None
    short: Callable[[str], str]


@dataclass
class _SectionWriter:
    stages: Stages
    layers: LayerNames

    @property
    def names(self) -> NodeNames:
        return self.layers.names

    @cached_property
    def device(self) -> str:
        types = (t for n in self.stages.fusion.graph.nodes for t in n.types if t is not None)
        return next((t.device for t in types), "")

    # --- calls ----------------------------------------------------------------------------------------------------

    def calls(self) -> Iterator[LockLine]:
        """Calls in the order in which they run, those of each layer."""
        for node in self.stages.fusion.graph.nodes:
            if isinstance(node, CallRegion):
                for by in range(node.times):
                    for inner in node.region.nodes:
                        yield from self.call(inner, _Where(by, _same))
            else:
                by, is_left_out = self.layers.beyond(node.names)
                short = partial(self.layers.before, by=by) if by else _same
                yield from self.call(node, _Where(by if is_left_out else None, short))

    def call(self, node: Node, where: _Where) -> Iterator[LockLine]:
        """What is told of a call."""
        match node:
            case CallTensor():
                into = node.into or (None,) * len(node.names)
                schedule = told_schedule(self.stages.kernels.get(node.function))
                what = "kernel"
                runs = "ATen ops" if schedule is None else f"{schedule.workload[:DIGITS]} {schedule.rule}"
            case Library() if node.target not in NOTHING:
                into = (None,) * len(node.names)
                what, runs = "library", node.target
            case _:
                return
        made = [self.name(r, where) for r in node.names]
        label = made[0] if made else next((o.op for o in node.origins), GRAPH)
        below = [LockLine(f"runs {runs}")]
        if isinstance(node, CallTensor):
            below += [LockLine("launched as one")] if node.count > 1 else []
            computed = self.computed(node, where)
            below += [LockLine(f"computes {c}") for c in computed if len(computed) > 1 or c != label]
        for name, kind, over in zip(made, node.types, into, strict=True):
            if kind is not None:
                instead = f", over {self.operand(over, where)}" if over is not None else ""
                below.append(LockLine(f"gives {'' if name == label else f'{name} '}{self.type(kind)}{instead}"))
        yield LockLine(f"{what} {label}", tuple(below))

    def name(self, result: str, where: _Where) -> str:
        """What the node is called that a result is made of."""
        return self.names.of_node(self.node(where.short(result), where))

    def node(self, short: str, where: _Where) -> str:
        """The node of a result of the few layers, where it is."""
        node = self.names.node(short)
        return node if where.by is None else self.layers.moved(node, where.by)

    def operand(self, name: str, where: _Where) -> str:
        found = self.name(name, where)
        return "an input" if found == GRAPH else found

    def computed(self, call: CallTensor, where: _Where) -> list[str]:
        """The ops that a kernel computes, by where they stand: all between its operands and its results."""
        makers = makers_of(self.stages.graph)

        def known(name: str) -> str:
            base = where.short(name)
            while base and base not in makers and base not in inputs:  # passes over calls have added to it
                base = base.rpartition("_")[0]
            return base

        inputs = {i.name for i in self.stages.graph.inputs}
        given, waiting = set(map(known, call.args)), [known(r) for r in call.names]
        found = {self.node(where.short(r), where) for r in call.names}
        seen = set(waiting)
        while waiting:
            node = makers.get(waiting.pop())
            if node is None or isinstance(node, (Library, CallTensor, CallRegion)):
                continue
            if not isinstance(node, View):
                found.add(self.node(node.names[0], where))
            for name in uses(node):
                if name not in seen and name not in given:
                    seen.add(name)
                    waiting.append(name)
        by_scope: dict[str, dict[str, None]] = {}
        for name in sorted({self.names.of_node(n) for n in found if n}, key=self.names.rank):
            scope, _, op = name.partition(": ")
            by_scope.setdefault(scope, {})[op] = None
        return [f"{scope}: {', '.join(ops)}" for scope, ops in by_scope.items() if ops]

    def type(self, kind: TensorType) -> str:
        shape = ", ".join(map(self.size, kind.shape))
        text = f"{kind.dtype.value}[{shape}]"
        if tuple(kind.strides) != contiguous(kind.shape):
            text += f" strides [{', '.join(map(self.size, kind.strides))}]"
        return text if kind.device == self.device else f"{text} on {kind.device}"

    def size(self, size: sympy.Expr | int) -> str:
        return size_text(size, self.stages.fusion.graph.symbols)

    # --- roundings and schedules ----------------------------------------------------------------------------------

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

    def schedules(self) -> Iterator[LockLine]:
        """The schedule of each kernel, in the order of their hashes."""
        known = {s.workload: s for b in self.stages.kernels.values() if (s := told_schedule(b)) is not None}
        for workload in sorted(known):
            schedule = known[workload]
            yield LockLine(
                f"{workload[:DIGITS]} on {schedule.target}: {schedule.rule}, {schedule.by}",
                tuple(map(LockLine, schedule.steps)),
            )


def _decisions(
    records: Iterable[DecisionRecord], layers: LayerNames, more: Iterable[tuple[str, str]] = ()
) -> Iterator[LockLine]:
    """Decisions by place, places in the order of the model, and what ``more`` is told of places."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        if record.kind == "schedules":  # which are told as they are
            continue
        for at, beside in zip(record.at, record.beside or ("",) * len(record.at), strict=True):
            if USUAL.get(record.kind) != record.chosen:
                for place, text in _at_each(record, at, beside, layers):
                    found.setdefault(place, {})[text] = None
    for place, text in more:
        found.setdefault(place, {})[text] = None
    for place in sorted(found, key=lambda p: (layers.names.rank(p), p)):
        yield LockLine(place, tuple(LockLine(text) for text in sorted(found[place])))


def _at_each(record: DecisionRecord, at: str, beside: str, layers: LayerNames) -> Iterator[tuple[str, str]]:
    """A decision at all places that it stands for."""
    for by in layers.each(at):
        other = f" (with {layers.of(beside, by)})" if beside else ""
        yield layers.of(at, by), f"{record.kind}: {record.chosen}{other}{_WHO[record.source]}"


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
    return str(size.xreplace(_numbered(table)))


def _numbered(table: SymbolTable) -> dict[sympy.Symbol, sympy.Symbol]:
    return {s: sympy.Symbol(f"n{k}", integer=True) for k, s in enumerate(table.symbols)}


def _same(name: str) -> str:
    return name


def _rounds(value: object) -> Iterator[str]:
    for e in walk(value):  # type: ignore[arg-type]
        if isinstance(e, Cast) and e.dtype in _HALF and e.value.dtype in (DType.FLOAT32, DType.FLOAT64):
            yield f"rounding: to {e.dtype.value} {'when stored' if e.when_stored else 'at once'}"
