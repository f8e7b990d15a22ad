"""Floats of a model that tracing has found to be constants, before AOTAutograd traces in vain.

With ``dynamic=True`` Dynamo makes inputs of the floats that a model holds, such as the epsilon of a norm. An op that
takes a plain number ties it to its value. AOTAutograd's own pass over scalars finds these after it has traced the whole
graph, and has Dynamo begin again with them, and with those that nobody reads, as constants. All that is known before.
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
from torch.nn.functional import embedding
from torch.utils._sympy.symbol import SymT, symbol_is_type


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
                value = node.meta.get("example_value")
                if isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool)) and _is_read(node):
                    found |= value.node._expr.free_symbols
    return found


def _is_read(node: fx.Node) -> bool:
    """Whether somebody reads a number. An embedding has the degree of a norm also where it limits no norm."""
    return not all(u.target is embedding and u.args[3:5] == (None, node) for u in node.users)


__all__ = ["restart_with_known_floats"]
