"""Random ops that a checkpoint runs again: their seed leaves the graph as the state that the second run begins with.

The op that saves promises a tensor of bytes, as torch's own generator has; the seed is its first eight.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Load, Select, call, cast, const, symbol
from ..context import ImportContext, Tensor
from ..registry import CONVERTERS, NoConversion, converter
from ..terms import index_value

SAVE, REPLAY = "run_and_save_rng_state", "run_with_rng_state"
SEED_BYTES = 8
# Bytes of the state of a CUDA generator: seed and offset.
_CUDA_STATE = 16


def replayed_value(node: fx.Node) -> Any:
    """What a call of either op gives, as fake tensors: torch leaves its metadata out."""
    saves = isinstance(node.target, HigherOrderOperator) and node.target.name() == SAVE
    op, *args = node.args if saves else node.args[1:]
    given, kwargs = (map_arg(x, lambda n: n.meta["val"]) for x in (args, dict(node.kwargs)))
    # An op of sizes alone has no tensor among its operands, but the graph has.
    known = (v for n in node.graph.nodes for v in tree_leaves(n.meta.get("val")))
    mode = next((v.fake_mode for v in known if isinstance(v, FakeTensor)), None)
    if mode is None or not callable(op):
        return None
    with mode:
        results = op(*given, **kwargs)
        if not saves:
            return results
        on_cpu = all(v.device.type == "cpu" for v in tree_leaves(results) if isinstance(v, torch.Tensor))
        size = torch.get_rng_state().numel() if on_cpu else _CUDA_STATE
        return torch.empty(size, dtype=torch.uint8), results


@converter(f"hop.{SAVE}")
def save(ctx: ImportContext, op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    with ctx.drawing() as drawn, ctx.result_of(1):
        results = _convert(ctx, op, args, kwargs)
    if len(drawn) != 1:
        raise NoConversion(f"{op} draws {len(drawn)} seeds")
    state = ctx.type(0)
    place = index_value(symbol("i0"))
    eight = const(8, DType.INT64)
    byte = call("bit_and", call("shr", drawn[0], call("mul", place, eight)), const(255, DType.INT64))
    inside = call("lt", place, const(SEED_BYTES, DType.INT64))
    value: Expr = Select(inside, cast(byte, DType.UINT8), const(0, DType.UINT8))
    return ctx.compute(value, state, ctx.name(0)), results


@converter(f"hop.{REPLAY}")
def replay(ctx: ImportContext, state: Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
    seed: Expr = const(0, DType.INT64)
    for k in range(SEED_BYTES):
        byte = cast(Load(state.name, (sympy.Integer(k),), DType.UINT8), DType.INT64)
        seed = call("bit_or", seed, call("shl", byte, const(8 * k, DType.INT64)))
    kind = ctx.contiguous((sympy.S.One,), DType.INT64, state.device)
    kept = ctx.compute(seed, kind, ctx.fresh("seed"))
    with ctx.drawing(Load(kept.name, (sympy.S.Zero,), DType.INT64)):
        return _convert(ctx, op, args, kwargs)


def _convert(ctx: ImportContext, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    convert = CONVERTERS.get(str(op))
    if convert is None or any(isinstance(a, Tensor) and a.device != "cpu" for a in args):
        raise NoConversion(f"{op} under a state of a generator")
    return convert(ctx, *args, **kwargs)
