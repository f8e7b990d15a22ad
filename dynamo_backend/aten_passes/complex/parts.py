"""Arithmetic of complex numbers, written as that of their parts, for kernels to compute.

No kernel knows complex numbers, but memory has their two parts side by side: ``view_as_real`` is a view, and
``view_as_complex`` of parts that are stacked is another. So what is made of complex numbers one by one is made of real
ones here, while AOTAutograd traces, and fuses like anything else; products, transforms and factorisations stay a
library's. Functions are computed in float64 where numbers are of float32, so that nothing overflows on the way.

Operands lie in the same order in memory, as results then do; where they do not, torch's own kernel serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false

aten = torch.ops.aten
Pair = tuple[Any, Any]
Decomposition = Callable[..., Any]

_KINDS = (torch.complex64, torch.complex128)


def _ordered(operands: Sequence[Any]) -> list[int] | None:
    """The order of dimensions in which every tensor is contiguous; None where there is none, or none that is known."""
    tensors = [t for t in operands if isinstance(t, Tensor)]
    if all(is_contiguous_or_false(t) for t in tensors):
        return list(range(max(t.dim() for t in tensors)))
    first = tensors[0]
    if any(t.shape != first.shape or t.stride() != first.stride() for t in tensors):
        return None
    if not all(isinstance(n, int) for n in (*first.shape, *first.stride())):
        return None
    order = sorted(range(first.dim()), key=lambda d: -first.stride(d))
    return order if is_contiguous_or_false(first.permute(order)) else None


def _made(real: Tensor, imaginary: Tensor, order: Sequence[int]) -> Tensor:
    whole = torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imaginary), -1))
    if list(order) == sorted(order):
        return whole
    return whole.permute([order.index(d) for d in range(whole.dim())])


def _parts(x: Any, order: Sequence[int], real: torch.dtype) -> Pair:
    """Real and imaginary part of an operand, a tensor's with its dimensions in ``order``."""
    if not isinstance(x, Tensor):
        number = complex(x)
        return number.real, number.imag
    if list(order) != sorted(order):
        x = x.permute(order)
    if not x.is_complex():
        return x.to(real), 0.0
    pair = torch.view_as_real(x.conj() if x.is_conj() else x)
    imaginary = pair.select(-1, 1).to(real)
    return pair.select(-1, 0).to(real), -imaginary if x.is_conj() else imaginary


def _number(x: Any) -> Any:
    """An operand, as a number where tracing knows it: the factor of a gradient is the conjugate of a number, and its
    fake tensor has lost the bit."""
    constant = getattr(x, "constant", None) if isinstance(x, Tensor) and not x.dim() else None
    return x if constant is None else constant.item()


def _fits(operands: Sequence[Any]) -> bool:
    """Whether some operand is complex, and every one something whose parts are known."""
    tensors = [t for t in operands if isinstance(t, Tensor)]
    if not any(t.dtype in _KINDS for t in tensors):
        return False
    plain = all(t.layout is torch.strided and (t.dtype in _KINDS or t.dtype.itemsize != 2) for t in tensors)
    same = len({t.device for t in tensors}) == 1
    return plain and same and all(isinstance(x, (Tensor, int, float, complex)) for x in operands)


def _each(fn: Callable[..., Any], count: int, wide: bool = False) -> Decomposition:
    """An operation on each element of ``count`` operands: ``fn`` of their parts gives those of the result, or a real
    result. ``wide``: in float64, for numbers of float32 alone."""

    def decomposed(*args: Any, **how: Any) -> Any:
        operands = [_number(x) for x in args[:count]]
        if len(args) < count or not _fits(operands):
            return NotImplemented
        kind = operands[0].dtype
        if count > 1:  # tensors of a dimension rule over numbers
            kind = reduce(torch.promote_types, (torch.result_type(a, b) for a, b in pairwise(args[:count])))
        order = _ordered(operands)
        if order is None or kind not in _KINDS or (wide and kind is torch.complex128):
            return NotImplemented
        real = kind.to_real()
        parts = (_parts(x, order, torch.float64 if wide else real) for x in operands)
        found = fn(*parts, *args[count:], **how)
        if found is NotImplemented:
            return NotImplemented
        if isinstance(found, tuple):
            return _made(found[0].to(real), found[1].to(real), order)
        found = found.to(real) if found.dtype.is_floating_point else found
        return found if list(order) == sorted(order) else found.permute([order.index(d) for d in range(found.dim())])

    return decomposed


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _add(x: Pair, y: Pair, *, alpha: Any = 1) -> Any:
    if alpha != 1:
        y = _mul(y, (complex(alpha).real, complex(alpha).imag))
    return _whole(x[0] + y[0]), _whole(x[1] + y[1])


