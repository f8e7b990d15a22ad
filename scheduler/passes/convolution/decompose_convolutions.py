"""Open the convolutions that gain by it: a depthwise one becomes a sum over taps, which fuses like any reduction.

Of a backward call each gradient is decided by itself, and the library makes the others. Which are
decomposed is a decision by cost (``cost/convolution``); every convolution says what was decided and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Load
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Compute, Graph, Library, Node, Reduction, TensorType
from ....ir.machine import Machine
from ....ir.nest.loops import contiguous_strides
from ....ir.target import has_kernels
from ...context import USUAL, PassContext
from ...cost.convolution import Direction, decide, pieces_of
from ...cost.layouts import are_measured
from ...decisions import Alternative, place_key, text_key
from ...facts.contraction import Decision
from ...facts.convolution import (
    Convolution,
    Names,
    axes_of,
    convolution,
    decompose_bias_gradient,
    decompose_forward,
    decompose_input_gradient,
    decompose_weight_gradient,
)
from ...facts.image_products import decompose_as_product, is_image_product
from ..canonical.names import fresh_name
from ..reduction.split_reductions import cuts_for, in_pieces
from .convert_layouts import channels_last

_GRADIENTS: tuple[tuple[Direction, Callable[[Convolution, Names, TensorType, str], list[Node]]], ...] = (
    (Direction.INPUT, decompose_input_gradient),
    (Direction.WEIGHT, decompose_weight_gradient),
    (Direction.BIAS, decompose_bias_gradient),
)


def decompose_convolutions(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Decide about every convolution of the graph; decompose those for which that is cheaper."""
    types = graph.types()
    taken = set(names_in(graph))
    nodes: list[Node] = []
    for node in graph.nodes:
        c = convolution(node, types)
        if c is None or not has_kernels(c.input.device):
            nodes.append(node)
        elif c.is_backward:
            nodes += _backward(c, taken, graph, context)
        else:
            decision = _decided(c, Direction.OUTPUT, graph, context)
            if decision.decomposed and not c.is_depthwise and is_image_product(c):
                copies = (fresh_name(f"{c.node.names[0]}_{k}", taken) for k in ("images", "filters"))
                names = _names(c.node.names[0], taken)
                nodes += decompose_as_product(c, names, decision.reason, tuple(copies))  # type: ignore[arg-type]
            elif decision.decomposed and _reads_across(c, context):
                nodes += _turned(c, taken, decision.reason)
            elif decision.decomposed:
                nodes += decompose_forward(c, _names(c.node.names[0], taken), decision.reason)
            else:
                nodes.append(replace(c.node, reason=decision.reason))
    same = len(nodes) == len(graph.nodes) and all(a is b for a, b in zip(nodes, graph.nodes, strict=True))
    return graph if same else replace(graph, nodes=tuple(nodes))


def _reads_across(c: Convolution, context: PassContext) -> bool:
    """Whether a depthwise convolution on a CPU would read each row of its windows across memory: its images have their
    channels innermost, as tokens have them, and its results have them outermost."""
    if not c.is_depthwise or not are_measured(context.target_of(c.input.device).machine):
        return False
    return c.input.strides[1] == 1 != c.input.shape[1] and c.output.strides == contiguous_strides(c.output.shape)


def _turned(c: Convolution, taken: set[str], reason: str) -> list[Node]:
    """Such a convolution with its channels as lanes, and its result in the layout that it has: what reads it, which
    moves each element once, does that too."""
    result, kind = c.node.names[0], c.output
    made = fresh_name(f"{result}_last", taken)
    last = replace(c, output=replace(kind, strides=channels_last(kind.shape)))
    axes = axes_of(len(kind.shape))
    copy = Compute(result, kind, axes, Load(made, axes, kind.dtype), c.node.origins)
    return [*decompose_forward(last, _names(made, taken), reason), copy]


def _decided(c: Convolution, direction: Direction, graph: Graph, context: PassContext) -> Decision:
    """What is decided about one direction of a convolution."""
    machine, hint = context.target_of(c.input.device).machine, graph.symbols.hint
    by_cost = decide(c, direction, graph.symbols, machine)
    if by_cost.otherwise is None:
        return by_cost
    name = c.node.names[0]
    chosen = context.decide(
        "convolution", lambda: text_key((place_key(graph, (name,)), direction.value)),
        (Alternative("loops", by_cost.loops), Alternative("library", by_cost.library)),
        "loops" if by_cost.decomposed else "library",
        at=name, nbytes=hint(c.input.nbytes) + hint(c.output.nbytes), reason=by_cost.reason,
    )  # fmt: skip
    if (chosen == "loops") is by_cost.decomposed:
        return by_cost
    return replace(by_cost.otherwise, reason=f"decided otherwise; {by_cost.reason}")


def _backward(c: Convolution, taken: set[str], graph: Graph, context: PassContext) -> list[Node]:
    """The gradients that are decomposed, after the call that makes the others."""
    table, machine = graph.symbols, context.target_of(c.input.device).machine
    loops: list[Node] = []
    names, types, reasons = list(c.node.names), list(c.node.types), []
    for k, (direction, build) in enumerate(_GRADIENTS):
        kind = types[k]
        if kind is None:
            continue
        decision = _decided(c, direction, graph, context)
        if not decision.decomposed:
            reasons.append(f"{direction.value}: {decision.reason}")
            continue
        made = build(c, _names(names[k], taken), kind, decision.reason)
        loops += _in_pieces(c, direction, made, taken, table, machine)
        names[k], types[k] = fresh_name(f"{names[k]}_unmade", taken), None
    if all(t is None for t in types):
        return loops
    mask = tuple(t is not None for t in types)
    args = (*c.node.args[:-1], mask)
    left = Library(tuple(names), tuple(types), c.node.target, args, (), "; ".join(reasons), c.node.origins)
    return [left, *loops]


def _in_pieces(
    c: Convolution, direction: Direction, made: list[Node], taken: set[str], table: SymbolTable, machine: Machine
) -> list[Node]:
    """The nodes of a gradient, a sum over all images in pieces where a GPU has too few results to be occupied: programs
    do not combine what they sum."""
    found: list[Node] = []
    for node in made:
        wanted = pieces_of(c, direction, table, machine)
        cuts = cuts_for(node.reduce_shape, wanted, table) if isinstance(node, Reduction) and wanted > 1 else []
        if isinstance(node, Reduction) and any(cut.parts != 1 for cut in cuts):
            found += in_pieces(node, cuts, taken)
        else:
            found.append(node)
    return found


def _names(result: str, taken: set[str]) -> Names:
    return Names(result, fresh_name(f"{result}_sum", taken))
