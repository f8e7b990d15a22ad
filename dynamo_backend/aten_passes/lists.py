"""The passes over ATen graphs, in place, by the graphs that they are for."""

from __future__ import annotations

from torch import fx

from ...ir.passes import Pass, Plain
from .attention.joint import recompute_scores
from .attention.plain_softmax import unite_softmax
from .attention.read_saved import read_saved
from .attention.shifted_softmax import unshift_softmax
from .attention.write_sinks import write_sinks
from .batch_norm import forget_running_statistics, renormalize
from .complex.views import join_parts
from .context import ATEN, FAST, FROZEN, HAS_METADATA, AtenContext, OnGraph
from .frozen.fold_batch_norms import fold_batch_norms
from .frozen.fold_scales import fold_scales
from .frozen.join_products import join_products
from .frozen.literals import write_literals
from .frozen.pack_convolutions import pack_convolutions
from .frozen.pack_weights import pack_weights
from .frozen.turn_filters import turn_filters
from .loss.chunk_loss import chunk_losses
from .loss.decompose_log_softmax import decompose_log_softmax
from .merge_products import merge_products
from .remake_positions import remake_positions
from .rounding.maxima import recompute_maxima, save_compared
from .rounding.numerics import BY_PLACE, keep_numerics
from .rounding.rounding import keep_compared
from .share_nodes import NO_DEAD, eliminate_dead_nodes, share_nodes
from .views.negations import return_negated_views, stride_before_negating
from .views.overwritten import keep_overwritten
from .views.plain_views import straighten_views
from .views.save_copies import save_copies
from .views.written_views import return_written_inputs

AtenPasses = tuple[Pass[fx.GraphModule, AtenContext], ...]

_WRITE_SINKS = Pass("write_sinks", ATEN, OnGraph(write_sinks), needs=(FAST,))

# Graphs without a backward.
INFERENCE_PASSES: AtenPasses = (
    Pass("chunk_losses", ATEN, chunk_losses),
    Pass("unshift_softmax", ATEN, OnGraph(unshift_softmax), needs=(FAST,)),
    _WRITE_SINKS,
)
# Graphs that hold forward and backward, before they are parted: what decides of saving.
JOINT_PASSES: AtenPasses = (
    *INFERENCE_PASSES[:2],
    Pass("unite_softmax", ATEN, OnGraph(unite_softmax), needs=(FAST,)),
    Pass("decompose_log_softmax", ATEN, Plain(decompose_log_softmax)),
    Pass("forget_running_statistics", ATEN, Plain(forget_running_statistics)),
    Pass("renormalize", ATEN, renormalize, needs=(FAST,)),
    Pass("straighten_views", ATEN, OnGraph(straighten_views)),
    Pass("eliminate_dead_nodes", ATEN, OnGraph(eliminate_dead_nodes), leaves=(NO_DEAD,)),
    Pass("share_nodes", ATEN, OnGraph(share_nodes), needs=(NO_DEAD,)),
    Pass("recompute_scores", ATEN, recompute_scores, needs=(FAST,)),
    _WRITE_SINKS,
    Pass("remake_positions", ATEN, OnGraph(remake_positions)),
    Pass("keep_overwritten", ATEN, Plain(keep_overwritten)),
    Pass("save_compared", ATEN, OnGraph(save_compared)),
)
# A forward and its backward, right after they were parted.
FORWARD_PASSES: AtenPasses = (Pass("save_copies", ATEN, save_copies),)
BACKWARD_PASSES: AtenPasses = (
    Pass("read_saved", ATEN, Plain(read_saved)),
    Pass("recompute_maxima", ATEN, recompute_maxima),
)
# Every graph that AOTAutograd hands over.
PART_PASSES: AtenPasses = (
    Pass("merge_products", ATEN, merge_products, needs=(FAST,)),
    Pass("return_written_inputs", ATEN, return_written_inputs, needs=(HAS_METADATA,)),
    Pass("return_negated_views", ATEN, Plain(return_negated_views), needs=(HAS_METADATA,)),
    Pass("write_literals", ATEN, write_literals),
)
# Graphs with inputs that do not change between calls.
FROZEN_PASSES: AtenPasses = (
    Pass("eliminate_dead_nodes", ATEN, OnGraph(eliminate_dead_nodes), needs=(FROZEN,), leaves=(NO_DEAD,)),
    Pass("share_nodes", ATEN, OnGraph(share_nodes), needs=(FROZEN, NO_DEAD)),
    Pass("fold_batch_norms", ATEN, fold_batch_norms, needs=(FAST, FROZEN)),
    Pass("fold_scales", ATEN, fold_scales, needs=(FAST, FROZEN)),
    Pass("join_products", ATEN, join_products, needs=(FROZEN,)),
    Pass("pack_weights", ATEN, pack_weights, needs=(FAST, FROZEN)),
    Pass("pack_convolutions", ATEN, pack_convolutions, needs=(FAST, FROZEN)),
    Pass("turn_filters", ATEN, turn_filters, needs=(FROZEN,)),
)
# Every graph that is compiled, bodies of control flow among them.
ATEN_PASSES: AtenPasses = (
    Pass("keep_numerics", ATEN, keep_numerics, needs=(BY_PLACE,)),
    Pass("join_parts", ATEN, Plain(join_parts)),
    Pass("keep_compared", ATEN, Plain(keep_compared)),
    Pass("stride_before_negating", ATEN, Plain(stride_before_negating)),
)