def _sub(x: Pair, y: Pair, *, alpha: Any = 1) -> Any:
    if alpha != 1:
        y = _mul(y, (complex(alpha).real, complex(alpha).imag))
    return _whole(x[0] - y[0]), _whole(x[1] - y[1])


def _rsub(x: Pair, y: Pair, alpha: Any = 1) -> Any:
    return _sub(y, x, alpha=alpha)


def _whole(x: Any) -> Any:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _mul(x: Pair, y: Pair) -> Pair:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _div(x: Pair, y: Pair) -> Pair:
    """After Smith (1962): by the ratio of the divisor's parts, so that no square overflows."""
    (a, b), (c, d) = x, y
    if not isinstance(c, Tensor):
        return _mul(x, _inverse(c, d)) if c or d else (a / 0.0, b / 0.0)
    d = d if isinstance(d, Tensor) else torch.zeros_like(c)
    by_real = c.abs() >= d.abs()
    ratio = torch.where(by_real, d, c) / torch.where(by_real, c, d)
    scale = 1 / torch.where(by_real, c + d * ratio, c * ratio + d)
    real = torch.where(by_real, a + b * ratio, a * ratio + b) * scale
    return real, torch.where(by_real, b - a * ratio, b * ratio - a) * scale


def _inverse(c: float, d: float) -> Pair:
    inverse = 1 / complex(c, d)
    return inverse.real, inverse.imag


def _mul_add(x: Pair, y: Pair, z: Pair, *, value: Any = 1) -> Any:
    return _add(x, _mul(y, z), alpha=value)


def _div_add(x: Pair, y: Pair, z: Pair, *, value: Any = 1) -> Any:
    return _add(x, _div(y, z), alpha=value)


def _differ(x: Pair, y: Pair) -> Tensor:
    return (x[0] != y[0]) | (x[1] != y[1])


# --- functions --------------------------------------------------------------------------------------------------------


def _exp(x: Pair) -> Pair:
    size = x[0].exp()
    return size * x[1].cos(), size * x[1].sin()


def _log(x: Pair) -> Pair:
    return torch.hypot(*x).log(), torch.atan2(x[1], x[0])


def _sigmoid(x: Pair) -> Pair:
    size = (-x[0]).exp()
    return _div((1.0, 0.0), (1 + size * x[1].cos(), -size * x[1].sin()))


_UNARY: dict[str, tuple[Callable[..., Any], bool]] = {
    "neg": (lambda x: (-x[0], -x[1]), False),
    "conj_physical": (lambda x: (x[0] + 0.0, -x[1]), False),
    "_conj_physical": (lambda x: (x[0] + 0.0, -x[1]), False),
    "abs": (lambda x: torch.hypot(*x), False),
    "angle": (lambda x: torch.atan2(x[1], x[0]), False),
    "square": (lambda x: _mul(x, x), False),
    "reciprocal": (lambda x: _div((1.0, 0.0), x), False),
    "isnan": (lambda x: x[0].isnan() | x[1].isnan(), False),
    "exp": (_exp, True),
    "log": (_log, True),
    "sigmoid": (_sigmoid, True),
    "silu": (lambda x: _mul(x, _sigmoid(x)), True),
    "sin": (lambda x: (x[0].sin() * x[1].cosh(), x[0].cos() * x[1].sinh()), True),
    "cos": (lambda x: (x[0].cos() * x[1].cosh(), -x[0].sin() * x[1].sinh()), True),
    "sinh": (lambda x: (x[0].sinh() * x[1].cos(), x[0].cosh() * x[1].sin()), True),
    "cosh": (lambda x: (x[0].cosh() * x[1].cos(), x[0].sinh() * x[1].sin()), True),
}
_BINARY: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "add": (_add, ("Tensor", "Scalar")),
    "sub": (_sub, ("Tensor", "Scalar")),
    "rsub": (_rsub, ("Tensor", "Scalar")),
    "mul": (_mul, ("Tensor", "Scalar")),
    "div": (_div, ("Tensor", "Scalar")),
    "eq": (lambda x, y: _differ(x, y).logical_not(), ("Tensor", "Scalar")),
    "ne": (_differ, ("Tensor", "Scalar")),
}


# --- what moves, or adds up, whole numbers ----------------------------------------------------------------------------


