"""Which ATen ops a program of ``torch.export`` is taken apart into: the ones that AOTAutograd gives the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._export.utils import _get_decomp_for_cia
from torch._ops import OpOverload

from ..converters import CONVERTERS
from ..importing.decompositions import decomposition_table

# Ops that torch.export keeps whole unless somebody names them, and AOTAutograd does not.
_KEPT = ("upsample_bilinear2d.vec", "upsample_nearest2d.vec", "_fused_rms_norm.default")


def export_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The backend's own table, and all ops that are made of others for every device. To be called inside of
    ``whole_ops``."""
    core, composite = _core_aten_decompositions_post_autograd(), torch.export.default_decompositions()
    table: dict[OpOverload, Callable[..., Any]] = {op: fn for op, fn in composite.items() if op not in core}
    for name in _KEPT:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if op is not None and str(op) not in CONVERTERS:
            table[op] = _get_decomp_for_cia(op)
    return table | decomposition_table()
