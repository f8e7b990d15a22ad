"""Which memory of the CPU a program asks its process's pool for (``runtime/pool``), and which torch alone."""

from __future__ import annotations

from ....ir.graph.by_size import forms_of
from ....ir.graph.graph import Library, TensorType
from ..steps.ops import MAKERS, out_overload

# Bytes from which a tensor is a block of the pool. The C library keeps smaller ones, takes less time for them, and
# gives them to whoever asks next: what the pool holds is no use to others, and programs hold most at another time than
# they. It would keep up to 32 MiB, but gives the end of its memory back where more than 64 MiB are free there, as
# behind a training step: 13 % of one of six layers of 16 MiB. Deep models of 4 to 8 MiB a layer may pay up to 9 %.
LEAST_BLOCK = 8 << 20
# The same of results of ops that have to be watched for it, which takes up to 0.2 ms. The C library keeps what has been
# given back as long as it is smaller (M_MMAP_THRESHOLD).
LEAST_WATCHED = 32 << 20


def may_be_block(kind: TensorType, least: int = LEAST_BLOCK) -> bool:
    """Whether a tensor's memory may be a block of the pool: where sizes vary, each call says."""
    nbytes = kind.nbytes
    return kind.device == "cpu" and not (nbytes.is_Integer and nbytes < least)


def least_result(target: str) -> int | None:
    """Bytes from which results of an op are blocks of the pool, None where it cannot be made to put them there."""
    if out_overload(target) is not None:
        return LEAST_BLOCK
    return LEAST_WATCHED if target in MAKERS else None


def results_in_blocks(node: Library) -> tuple[TensorType, ...]:
    """The results of an op that may be blocks of the pool."""
    if (forms := forms_of(node)) is not None:
        found = (*results_in_blocks(forms.fewer), *results_in_blocks(forms.more))
        return tuple(dict.fromkeys(found))
    least = least_result(node.target)
    return () if least is None else tuple(t for t in node.types if t is not None and may_be_block(t, least))