def _pair(x: Any) -> bool:
    plain = isinstance(x, Tensor) and x.dtype in _KINDS and x.layout is torch.strided and not x.is_conj()
    return plain and is_contiguous_or_false(x)


def _over(fn: Callable[..., Tensor], x: Tensor, dims: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    if x.dtype not in _KINDS or dtype not in (None, x.dtype) or not x.dim() or x.is_conj():
        return NotImplemented
    over = [d % x.dim() for d in dims] if dims else list(range(x.dim()))
    return torch.view_as_complex(fn(torch.view_as_real(x), over, keepdim))


def _sum(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    return _over(torch.sum, x, dims, keepdim, dtype)


def _mean(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    return _over(torch.mean, x, dims, keepdim, dtype)


def _pad(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Any:
    if not _pair(x) or value != 0:
        return NotImplemented
    return torch.view_as_complex(aten.constant_pad_nd.default(torch.view_as_real(x), [0, 0, *pad], 0.0))


def _index(x: Tensor, indices: Sequence[Any]) -> Any:
    given = [t for t in indices if t is not None]
    if not _pair(x) or any(t.dtype in (torch.bool, torch.uint8) for t in given):
        return NotImplemented
    made = aten.index.Tensor(torch.view_as_real(x), indices)
    return torch.view_as_complex(made) if is_contiguous_or_false(made) else NotImplemented


def _index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    if not _pair(x) or not x.dim():
        return NotImplemented
    return torch.view_as_complex(aten.index_select.default(torch.view_as_real(x), dim % x.dim(), index))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    kinds = {t.dtype for t in tensors}
    if len(kinds) != 1 or not all(_pair(t) and t.dim() == tensors[0].dim() and t.dim() for t in tensors):
        return NotImplemented
    parts = [torch.view_as_real(t) for t in tensors]
    return torch.view_as_complex(aten.cat.default(parts, dim % tensors[0].dim()))


def _clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Any:
    if x.dtype not in _KINDS or x.layout is not torch.strided:
        return NotImplemented
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    if x.is_conj():
        order = _ordered([x])
        if order is None or (memory_format is torch.contiguous_format and not is_contiguous_or_false(x)):
            return NotImplemented
        return _made(*_parts(x, order, x.dtype.to_real()), order)
    if memory_format is torch.contiguous_format or is_contiguous_or_false(x):
        return torch.view_as_complex(torch.view_as_real(x).clone(memory_format=torch.contiguous_format))
    return NotImplemented


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if not (_pair(x) and _pair(y) and x.dtype == y.dtype and is_contiguous_or_false(condition)):
        return NotImplemented
    if len({condition.device, x.device, y.device}) > 1:
        return NotImplemented
    parts = [torch.view_as_real(t) for t in (x, y)]
    rank = max(condition.dim(), x.dim(), y.dim())
    lifted = [t.reshape(*[1] * (rank + 1 - t.dim()), *t.shape) for t in parts]
    made = torch.where(condition.unsqueeze(-1), *lifted)
    return torch.view_as_complex(made) if is_contiguous_or_false(made) else NotImplemented


_MOVES: dict[str, Decomposition] = {
    "sum.default": _sum,
    "sum.dim_IntList": _sum,
    "mean.default": _mean,
    "mean.dim": _mean,
    "constant_pad_nd.default": _pad,
    "index.Tensor": _index,
    "index_select.default": _index_select,
    "cat.default": _cat,
    "clone.default": _clone,
    "where.self": _where,
}


def with_complex(table: dict[OpOverload, Decomposition]) -> dict[OpOverload, Decomposition]:
    """A table of decompositions, with those of complex numbers before what it has for the same ops."""
    found: dict[OpOverload, Decomposition] = dict(table)
    for name, (fn, wide) in _UNARY.items():
        _register(found, f"{name}.default", _each(fn, 1, wide))
    for name, (fn, overloads) in _BINARY.items():
        for overload in overloads:
            _register(found, f"{name}.{overload}", _each(fn, 2))
    _register(found, "addcmul.default", _each(_mul_add, 3))
    _register(found, "addcdiv.default", _each(_div_add, 3))
    for name, fn in _MOVES.items():
        _register(found, name, fn)
    return found


def _register(table: dict[OpOverload, Decomposition], name: str, fn: Decomposition) -> None:
    packet, overload = name.split(".")
    op: OpOverload = getattr(getattr(aten, packet), overload)
    other = table.get(op)

    def decomposed(*args: Any, **how: Any) -> Any:
        made = fn(*args, **how)
        return made if made is not NotImplemented or other is None else other(*args, **how)

    table[op] = decomposed
