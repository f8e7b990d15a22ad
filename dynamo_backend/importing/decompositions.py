"""Which ATen ops are taken apart while AOTAutograd traces, and which reach the importer whole.

torch's core table, without the ops that have a converter of their own: fewer nodes, and the forms that fusion knows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import _decomp
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import (
    is_contiguous_for_memory_format_or_false,
    is_contiguous_or_false,
    suggest_memory_format,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..aten_passes.antialias import RESIZES
from ..aten_passes.complex.parts import with_complex
from ..aten_passes.embedding_bags import EMBEDDING_BAGS
from ..aten_passes.quantize import quantizing
from ..aten_passes.resize_gradients import RESIZE_GRADIENTS, is_gathered
from ..converters import CONVERTERS
from ..converters.refused_types import whole_where_refused
from ..converters.register import new_ops

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
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "ldexp",
    "dist",
    "tril_indices",
    "triu_indices",
    "as_strided_copy",
    "permute_copy",
    "unbind_copy",
    "view_copy",
)


_INTO_VIEWS = (
    aten.as_strided_scatter.default, aten.slice_scatter.default, aten.select_scatter.default,
    aten.diagonal_scatter.default,
)  # fmt: skip


def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """The table for ``aot_autograd(decompositions=…)``: overload -> function that computes it from simpler ops."""
    return _without(new_ops()) | {op: fn for op, fn in quantizing().items() if str(op) not in new_ops()}


@lru_cache(maxsize=8)
def _without(whole: frozenset[str]) -> dict[OpOverload, Callable[..., Any]]:
    """The table less some ops, for which users have registered converters."""
    return {op: fn for op, fn in _table().items() if str(op) not in whole}


@lru_cache(maxsize=1)
def _table() -> dict[OpOverload, Callable[..., Any]]:
    """The table for the converters that are ours."""
    build = getattr(_decomp, "_core_aten_decompositions_post_autograd", None) or _decomp.core_aten_decompositions
    table: dict[OpOverload, Callable[..., Any]] = dict(build().items())
    extra: list[OpOverloadPacket] = [getattr(aten, name) for name in _EXTRA if hasattr(aten, name)]
    table.update(_decomp.get_decompositions(extra))
    table[aten.addcmul.default] = _addcmul(table[aten.addcmul.default])
    table[aten.view_copy.default] = _view_copy
    table[aten.channel_shuffle.default] = _channel_shuffle(table[aten.channel_shuffle.default])
    table[aten.threshold.default] = _threshold(table[aten.threshold.default])
    keep = (CONVERTERS.keys() - new_ops()) | set(_WHOLE)
    kept = {op: fn for op, fn in table.items() if str(op) not in keep}
    kept[aten.native_dropout_backward.default] = _dropout_backward
    kept |= {op: _into_expanded(op) for op in _INTO_VIEWS}
    for ends in aten.linspace.overloads():
        op = getattr(aten.linspace, ends)
        if op in table:
            kept[op] = _linspace(table[op])
    kept[aten.narrow_copy.default] = _narrow_copy
    kept[aten.take.default] = _take
    kept |= {aten.complex.default: _complex, aten.polar.default: _polar, aten._to_copy.default: _to_complex}
    kept[aten.normal.Tensor_Tensor] = _normal
    kept[aten.max_unpool2d.default] = _max_unpool2d
    kept[aten.addbmm.default] = _addbmm
    kept[aten.isin.Tensor_Tensor] = _isin(table.get(aten.isin.Tensor_Tensor))
    kept[aten.unique_consecutive.default] = _unique_consecutive
    kept |= RESIZES | RESIZE_GRADIENTS | EMBEDDING_BAGS | {op: _as_eager_lays_out(op) for op in _BATCH_NORMS}
    return with_complex(whole_where_refused(kept))


def _addcmul(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decomposition, with a factor that integers truncate, as eager does, where torch's refuses it."""

    def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: Any = 1) -> Any:
        if isinstance(value, float) and not any(t.is_floating_point() or t.is_complex() for t in (x, a, b)):
            value = int(value)
        return torchs(x, a, b, value=value)

    return addcmul


