"""Ops whose results lie in blocks of the pool.

Most are given the memory that they write to. Those that take none (oneDNN's convolutions, attention) ask torch for
empty memory, as anybody may, and torch asks who stands in between: a mode that answers with blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ...codegen.host.memory.blocks import LEAST_WATCHED
from ...codegen.host.steps.ops import MAKERS, out_overload
from ...ir.graph.effects import resolve_op
from .pool import POOL

# Sizes, strides, type of a result, and whether its block may be longer.
Layout: TypeAlias = "tuple[Sequence[int], Sequence[int], torch.dtype, bool]"
_aten = torch.ops.aten
_EMPTY = frozenset((_aten.empty.memory_format, _aten.empty_like.default))
# What the ops hand over to, and what asks for memory there.
_INSIDE = ("aten::_convolution.default",)


def in_blocks(target: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls an op for results in ``blocks`` of the pool, one layout for each.

    Without a pool, and where arguments are more than memory, it is ``op`` as it is.
    """
    found = out_overload(target)
    write = op if found is None else resolve_op(found.target)._op

    def call(*args: Any, blocks: Sequence[Layout], **kwargs: Any) -> Any:
        if POOL.spare == 0 or not (_is_plain(args) and _is_plain(kwargs.values()) and _is_alone()):
            return op(*args, **kwargs)
        if found is None:
            return _watched(op, args, kwargs, _ROUNDED if all(layout[3] for layout in blocks) else _EXACT)
        made = {name: POOL.empty(*layout) for name, layout in zip(found.results, blocks, strict=True)}
        return write(*args, **kwargs, **made)

    return call


def _is_plain(args: Iterable[Any]) -> bool:
    """Whether all tensors are memory and nothing else: no subclass, and nothing for autograd to note."""
    for arg in args:
        if isinstance(arg, Tensor):
            if type(arg) not in (Tensor, torch.nn.Parameter) or (arg.requires_grad and torch.is_grad_enabled()):
                return False
        elif isinstance(arg, (list, tuple)) and not _is_plain(arg):
            return False
    return True


def _is_alone() -> bool:
    """Whether no mode and no transform of torch's sees what is called."""
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


# --- memory that kernels ask for --------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Gives blocks to kernels that ask for empty memory."""

    def __init__(self, rounded: bool) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = _makers().get(func)
        if key is not None:
            return _watched(func._op_dk, (key, *args), kwargs, self)
        if func in _EMPTY and _is_memory(kwargs):
            like = func(*args, **{**kwargs, "device": "meta"})
            if like.nbytes >= LEAST_WATCHED:
                return POOL.empty(like.shape, like.stride(), like.dtype, self._rounded)
        elif func is _aten.resize_.default and not args[0].untyped_storage().nbytes():
            like = torch.empty(args[1], dtype=args[0].dtype, device="meta", **kwargs)
            if like.nbytes >= LEAST_WATCHED:
                block = POOL.empty(like.shape, like.stride(), like.dtype, self._rounded)
                return args[0].set_(block.untyped_storage(), 0, like.shape, like.stride())
        return func(*args, **kwargs)


_ROUNDED, _EXACT = _Watch(True), _Watch(False)


def _watched(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: _Watch) -> Any:
    """Call an op under a mode of this thread alone; ``with`` would stop compilation in all threads meanwhile."""
    torch._C._push_on_torch_dispatch_stack(mode)
    try:
        return op(*args, **kwargs)
    finally:
        torch._C._pop_torch_dispatch_stack(None)


def _is_memory(kwargs: Mapping[str, Any]) -> bool:
    """Whether what is asked for is plain memory of the CPU."""
    plain = kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
    return plain and kwargs.get("device") in (None, torch.device("cpu"))


@cache
def _makers() -> dict[OpOverload, torch._C.DispatchKey]:
    """Ops that ask for memory, or hand over to one that does, and under which key their kernels for the CPU are."""
    found = {}
    for target in (*MAKERS, *_INSIDE):
        for key in ("CPU", "CompositeExplicitAutograd"):
            op = resolve_op(target)
            if op not in found and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
                found[op] = getattr(torch._C.DispatchKey, key)
    return found


__all__ = ["Layout", "in_blocks"]
