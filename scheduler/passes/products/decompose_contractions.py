"""Open the products that gain by it: a library call becomes a sum of products, which fuses like any reduction.

What the operands are made of (integers, scales, shifts) moves into the loops where that reads less memory, and what
reads the result joins as an epilogue. Which products are decomposed is a decision by cost, one file a kind of target
(``contraction_cost_cpu``, ``contraction_cost_gpu``); every product says what was decided and why.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, Load, call, cast, const, rewrite, substitute_index
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Compute, Graph, Node, Origin, Reduction
from ...context import USUAL, PassContext
from ...cost.products.contraction import decide_product
from ...decisions import Alternative, place_key
from ...facts.contraction import R0, Decision, LibraryProduct, Products
from ...facts.digits import refine
from ...facts.row_factors import Factored
from ...numerics import ROUNDING, keeps
from ..canonical.names import fresh_name
from ..canonical.simplify_algebra import simplify_call
from ..reduction.split_reductions import exact_cuts, in_pieces
from .stream_k import dealt


def decompose_contractions(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Decide about every product of a graph without dead nodes, whose reads would count; decompose those
    for which that is cheaper."""
    products = Products(graph)
    taken = set(names_in(graph))
    nodes: list[Node] = []
    opened: set[str] = set()
    for node in graph.nodes:
        product = products.product(node)
        if product is None:
            nodes.append(node)
            continue
        machine = context.target_of(product.type.device).machine
        fast = context.fast and not keeps(node, ROUNDING)
        decision = _asked(product, decide_product(_without_epilogues(product, opened), machine, fast), graph, context)
        # What passes before have to say about the call stands after its own reason.
        reason = "; ".join([decision.reason, *product.node.reason.split("; ")[1:]])
        if decision.decomposed:
            opened.add(product.node.names[0])
            nodes += decompose_product(product, replace(decision, reason=reason), graph, taken)
        else:
            nodes.append(replace(product.node, reason=reason))
    same = len(nodes) == len(graph.nodes) and all(a is b for a, b in zip(nodes, graph.nodes, strict=True))
    return graph if same else replace(graph, nodes=tuple(nodes))


def _asked(product: LibraryProduct, by_cost: Decision, graph: Graph, context: PassContext) -> Decision:
    """What is decided about a product, where both ways were weighed."""
    if by_cost.otherwise is None:
        return by_cost
    name, hint = product.node.names[0], graph.symbols.hint
    chosen = context.decide(
        "product", lambda: place_key(graph, (name,)),
        (Alternative("loops", by_cost.loops), Alternative("library", by_cost.library)),
        "loops" if by_cost.decomposed else "library",
        at=name, nbytes=product.a.bytes + product.b.bytes + hint(product.type.nbytes), reason=by_cost.reason,
    )  # fmt: skip
    if (chosen == "loops") is by_cost.decomposed:
        return by_cost
    return replace(by_cost.otherwise, reason=f"decided otherwise; {by_cost.reason}")


def _without_epilogues(product: LibraryProduct, opened: set[str]) -> LibraryProduct:
    """A product without the prologues that are epilogues already, of products in loops of ours."""
    a, b = (
        replace(o, prologue=None) if o.prologue is not None and not opened.isdisjoint(o.prologue.sources) else o
        for o in (product.a, product.b)
    )
    return product if a is product.a and b is product.b else replace(product, a=a, b=b)


def decompose_product(product: LibraryProduct, decision: Decision, graph: Graph, taken: set[str]) -> list[Node]:
    """The sum over k, and, where the result is not that sum itself, the element of the result that reads it."""
    kind, accumulator = product.type, product.accumulator
    made = [
        o.inlined if inlined else Factored(o.plain)
        for o, inlined in zip((product.a, product.b), decision.inlined, strict=True)
    ]
    factors = [cast(m.rest, accumulator) for m in made]
    origins = tuple(replace(o, note=decision.reason) for o in product.node.origins)
    name = product.node.names[0]
    is_whole = kind.dtype is accumulator and product.alpha == 1 and not _adds(product)
    is_whole = is_whole and not any(m.factors or m.divisors for m in made)
    if sympy.S.Zero in kind.shape:  # what no element has need not be worked out, or scheduled
        return [Compute(name, kind, product.axes, cast(const(0, accumulator), kind.dtype), origins)]
    if product.depth == 0:
        return [_finished(product, const(0, accumulator), graph, origins)]  # no term has what is a factor of all
    if product.depth == 1:
        only = substitute_index(call("mul", *factors), {R0: sympy.S.Zero})
        return [_finished(product, _applied(made, only), graph, origins)]
    sum_name = name if is_whole else fresh_name(f"{name}_sum", taken)
    sum_type = kind if is_whole else replace(kind, dtype=accumulator)
    extents = dict(zip(product.axes, kind.shape, strict=True))
    axes, value = refine(call("mul", *factors), {R0: product.depth}, extents, graph.symbols)
    value = rewrite(value, simplify_call)
    total = Reduction((sum_name,), (sum_type,), product.axes, tuple(axes), tuple(axes.values()), SUM, (value,), origins)
    sums = _sums(total, decision, graph, taken)
    if is_whole:
        return sums
    whole = _applied(made, Load(sum_name, product.axes, accumulator))
    return [*sums, _finished(product, whole, graph, origins)]


def _applied(made: list[Factored], total: Expr) -> Expr:
    """A sum with the factors of its operands that are the same along it."""
    for m in made:
        total = m.applied(total)
    return total


def _sums(total: Reduction, decision: Decision, graph: Graph, taken: set[str]) -> list[Node]:
    """The sum over k as a whole, or in parts and the sum of those."""
    if decision.stream_k is not None and len(total.reduce_axes) == 1 and len(total.axes) > 1:
        return list(dealt(total, decision.stream_k, taken, graph.symbols))
    cuts = exact_cuts(total.reduce_shape, decision.pieces)
    return list(in_pieces(total, cuts, taken)) if cuts else [total]


def _finished(product: LibraryProduct, total: Expr, graph: Graph, origins: tuple[Origin, ...]) -> Compute:
    """The element of the result that a sum makes."""
    value = _scaled(total, product.alpha)
    if _adds(product):
        value = call("add", _scaled(cast(_added(product, graph), product.accumulator), product.beta), value)
    value = cast(value, product.type.dtype, when_stored=not product.node.rounded)
    return Compute(product.node.names[0], product.type, product.axes, value, origins)


def _adds(product: LibraryProduct) -> bool:
    # As ATen has it: with beta == 0 what is added is not even read, so that its NaNs do not count.
    return product.added is not None and product.beta != 0


def _scaled(value: Expr, factor: int | float) -> Expr:
    return value if factor == 1 else call("mul", const(factor, value.dtype), value)


def _added(product: LibraryProduct, graph: Graph) -> Expr:
    """The element that is added, broadcast to the result's axes from the last one backwards."""
    assert product.added is not None
    kind = graph.types()[product.added]
    lead = len(product.axes) - len(kind.shape)
    indices = tuple(
        sympy.S.Zero if extent == 1 else axis for axis, extent in zip(product.axes[lead:], kind.shape, strict=True)
    )
    return Load(product.added, indices, kind.dtype)


__all__ = ["decompose_contractions", "decompose_product"]
