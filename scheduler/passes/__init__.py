"""Graph passes, one file each; the pass, its file and its function share one verb."""

from .attention.rewrite_attention import rewrite_attention
from .canonical.alias_copies import alias_copies
from .canonical.collapse_one_hot import collapse_one_hot
from .canonical.eliminate_common import eliminate_common
from .canonical.eliminate_dead import eliminate_dead
from .canonical.simplify_algebra import simplify_algebra
from .convolution.convert_layouts import convert_layouts
from .convolution.decompose_convolutions import decompose_convolutions
from .convolution.multiply_points import multiply_points
from .products.chain_products import chain_products
from .products.decompose_contractions import decompose_contractions
from .reduction.rewrite_logsumexp import rewrite_logsumexp
from .reduction.shift_scans import shift_scans
from .reduction.split_reductions import split_reductions
from .reduction.unroll_reductions import unroll_reductions

# In the order in which they run.
GRAPH_PASSES = (
    simplify_algebra, eliminate_common, alias_copies, collapse_one_hot, rewrite_attention, chain_products,
    rewrite_logsumexp, decompose_contractions, decompose_convolutions, convert_layouts, multiply_points, shift_scans,
    unroll_reductions, split_reductions, eliminate_dead,
)  # fmt: skip

__all__ = [
    "GRAPH_PASSES", "alias_copies", "chain_products", "collapse_one_hot", "convert_layouts", "decompose_contractions",
    "decompose_convolutions", "eliminate_common", "eliminate_dead", "multiply_points", "rewrite_attention",
    "rewrite_logsumexp", "shift_scans", "simplify_algebra", "split_reductions", "unroll_reductions",
]  # fmt: skip