def _linspace(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decomposition, but for whole numbers as eager makes them: ends are cut first, and then it counts from the
    nearer one, in double precision on a CPU and in single precision elsewhere."""

    def linspace(
        start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, device: Any = None, **how: Any
    ) -> Any:
        if dtype is None or dtype.is_floating_point or dtype.is_complex or not isinstance(steps, int) or steps < 2:
            return torchs(start, end, steps, dtype=dtype, device=device, **how)
        first, last = (e.to(torch.int64) if isinstance(e, torch.Tensor) else int(e) for e in (start, end))
        kind = torch.float64 if torch.device(device or "cpu").type == "cpu" else torch.float32
        at = torch.arange(steps, device=device)
        length = last - first
        step = (length.to(kind) if isinstance(length, torch.Tensor) else length) / (steps - 1)
        near, far = first + step * at.to(kind), last - step * (steps - 1 - at).to(kind)
        return torch.where(at < steps // 2, near, far).to(dtype)

    return linspace


def _channel_shuffle(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decomposition makes contiguous memory, and eager's kernel for CPUs keeps channels together."""

    def channel_shuffle(x: torch.Tensor, groups: int) -> Any:
        made = torchs(x, groups)
        return made.contiguous(memory_format=suggest_memory_format(x)) if x.device.type == "cpu" else made

    return channel_shuffle


def _max_unpool2d(x: torch.Tensor, indices: torch.Tensor, size: Sequence[Any]) -> Any:
    """Eager's kernel for CPUs keeps channels together; fake tensors are contiguous."""
    layout = suggest_memory_format(x)
    if x.device.type != "cpu" or layout is torch.contiguous_format:
        return NotImplemented
    made: torch.Tensor = aten.max_unpool2d.default(x.contiguous(), indices, size)
    return made.contiguous(memory_format=layout)


def _view_copy(x: torch.Tensor, size: Sequence[Any]) -> torch.Tensor:
    """Of whatever strides: torch's decomposition asks for a view, as eager does not."""
    return x.reshape(size).clone(memory_format=torch.contiguous_format)


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """On CPUs eager's result has the strides of its operands; torch's decomposition is after the kernel for GPUs."""
    if grad.device.type != "cpu" or is_contiguous_or_false(grad):
        return NotImplemented
    return grad * mask.type_as(grad) * scale


def _threshold(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """Of integers by numbers that eager makes integers too; torch's decomposition goes through floats, which lack the
    digits of large ones."""

    def threshold(x: torch.Tensor, limit: Any, value: Any) -> Any:
        if not x.is_floating_point():
            limit, value = int(limit), int(value)
        return decomposed(x, limit, value)

    return threshold


def _shares(x: torch.Tensor) -> bool:
    """Whether elements lie where others of the same dimension do; none do where there are none."""
    if any(statically_known_true(n == 0) for n in x.shape):
        return False
    strides = zip(x.shape, x.stride(), strict=True)
    return any(isinstance(s, int) and s == 0 and not statically_known_true(n == 1) for n, s in strides)


def _into_expanded(op: OpOverload) -> Callable[..., Any]:
    """A scatter into views of an expanded operand, whose elements eager first gives memory of their own; fake tensors
    keep its strides."""

    def scattered(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x.clone(), *args, **kwargs) if _shares(x) else NotImplemented

    return scattered


def _narrow_copy(x: torch.Tensor, dim: int, start: Any, length: Any) -> torch.Tensor:
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _normal(mean: torch.Tensor, std: torch.Tensor, **how: Any) -> Any:
    """Eager's result is contiguous; fake tensors keep the strides of the means."""
    if is_contiguous_or_false(mean) and is_contiguous_or_false(std):
        return NotImplemented
    return aten.normal.Tensor_Tensor(mean.contiguous(), std.contiguous(), **how)


def _unique_consecutive(x: torch.Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None) -> Any:
    """torch's fake kernel gives a dimension that is counted from the end a wrong shape."""
    if dim is None or dim >= 0:
        return NotImplemented
    return aten.unique_consecutive.default(x, inverse, counts, dim + x.dim())


def _take(x: torch.Tensor, index: torch.Tensor) -> Any:
    """torch's decomposition asks for the number that a single index is."""
    return aten.index.Tensor(x.reshape(-1), [index])


def _addbmm(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """A sum over the batch as well is one product, of matrices side by side."""
    batch, rows, depth = a.shape
    side = a.transpose(0, 1).reshape(rows, batch * depth)
    below = b.reshape(batch * depth, b.shape[2])
    return aten.addmm.default(x, side, below, beta=beta, alpha=alpha)


# Comparisons of one element that take as long as sorting it.
_COMPARED = 1024


def _isin(torchs: Callable[..., Any] | None) -> Callable[..., Any]:
    """All compared with all where that is done sooner than sorting; else torch's decomposition."""

    def isin(x: torch.Tensor, among: torch.Tensor, *, assume_unique: bool = False, invert: bool = False) -> Any:
        counts = x.numel(), among.numel()
        if not all(isinstance(n, int) for n in counts) or math.prod(counts) > _COMPARED * sum(counts):
            given: Any = {"assume_unique": assume_unique, "invert": invert}
            return NotImplemented if torchs is None else torchs(x, among, **given)
        found = (x.unsqueeze(-1) == among.reshape(-1)).any(-1)
        return found.logical_not() if invert else found

    return isin


def _complex(real: torch.Tensor, imaginary: torch.Tensor) -> Any:
    """No kernel computes with complex numbers, but their parts are real ones side by side."""
    if real.dtype != imaginary.dtype or not (is_contiguous_or_false(real) and is_contiguous_or_false(imaginary)):
        return NotImplemented
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imaginary), -1))


