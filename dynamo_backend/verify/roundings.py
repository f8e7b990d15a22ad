"""Monte Carlo arithmetic: every operation that rounds gives its result with a random error of the size of a rounding.
How far results move says how sure they are.

Source: Parker, Monte Carlo arithmetic, 1997.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDS = frozenset(
    ("add", "sub", "rsub", "mul", "div", "reciprocal", "sum", "mean", "prod", "cumsum", "cumprod", "exp", "expm1",
     "exp2", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "pow", "mm", "bmm", "addmm", "baddbmm", "mv", "dot",
     "addmv", "addcmul", "addcdiv", "tanh", "sigmoid", "erf", "sin", "cos", "lerp", "linalg_vector_norm", "convolution",
     "native_layer_norm", "native_group_norm", "native_batch_norm", "_softmax", "_log_softmax", "var", "var_mean",
     "index_add", "scatter_add", "logsumexp")
)  # fmt: skip


class Roundings(TorchDispatchMode):
    """While it is entered, ATen ops that round have relative errors of up to ``eps``, None for that of each result's
    type. Ops that are exact (copies, comparisons, maxima) stay so, and with an ``eps`` of 0 all do. What a higher-order
    operator does inside has no errors."""

    supports_higher_order_operators = True

    def __init__(self, generator: torch.Generator, eps: float | None = None) -> None:
        super().__init__()
        self.generator = generator
        self.eps = eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch crashes in operations on zeros without memory while a mode is entered.
        args = tuple(torch.zeros_like(a) if isinstance(a, Tensor) and a._is_zerotensor() else a for a in args)
        result = func(*args, **(kwargs or {}))
        if self.eps == 0 or not isinstance(func, OpOverload) or func.overloadpacket.__name__ not in _ROUNDS:
            return result
        return tuple(self._off(r) for r in result) if isinstance(result, tuple) else self._off(result)

    def _off(self, t: Any) -> Any:
        if not isinstance(t, Tensor) or not (t.is_floating_point() or t.is_complex()):
            return t
        eps = torch.finfo(t.dtype).eps if self.eps is None else self.eps
        error = eps * (2 * torch.rand(t.shape, dtype=torch.float64, generator=self.generator) - 1)
        return (t + t * error.to(t.device)).to(t.dtype)
