"""The calls of a fused graph: merged side by side, written in place, and put in order."""

from ...ir.passes import Pass, Plain
from ..context import PassContext
from ..fusion.fusion import CALLS, ONLY_CALLS, Fusion
from ..fusion.in_place import write_in_place
from ..fusion.scatter import begin_apart
from .block_rows import block_rows
from .horizontal import compute_scalars_apart, share_launches
from .join_points import join_points
from .join_small import join_small
from .memory_order import order_for_memory
from .overlap_begun import overlap_begun
from .overwrite import write_over_dead
from .share_code import share_code
from .side_by_side import part_side_by_side
from .slices import write_slices

# In the order in which they run.
CALL_PASSES: tuple[Pass[Fusion, PassContext], ...] = (
    Pass("compute_scalars_apart", CALLS, Plain(compute_scalars_apart), needs=(ONLY_CALLS,)),
    Pass("block_rows", CALLS, block_rows, needs=(ONLY_CALLS,)),
    Pass("write_in_place", CALLS, write_in_place, needs=(ONLY_CALLS,)),
    Pass("write_slices", CALLS, write_slices, needs=(ONLY_CALLS,)),
    Pass("part_side_by_side", CALLS, part_side_by_side, needs=(ONLY_CALLS,)),
    Pass("share_launches", CALLS, share_launches, needs=(ONLY_CALLS,)),
    Pass("write_over_dead", CALLS, write_over_dead, needs=(ONLY_CALLS,)),
    Pass("begin_apart", CALLS, Plain(begin_apart), needs=(ONLY_CALLS,)),
    Pass("join_points", CALLS, join_points, needs=(ONLY_CALLS,)),
    Pass("join_small", CALLS, join_small, needs=(ONLY_CALLS,)),
    Pass("order_for_memory", CALLS, order_for_memory, needs=(ONLY_CALLS,)),
    Pass("overlap_begun", CALLS, overlap_begun, needs=(ONLY_CALLS,)),
    Pass("share_code", CALLS, share_code, needs=(ONLY_CALLS,)),
)

__all__ = ["CALL_PASSES"]
