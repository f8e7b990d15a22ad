"""The steps from a compiled model to eager: what is switched to eager's, one after the other, each at a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from ...ir.expr.value import Call, walk
from ...ir.function.function import TensorFunction
from ...ir.graph.graph import Graph
from ...runtime.settings.options import Options
from ...scheduler.numerics import (
    EAGER,
    FAST_REWRITES,
    FUNCTION,
    KEPT,
    OP,
    REWRITE,
    REWRITES,
    ROUNDING,
    Numerics,
    NumericsByPlace,
    NumericsPlace,
)
from ..aten_passes.rounding.numerics import is_arithmetic, placed_nodes
from ..compiling.pass_lists import context_of, pass_lists
from .runs import CompiledPart

_HALVES = (torch.bfloat16, torch.float16)
# Ops that add up, in an order of their own.
_SUMS = (
    "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "conv", "sum", "mean", "norm", "var", "std", "softmax", "logsumexp",
    "cumsum", "cumprod", "prod", "attention", "pool", "scatter", "index_add", "loss", "dist", "embedding", "upsample",
    "einsum", "lstm", "gru", "fft",
)  # fmt: skip
# What eager computes by other means though no half type is there.
_BY_OTHER_MEANS = ("attention", "batch_norm", "scatter", "index_put", "convolution")
# Functions in whose place there are approximate ones.
_APPROXIMABLE = frozenset(("exp", "exp2", "sigmoid", "erf", "tanh", "reciprocal", "div"))
TOLD = {
    REWRITE: "rewrite of the graph",
    FUNCTION: "approximate function",
    ROUNDING: "conversion left out",
    OP: "order of a sum",
}


@dataclass(frozen=True, slots=True)
class Switch:
    """One thing that is switched: a pass that is left out, or what is kept of a place, in one layer."""

    kind: str
    place: NumericsPlace | None = None
    rewrite: str = ""
    # Lines of what a pass rewrote, None of one that changed nothing.
    lines: tuple[str, ...] | None = None

    @property
    def group(self) -> tuple[str, str]:
        """What equal places of layers share."""
        return self.kind, self.place.key if self.place is not None else self.rewrite

    @property
    def told(self) -> str:
        """The kind in words."""
        if self.kind == OP and self.place is not None and not adds_up(self.place.op):
            return "arithmetic of a function"
        if self.kind == ROUNDING and self.place is not None and adds_up(self.place.op):
            return "conversion, or order of a sum"
        return TOLD[self.kind]


def adds_up(op: str) -> bool:
    """Whether an op ("aten.addmm.default") adds up, so that its order counts."""
    name = op.split(".")[1 % (op.count(".") + 1)]
    return any(word in name for word in _SUMS)


def rewrites_of(parts: Sequence[CompiledPart], settings: Options) -> tuple[Switch, ...]:
    """The passes that change roundings and that the ``settings`` do not leave out, those that changed a graph last:
    others might where these are left out."""
    out = context_of(settings).left_out | (set(FAST_REWRITES) if settings.numerics == EAGER else set())
    changed: dict[str, dict[str, None]] = {}
    for part in parts:
        stages = part.compiled.stages
        for step in stages.steps if stages is not None else ():
            if step.changed and step.name in REWRITES and step.name not in out:
                assert stages is not None, "it has the steps"
                lines = dict.fromkeys(_rewritten(step.name, stages.imported, settings))
                changed.setdefault(step.name, {}).update(lines)
    rest = [Switch(REWRITE, rewrite=n) for n in REWRITES if n not in changed and n not in out]
    return (*rest, *(Switch(REWRITE, rewrite=name, lines=tuple(lines)) for name, lines in changed.items()))


def places_of(parts: Sequence[CompiledPart], settings: Options) -> tuple[Switch, ...]:
    """What may be kept of the places of some graphs, by kinds and in the model's order, equal places of layers side by
    side. What the ``settings`` keep already is none."""
    numerics = settings.numerics
    base = numerics if isinstance(numerics, NumericsByPlace) else NumericsByPlace((), numerics)
    found: dict[str, dict[NumericsPlace, None]] = {kind: {} for kind in KEPT}
    for part in parts:
        for gm in (m for m in part.gm.modules() if isinstance(m, fx.GraphModule)):
            for node, place in placed_nodes(gm):
                if _rounds(node):
                    found[ROUNDING][place] = None
                if is_arithmetic(node):
                    found[OP][place] = None
        for compiled in (part.compiled, *part.compiled.regions):
            if compiled.stages is not None:
                found[FUNCTION] |= dict.fromkeys(_approximable(compiled.stages.fusion.functions.values(), part.gm))
    steps: list[Switch] = []
    for kind in KEPT:
        groups: dict[str, list[NumericsPlace]] = {}
        for place in found[kind]:
            if kind not in base.kept(place):
                groups.setdefault(place.key, []).append(place)
        steps += [Switch(kind, place) for group in groups.values() for place in group]
    return tuple(steps)


def entries(steps: Iterable[Switch], every: Sequence[Switch]) -> dict[str, str]:
    """The entries of numerics that switch some steps; places all of whose layers are switched are named once."""
    chosen = list(steps)
    on = set(chosen)
    whole: dict[tuple[str, str], bool] = {}
    for step in every:
        whole[step.group] = whole.get(step.group, True) and step in on
    made: dict[str, str] = {}
    for step in chosen:
        if step.place is None:
            made[f"{REWRITE}:{step.rewrite}"] = EAGER
        else:
            made[step.place.name(step.kind, layer=not whole.get(step.group, False))] = EAGER
    return made


def with_entries(numerics: Numerics, more: Mapping[str, str]) -> Numerics:
    """Numerics with entries beside those that they have."""
    if isinstance(numerics, NumericsByPlace):
        return NumericsByPlace(tuple(sorted({**dict(numerics.items), **more}.items())), numerics.default)
    return NumericsByPlace(tuple(sorted(more.items())), numerics) if more else numerics


def _rounds(node: fx.Node) -> bool:
    """Whether eager rounds here to a half type, or computes by other means than fast numerics do."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    flat = [x for v in values for x in (v if isinstance(v, (tuple, list)) else (v,))]
    halves = any(isinstance(v, torch.Tensor) and v.dtype in _HALVES for v in flat)
    assert isinstance(node.target, OpOverload), "a call of an op of ATen's"
    name = node.target._opname
    makes = not any(r.alias_info is not None for r in node.target._schema.returns)
    return (halves and makes) or any(word in name for word in _BY_OTHER_MEANS)


