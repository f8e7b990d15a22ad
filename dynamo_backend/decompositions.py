"""Which ATen ops are taken apart while AOTAutograd traces, and which reach the importer whole.

torch's core table, without the ops that have a converter of their own: fewer nodes, and the forms that fusion knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
    "upsample_bilinear2d",
    "ldexp",
    "dist",
    "tril_indices",
    "triu_indices",
    "as_strided_copy",
    "permute_copy",
    "unbind_copy",
    "view_copy",
)


@lru_cache(maxsize=1)
def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """The table for ``aot_autograd(decompositions=…)``: overload -> function that computes it from simpler ops."""
    build = getattr(_decomp, "_core_aten_decompositions_post_autograd", None) or _decomp.core_aten_decompositions
    table: dict[OpOverload, Callable[..., Any]] = dict(build().items())
    extra: list[OpOverloadPacket] = [getattr(aten, name) for name in _EXTRA if hasattr(aten, name)]
    table.update(_decomp.get_decompositions(extra))
    table[aten.addcmul.default] = _addcmul(table[aten.addcmul.default])
    keep = CONVERTERS.keys() | set(_WHOLE)
    return {op: fn for op, fn in table.items() if str(op) not in keep}


def _addcmul(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decomposition, with a factor that integers truncate, as eager does, where torch's refuses it."""

    def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: Any = 1) -> Any:
        if isinstance(value, float) and not any(t.is_floating_point() or t.is_complex() for t in (x, a, b)):
            value = int(value)
        return torchs(x, a, b, value=value)

    return addcmul


# torch takes these apart below autograd, where no table is asked; their backward would be a scatter with duplicates.
_RESIZE = (aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default)
_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


def _nearest_by_scales(x: torch.Tensor, size: Sequence[Any] | None, scales: Sequence[float] | None) -> torch.Tensor:
    if size is None:
        assert scales is not None
        size = [n * int(s) if int(s) == s else torch.sym_int(n * s) for n, s in zip(x.shape[2:], scales)]
    height, width = scales if scales else (None, None)
    result: torch.Tensor = aten.upsample_nearest2d.default(x, size, height, width)
    return result


@contextlib.contextmanager
def whole_ops() -> Iterator[None]:
    """While AOTAutograd traces inside, ops that torch always takes apart in Python stay whole, forward and backward."""
    saved = {op: dict(op.py_kernels) for op in _RESIZE}
    by_scales = _RESIZE[0]
    for op in _RESIZE:
        for key in _KEYS:
            op.py_kernels.pop(key, None)
    for key in _KEYS:
        by_scales.py_kernels[key] = _nearest_by_scales
    try:
        for op in _RESIZE:
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in saved.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
