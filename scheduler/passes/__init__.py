"""Graph passes, one file each; the pass, its file and its function share one verb."""

from .alias_copies import alias_copies
from .collapse_one_hot import collapse_one_hot
from .convert_layouts import convert_layouts
from .eliminate_common import eliminate_common
from .eliminate_dead import eliminate_dead
from .multiply_points import multiply_points
from .open_contractions import open_contractions
from .open_convolutions import open_convolutions
from .rewrite_attention import rewrite_attention
from .rewrite_logsumexp import rewrite_logsumexp
from .shift_scans import shift_scans
from .simplify_algebra import simplify_algebra
from .split_reductions import split_reductions
from .stream_products import stream_products
from .unroll_reductions import unroll_reductions

# In the order in which they run.
GRAPH_PASSES = (
    simplify_algebra, eliminate_common, alias_copies, collapse_one_hot, rewrite_attention, stream_products,
    rewrite_logsumexp, open_contractions, open_convolutions, convert_layouts, multiply_points, shift_scans,
    unroll_reductions, split_reductions, eliminate_dead,
)  # fmt: skip

__all__ = [
    "GRAPH_PASSES", "alias_copies", "collapse_one_hot", "convert_layouts", "eliminate_common", "eliminate_dead",
    "multiply_points", "open_contractions", "open_convolutions", "rewrite_attention", "rewrite_logsumexp",
    "shift_scans", "simplify_algebra", "split_reductions", "stream_products", "unroll_reductions",
]  # fmt: skip