def _rewritten(name: str, graph: Graph, settings: Options) -> Iterable[str]:
    """The lines of the model that a pass over graphs rewrites."""
    context = context_of(settings)
    for p in pass_lists().graph:
        if not p.applies(context):
            continue
        after = p.run(graph, context)
        assert isinstance(after, Graph), "passes over graphs give others"
        if p.name == name:
            left = {id(n) for n in after.nodes}
            for node in graph.nodes:
                if id(node) not in left:
                    yield from (o.source for o in getattr(node, "origins", ()) if o.source)
        graph = after


def _approximable(functions: Iterable[object], gm: fx.GraphModule) -> Iterable[NumericsPlace]:
    """The places of what became approximate functions, or would where more of its readers round."""
    nodes = list(gm.graph.nodes)
    places = dict(placed_nodes(gm))
    by_line = {p.line: p for p in places.values()}
    for function in functions:
        if not isinstance(function, TensorFunction) or function.scatters:
            continue
        for stage in function.stages:
            if not any(isinstance(e, Call) and e.fn in _APPROXIMABLE for v in stage.values for e in walk(v)):
                continue
            for origin in stage.origins:
                node = nodes[origin.place] if 0 <= origin.place < len(nodes) else None
                place = places.get(node) if node is not None else by_line.get(origin.source)
                if place is not None:
                    yield place


__all__ = ["Switch", "adds_up", "entries", "places_of", "rewrites_of", "with_entries"]
