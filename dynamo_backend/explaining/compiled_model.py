"""What is inside of something that ``torch.compile`` gave: the model, and how it was asked to be compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, innermost_fn

from ..entry.backend import mlc_backend


@dataclass(frozen=True, slots=True)
class Asked:
    """A callable that is not compiled, and what ``torch.compile`` was given with it, where it was for this backend."""

    call: Callable[..., Any]
    mode: str | None = None
    options: Mapping[str, object] | None = None
    dynamic: bool | None = None


def asked_of(model: Callable[..., Any]) -> Asked:
    """The original of a model or function, compiled (also in place, ``model.compile()``) or not."""
    if isinstance(model, OptimizedModule):
        return _asked(model._orig_mod, model.dynamo_ctx)
    if isinstance(model, torch.nn.Module):
        inside = getattr(model, "_compiled_call_impl", None)
        # The module itself would run what it was compiled to.
        return Asked(model) if inside is None else _asked(model._call_impl, _context_of(inside))
    inner = innermost_fn(model)
    return Asked(model) if inner is model else _asked(inner, _context_of(model))


def _context_of(function: Any) -> Any:
    """What torch.compile keeps of how it was called, in the closure of what it gave."""
    cells = getattr(function, "__closure__", None) or ()
    found = (cell.cell_contents for cell in cells)
    return next((x for x in found if isinstance(x, OptimizeContext)), None)


def _asked(call: Callable[..., Any], context: Any) -> Asked:
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    dynamic = getattr(backend, "dynamic", None)
    plain = getattr(backend, "compiler_fn", backend)
    if isinstance(plain, functools.partial) and plain.func is mlc_backend:
        return Asked(call, plain.keywords.get("mode"), plain.keywords.get("options"), dynamic)
    if plain is not mlc_backend:
        return Asked(call, None, None, dynamic)
    given = getattr(backend, "kwargs", {})
    return Asked(call, given.get("mode"), given.get("options"), dynamic)
