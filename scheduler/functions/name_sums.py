"""Say of sums what they are: products, convolutions, poolings. Rules that schedule them read it."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ...ir.expr.role import Role
from ...ir.expr.windows import MOST_TAPS
from ...ir.function.function import Stage, TensorFunction
from ...ir.function.sums import has_taps, has_windows, is_product


def name_sums(function: TensorFunction) -> TensorFunction:
    """Stages that combine what they load have the role that they are of, where the function's maker gave none.

    Rewrites::

        t0, = reduce(sum, [i0, i1], [r0], (mul(in0[i0, r0], in1[r0, i1]),))
        ->  t0, = reduce(sum, [i0, i1], [r0], (mul(in0[i0, r0], in1[r0, i1]),), role=product)
    """
    if any(s.role is not None for s in function.stages):
        return function
    roles = [_role(function, s) for s in function.stages]
    if not any(roles):
        return function
    stages = tuple(replace(s, role=role) for s, role in zip(function.stages, roles, strict=True))
    return replace(function, stages=stages)


def _role(function: TensorFunction, stage: Stage) -> Role | None:
    taps = sympy.Mul(*(d.extent for d in function.over_of(stage)))
    product = is_product(function, stage)
    if taps.is_Integer and taps <= MOST_TAPS and has_windows(function, stage):
        return Role.CONVOLUTION if product else Role.POOLING
    if has_taps(function, stage):
        return Role.FILTER_GRADIENT if product else Role.TAP_SUM
    return Role.PRODUCT if product else None
