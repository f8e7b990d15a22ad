"""Derivatives that tensors carry forward (``torch.autograd.forward_ad``), which no program of ours knows of."""

from __future__ import annotations

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GlobalStateSource
from torch._guards import TracingContext
from torch.autograd import forward_ad


def differentiates_forward() -> bool:
    """Whether a ``dual_level`` is open, so that tensors may carry derivatives.

    Whatever is answered is guarded: torch guards it only where a graph itself opens a level, and what was compiled
    outside of any would be found inside of one, and drop what tensors carry.
    """
    context = TracingContext.try_get()
    if context is not None:
        context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
    return forward_ad._current_level >= 0
