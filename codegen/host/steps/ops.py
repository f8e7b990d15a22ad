"""Ops that a host program calls: what a name stands for, and what its schema tells of results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ....ir.graph.effects import CONVOLUTIONS, KEPT_OP, LINEAR, resolve_op
from ....ir.graph.graph import Library, OpRef

# Namespaces of ops that torch itself defines, with their fake kernels, and of our own.
_OWN = frozenset(
    ("aten", KEPT_OP, "prims", "prim", "mlc", "hop", "c10d", "c10d_functional", "_c10d_functional",
     "_c10d_functional_autograd", "_dtensor", "inductor", "mkldnn", "onednn", "mkldnn_prepacked", "quantized",
     "quantized_decomposed", "rngprims", "profiler")
)  # fmt: skip

# Ops whose overloads for results that exist make others all the same, and copy those.
_COPY = frozenset(("aten::_fft_r2c.default", "aten::_fft_c2r.default", "aten::_fft_c2c.default"))
# Ops that make their results of empty memory, which their kernels ask torch for as anybody may.
MAKERS = _COPY | {
    "aten::convolution.default", "aten::mkldnn_convolution.default", "aten::convolution_backward.default",
    "aten::_scaled_dot_product_flash_attention_for_cpu.default",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default", LINEAR, *CONVOLUTIONS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutOverload:
    """The overload of an op that writes to tensors it is given: its name, and those of its ``results``."""

    target: str
    results: tuple[str, ...]


@cache
def out_overload(target: str) -> OutOverload | None:
    """The overload by which an op of ATen's writes its results into memory of the CPU that is there, None where it has
    none such. Those that torch makes of ops, which have no kernel for the CPU of their own, copy results of the op."""
    if not target.startswith("aten::") or target in _COPY:
        return None
    op = resolve_op(target)
    if not op._schema.returns or any(str(r.type) != "Tensor" or r.alias_info for r in op._schema.returns):
        return None
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        results = tuple(a.name for a in other._schema.arguments if a.is_out)
        if len(results) != len(op._schema.returns) or _given(other) != _given(op):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU"):
            return OutOverload(f"{target.partition('.')[0]}.{name}", results)
    return None


def _given(op: Any) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in op._schema.arguments if not a.is_out]


def users_op(node: Library) -> str:
    """The op that a call runs where it is none of torch's own, "" where it is: torch vouches for what those return."""
    target = node.target
    if target.startswith("hop::auto_functionalized") and node.args and isinstance(node.args[0], OpRef):
        target = node.args[0].name
    return "" if target.partition("::")[0] in _OWN else target


def returns_sequence(target: str) -> bool:
    """Whether an op returns a list or a tuple, whatever its length."""
    if target.startswith("hop::"):
        return True
    schema = getattr(resolve_op(target), "_schema", None)
    if schema is None:
        return False
    return len(schema.returns) > 1 or any("List" in str(r.type) or "[]" in str(r.type) for r in schema.returns)


def nests(target: str) -> bool:
    """Whether results may be lists inside of a tuple; the text takes them apart all at once."""
    if target.startswith("hop::"):
        return True
    returns = getattr(getattr(resolve_op(target), "_schema", None), "returns", ())
    return len(returns) > 1 and any("[]" in str(r.type) or "List" in str(r.type) for r in returns)
