"""Graph passes, one file each; the pass, its file and its function share one verb."""

from ...ir.graph.graph import Graph
from ...ir.passes import GRAPH, Form, Pass, Plain
from ..context import FAST, PassContext
from .attention.inline_masks import inline_masks
from .attention.inline_operands import inline_operands
from .attention.rewrite_attention import rewrite_attention
from .canonical.alias_copies import alias_copies
from .canonical.begin_scatters import begin_scatters
from .canonical.collapse_one_hot import collapse_one_hot
from .canonical.eliminate_common import eliminate_common
from .canonical.eliminate_dead import eliminate_dead
from .canonical.settle_scatters import settle_scatters
from .canonical.simplify_algebra import simplify_algebra
from .canonical.widen import widen
from .convolution.convert_layouts import convert_layouts
from .convolution.decompose_convolutions import decompose_convolutions
from .convolution.lift_sequences import lift_sequences
from .convolution.multiply_points import multiply_points
from .products.chain_products import chain_products
from .products.decompose_contractions import decompose_contractions
from .products.multiply_by_onednn import multiply_by_onednn
from .products.pad_products import pad_products
from .reduction.rewrite_logsumexp import rewrite_logsumexp
from .reduction.shift_scans import shift_scans
from .reduction.split_reductions import split_reductions
from .reduction.unroll_reductions import unroll_reductions
from .substitute.substitute import substitute

# No node that nobody needs: what reads a value decides what becomes of it.
NO_DEAD: Form[Graph] = Form("nothing that nobody needs", lambda graph: eliminate_dead(graph) is graph)

# In the order in which they run.
GRAPH_PASSES: tuple[Pass[Graph, PassContext], ...] = (
    Pass("widen", GRAPH, widen),
    Pass("simplify_algebra", GRAPH, Plain(simplify_algebra)),
    Pass("eliminate_common", GRAPH, Plain(eliminate_common)),
    Pass("alias_copies", GRAPH, Plain(alias_copies)),
    Pass("settle_scatters", GRAPH, Plain(settle_scatters)),
    Pass("begin_scatters", GRAPH, Plain(begin_scatters), needs=(FAST,)),
    Pass("collapse_one_hot", GRAPH, Plain(collapse_one_hot), needs=(FAST,)),
    Pass("substitute", GRAPH, substitute),
    Pass("rewrite_attention", GRAPH, rewrite_attention, needs=(FAST,)),
    Pass("inline_masks", GRAPH, Plain(inline_masks)),
    Pass("chain_products", GRAPH, chain_products),
    Pass("rewrite_logsumexp", GRAPH, rewrite_logsumexp, needs=(FAST,)),
    Pass("eliminate_dead", GRAPH, Plain(eliminate_dead)),
    Pass("inline_operands", GRAPH, inline_operands),
    Pass("eliminate_dead", GRAPH, Plain(eliminate_dead), leaves=(NO_DEAD,)),
    Pass("pad_products", GRAPH, pad_products, needs=(NO_DEAD,)),
    Pass("decompose_contractions", GRAPH, decompose_contractions, needs=(NO_DEAD,)),
    Pass("decompose_convolutions", GRAPH, decompose_convolutions),
    Pass("lift_sequences", GRAPH, lift_sequences),
    Pass("convert_layouts", GRAPH, convert_layouts),
    Pass("multiply_points", GRAPH, multiply_points),
    Pass("shift_scans", GRAPH, Plain(shift_scans)),
    Pass("unroll_reductions", GRAPH, unroll_reductions),
    Pass("split_reductions", GRAPH, split_reductions),
    Pass("multiply_by_onednn", GRAPH, multiply_by_onednn),
    Pass("eliminate_dead", GRAPH, Plain(eliminate_dead), leaves=(NO_DEAD,)),
)

__all__ = [
    "GRAPH_PASSES", "alias_copies", "begin_scatters", "chain_products", "collapse_one_hot", "convert_layouts",
    "decompose_contractions", "decompose_convolutions", "eliminate_common", "eliminate_dead", "inline_masks",
    "inline_operands", "lift_sequences", "multiply_by_onednn", "multiply_points", "pad_products", "rewrite_attention",
    "rewrite_logsumexp", "settle_scatters", "shift_scans", "simplify_algebra", "split_reductions", "substitute",
    "unroll_reductions", "widen",
]  # fmt: skip
