"""Ops that a host program calls: what a name stands for, and what its schema tells of results."""

from __future__ import annotations

from ....ir.graph.effects import resolve_op
from ....ir.graph.graph import Library, OpRef

# Namespaces of ops that torch itself defines, with their fake kernels, and of our own.
_OWN = frozenset(
    ("aten", "prims", "prim", "mlc", "hop", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd",
     "_dtensor", "inductor", "mkldnn", "onednn", "mkldnn_prepacked", "quantized", "quantized_decomposed", "rngprims",
     "profiler")
)  # fmt: skip


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
