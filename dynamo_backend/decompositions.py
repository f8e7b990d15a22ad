"""Which ATen ops are taken apart while AOTAutograd traces, and which reach the importer whole.

torch's core table, without the ops that have a converter of their own: fewer nodes, and the forms that fusion knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import _decomp
from torch._ops import OpOverload, OpOverloadPacket

from .converters import CONVERTERS

aten = torch.ops.aten

# Left whole for a library, although torch could take them apart.
_WHOLE: tuple[str, ...] = (
    "aten.embedding_dense_backward.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten.baddbmm.default",
)

# Taken apart although the core table keeps them.
_EXTRA: tuple[str, ...] = (
    "addmv",
    "addbmm",
)


@lru_cache(maxsize=1)
def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """The table for ``aot_autograd(decompositions=…)``: overload -> function that computes it from simpler ops."""
    build = getattr(_decomp, "_core_aten_decompositions_post_autograd", None) or _decomp.core_aten_decompositions
    table: dict[OpOverload, Callable[..., Any]] = dict(build().items())
    extra: list[OpOverloadPacket] = [getattr(aten, name) for name in _EXTRA if hasattr(aten, name)]
    table.update(_decomp.get_decompositions(extra))
    keep = CONVERTERS.keys() | set(_WHOLE)
    return {op: fn for op, fn in table.items() if str(op) not in keep}
