"""Floats of a model that tracing has found to be constants, before AOTAutograd traces in vain.

With ``dynamic=True`` Dynamo makes inputs of the floats that a model holds, such as the epsilon of a norm. An op that
takes a plain number ties it to its value. AOTAutograd's own pass over scalars finds these after it has traced the whole
graph, and has Dynamo begin again with them, with those that nobody reads, and with those that its tensor ops cannot
take, such as the limits of a clamp, as constants. All that is known before.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import _is_tensorify_enabled
from torch._guards import TracingContext
from torch.nn.functional import embedding, hardtanh, hardtanh_
from torch.utils._sympy.symbol import SymT, symbol_is_type

# Ops whose numbers AOTAutograd's pass over scalars never makes tensors of.
_OF_CONSTANTS = {hardtanh, hardtanh_, torch.clamp, torch.clip, torch.clamp_min, torch.clamp_max}
_METHODS_OF_CONSTANTS = {f"{name}{end}" for name in ("clamp", "clip", "clamp_min", "clamp_max") for end in ("", "_")}


def restart_with_known_floats(gm: fx.GraphModule) -> None:
    """Let Dynamo begin the frame of a graph again where floats that are its inputs are constants by now, as AOTAutograd
    would later. Raises TensorifyScalarRestartAnalysis for that, which Dynamo catches."""
    context = TracingContext.try_get()
    env: Any = getattr(context.fake_mode, "shape_env", None) if context is not None else None
    if env is None or not _is_tensorify_enabled():
        return
    floats = [s for s in getattr(env, "backed_var_to_val", ()) if symbol_is_type(s, SymT.FLOAT)]
    if not floats:
        return
    read = _symbols_of(gm)
    known = [str(s) for s in floats if s not in read or isinstance(env.replacements.get(s), sympy.Number)]
    new = [name for name in known if not TensorifyState.should_specialize(name)]
    if new:
        for name in new:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def _symbols_of(gm: fx.GraphModule) -> set[sympy.Symbol]:
    """The symbols of numbers that nodes of a graph, and of graphs within it, read."""
    found: set[sympy.Symbol] = set()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if _is_number(node) and not all(_takes_constant(user, node) for user in node.users):
                    found |= node.meta["example_value"].node._expr.free_symbols
    return found


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (torch.SymFloat, torch.SymInt, torch.SymBool))


def _takes_constant(user: fx.Node, number: fx.Node) -> bool:
    """Whether a user of a number never makes a tensor of it. A number that is made of it has users of its own; an
    embedding has the degree of a norm also where it limits no norm."""
    if user.target is embedding:
        return user.args[3:5] == (None, number)
    return _is_number(user) or user.target in (_METHODS_OF_CONSTANTS if user.op == "call_method" else _OF_CONSTANTS)


__all__ = ["restart_with_known_floats"]
