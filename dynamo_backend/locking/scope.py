"""What a graph of Dynamo's is called in a lock file: the function or model it is of, and the inputs that it is for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator

from ...runtime.settings.options import Options
from .graph_lock import GraphLock
from .names import NodeNames, function_name, is_resumed

# So many inputs are told; of others there is a digest.
_MOST = 6


@dataclass(frozen=True, slots=True)
class LockScope:
    """A graph of Dynamo's: ``Net.forward(float32[16, 32])``."""

    name: str

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> LockScope | None:
        """None where no lock file is asked for."""
        if settings.lock is None:
            return None
        return cls(f"{_function(gm)}({_inputs(gm, example_inputs)})")

    def graph(self, kind: str, gm: fx.GraphModule) -> GraphLock:
        """The lock of a graph of AOTAutograd, "forward", "backward" or "inference"."""
        names = NodeNames(from_operands=kind == "backward")
        names.take(gm)
        return GraphLock(f"{self.name} {kind}", names)


def _function(gm: fx.GraphModule) -> str:
    """The function that Dynamo traces, and what it is a method of."""
    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced: an exported program
        return "forward"
    code, model = tx.f_code, tx.f_locals.get("self")
    name = function_name(code.co_name)
    if is_resumed(code.co_name):
        name += _begins(gm, name)
    return f"{type(model).__name__}.{name}" if isinstance(model, torch.nn.Module) else name


def _begins(gm: fx.GraphModule, function: str) -> str:
    """Where a graph of a function behind a break begins."""
    names = NodeNames()
    names.take(gm)
    first = next((n for n in gm.graph.nodes if n.op == "call_function"), None)
    if first is None:
        return ""
    where, _, op = names.of_node(first.name).partition(": ")
    return f" at {op}" if where == function else f" at {where}: {op}"


def _inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Types of the inputs that are no parameters or buffers, sizes that vary by number."""
    numbers: dict[str, str] = {}
    told: list[str] = []
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, example_inputs, strict=False):
        fixed = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
        value = node.meta.get("example_value", given)
        if fixed or isinstance(given, torch.nn.Parameter) or not isinstance(value, torch.Tensor):
            continue
        sizes = ", ".join(_size(n, numbers) for n in value.shape)
        told.append(f"{str(value.dtype).removeprefix('torch.')}[{sizes}]")
    if len(told) <= _MOST:
        return ", ".join(told)
    digest = hashlib.sha256(" ".join(told).encode()).hexdigest()[:8]
    return f"{', '.join(told[:_MOST])}, and {len(told) - _MOST} more {digest}"


def _size(size: Any, numbers: dict[str, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    return numbers.setdefault(str(size), f"n{len(numbers)}")