def _polar(size: torch.Tensor, angle: torch.Tensor) -> Any:
    return _complex(size * angle.cos(), size * angle.sin())


def _to_complex(x: torch.Tensor | complex, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    """A real tensor as a complex one."""
    if dtype is None or not dtype.is_complex or not isinstance(x, torch.Tensor) or x.is_complex():
        return NotImplemented
    if how.get("device") not in (None, x.device) or how.get("layout") not in (None, x.layout):
        return NotImplemented
    # Laid out as eager has it for any element type, and made as what is contiguous in the order of its strides.
    real = aten._to_copy.default(x, dtype=dtype.to_real(), memory_format=how.get("memory_format"))
    if is_contiguous_or_false(real):
        return _complex(real, torch.zeros_like(real))
    if not all(isinstance(s, int) for s in real.stride()):
        return NotImplemented
    order = sorted(range(real.dim()), key=lambda d: -real.stride(d))
    inside = real.permute(order)
    if not is_contiguous_or_false(inside):
        return NotImplemented
    return _complex(inside, torch.zeros_like(inside)).permute([order.index(d) for d in range(real.dim())])


_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
_BATCH_NORMS = (
    *(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default),
    *(aten._native_batch_norm_legit.no_stats, aten._batch_norm_with_update_functional.default),
)


def _as_eager_lays_out(norm: OpOverload) -> Callable[..., Any]:
    """Batch norms of operands with other strides: torch's fake tensors keep those, but eager's results are contiguous,
    or have their channels together."""

    def laid_out(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Channels that are together are taken for that, even where dimensions of one have strides of something else.
        layouts = [torch.contiguous_format, *_CHANNELS_LAST.get(x.dim(), ())]
        if any(is_contiguous_for_memory_format_or_false(x, memory_format=f) for f in layouts):
            return NotImplemented
        return norm(x.contiguous(memory_format=suggest_memory_format(x)), *args, **kwargs)

    return laid_out


# torch takes these apart below autograd, where no table is asked; their backward would be a scatter with duplicates.
_NEAREST = (aten.upsample_nearest2d,)
_SMOOTH = (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d)
_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


def _by_scales(
    resize: OpOverloadPacket, torchs: Callable[..., torch.Tensor], x: torch.Tensor, size: Sequence[Any] | None,
    *rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The ``vec`` form of a resizing by its other form, which stays whole where its gradient has a form without a
    scatter: ``rest`` are whether corners are aligned, where it asks for that, and scales."""
    *aligned, scales = rest
    known = size
    if size is None:
        assert scales is not None
        size = [n * int(s) if int(s) == s else torch.sym_int(n * s) for n, s in zip(x.shape[2:], scales)]
    factors = scales if scales else ()
    if resize in _SMOOTH and not is_gathered(x, size, *aligned, *factors):
        return torchs(x, known, *rest)
    result: torch.Tensor = resize.default(x, size, *aligned, *factors)
    return result


@contextlib.contextmanager
def whole_ops() -> Iterator[None]:
    """While AOTAutograd traces inside, ops that torch always takes apart in Python stay whole, forward and backward."""
    changed = [op for resize in (*_NEAREST, *_SMOOTH) for op in (resize.vec, resize.default)]
    saved = {op: dict(op.py_kernels) for op in changed}
    for op in changed:
        for key in _KEYS:
            op.py_kernels.pop(key, None)
    for resize in (*_NEAREST, *_SMOOTH):
        for key in _KEYS:
            resize.vec.py_kernels[key] = partial(_by_scales, resize, saved[resize.vec][key])
    try:
        for op in changed:
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in saved.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
