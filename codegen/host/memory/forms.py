"""A call of a library that has two forms by a size, as the two steps between which a program chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from ....ir.graph.by_size import forms_of
from ....ir.graph.graph import Library
from ..steps.step import CallLibrary
from .blocks import results_in_blocks


@dataclass(frozen=True, slots=True)
class StepForms:
    """The step ``fewer`` where ``size`` is below ``least``, and ``more`` elsewhere."""

    size: sympy.Expr
    least: int
    fewer: CallLibrary
    more: CallLibrary


def step_forms(step: CallLibrary) -> StepForms | None:
    """The two calls of a step; None where it has one form."""
    forms = forms_of(step.node)
    if forms is None:
        return None

    def call(node: Library) -> CallLibrary:
        blocks = results_in_blocks(node) if step.blocks else ()
        return replace(step, node=node, blocks=blocks, rounded=step.rounded if blocks else ())

    return StepForms(forms.size, forms.least, call(forms.fewer), call(forms.more))
