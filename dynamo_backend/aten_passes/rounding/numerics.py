"""Nodes that keep eager's numerics where others do not, by the places that a user names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx import traceback

from ....ir.passes import Setting
from ....runtime.settings.options import Options
from ....scheduler.numerics import FAST_REWRITES, FUNCTION, OP, ROUNDING, NumericsByPlace, NumericsPlace
from ...converters.context import KEEPS
from ...tracing.origins import innermost_line
from ..context import AtenContext

BY_PLACE: Setting[AtenContext] = Setting(
    "numerics by place", lambda context: isinstance(context.options.numerics, NumericsByPlace)
)
# Ops that hand elements on, or choose among them, as they are: eager's own op would give the same.
_EXACT = frozenset((
    "clone", "cat", "stack", "copy", "copy_", "contiguous", "embedding", "gather", "index", "index_select", "take",
    "slice_scatter", "select_scatter", "as_strided_scatter", "index_copy", "index_put", "masked_fill", "where", "full",
    "full_like", "zeros", "zeros_like", "ones", "ones_like", "empty", "empty_like", "empty_strided", "new_zeros",
    "new_ones", "new_full", "new_empty", "scalar_tensor", "arange", "lift_fresh_copy", "neg", "abs", "relu", "amax",
    "amin", "max", "min", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "constant_pad_nd", "flip", "roll",
    "repeat", "tril", "triu", "sort", "topk", "detach", "sign", "floor", "ceil", "round", "trunc", "threshold",
    "threshold_backward", "isin", "fill", "alias", "scatter", "expand", "unsafe_view", "_unsafe_view", "hardtanh",
    "max_pool2d_with_indices", "_to_copy", "_assert_scalar", "split_with_sizes", "glu_jvp", "max_pool2d",
    "masked_select",
))  # fmt: skip
_BACKWARD = ("is_backward", "must_be_in_backward")


def keep_numerics(gm: fx.GraphModule, context: AtenContext) -> int:
    """Mark, in place, the nodes of the places that keep eager's numerics; how many."""
    numerics = context.options.numerics
    assert isinstance(numerics, NumericsByPlace), "the pass needs numerics by place"
    marked = 0
    for node, place in placed_nodes(gm):
        kept = numerics.kept(place)
        if OP in kept and not is_arithmetic(node):
            kept = tuple(k for k in kept if k != OP)
        if kept:
            node.meta[KEEPS] = kept
        else:
            node.meta.pop(KEEPS, None)
        marked += bool(kept)
    return marked


def wholly_kept(gm: fx.GraphModule, options: Options) -> Options:
    """The settings of a graph; where all of its places keep eager's roundings and functions, ``numerics`` are
    ``whole``."""
    numerics = options.numerics
    if not isinstance(numerics, NumericsByPlace) or not numerics.left_out.issuperset(FAST_REWRITES):
        return options
    kept = [node.meta.get(KEEPS, ()) for node, _ in placed_nodes(gm)]
    if not all(ROUNDING in k and FUNCTION in k for k in kept):
        return options
    return replace(options, numerics=replace(numerics, whole=True))


def rounding_kept(options: Options) -> Callable[[fx.Node], bool]:
    """Whether a user asks for eager's rounding at a node: for passes before ``keep_numerics``, which would take it
    away."""
    numerics = options.numerics
    if not isinstance(numerics, NumericsByPlace):
        return lambda node: False

    def kept(node: fx.Node) -> bool:
        return isinstance(node.target, OpOverload) and ROUNDING in numerics.kept(place_of(node.target, node.meta))

    return kept


def placed_nodes(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, NumericsPlace]]:
    """The calls of a graph that make floating numbers, with their places."""
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and _is_floating(node.meta.get("val")):
            yield node, place_of(node.target, node.meta)


def is_arithmetic(node: fx.Node) -> bool:
    """Whether eager's own op could give other numbers than ours: not where elements are handed on as they are."""
    op = node.target
    assert isinstance(op, OpOverload), "a call of an op of ATen's"
    if op.namespace != "aten" or any(r.alias_info is not None for r in op._schema.returns):
        return False
    return op._opname not in _EXACT


def place_of(op: OpOverload, meta: Mapping[str, Any]) -> NumericsPlace:
    """The place of what has such metadata: that of the op that it is made of."""
    backward = meta.get("partitioner_tag") in _BACKWARD
    stack = meta.get("nn_module_stack") or {}
    path = "" if backward or not stack else _path(str(next(reversed(stack.values()))[0]))
    return _place(str(meta.get("original_aten") or op), innermost_line(meta.get("stack_trace") or ""), path, backward)


@lru_cache(maxsize=4096)
def _place(op: str, line: str, path: str, backward: bool) -> NumericsPlace:
    return NumericsPlace(op, line, path, backward)


@lru_cache(maxsize=4096)
def _path(source: str) -> str:
    """The path of a module as its parent names it, of Dynamo's: "L['self'].h.0", "L['self']._modules['h']"."""
    told = source.partition("]")[2] if source.startswith("L[") else source
    for before, after in (("._modules['", "."), ("']", ""), ("[", "."), ("]", ""), ("'", "")):
        told = told.replace(before, after)
    return told.strip(".")


def _is_floating(val: Any) -> bool:
    values = val if isinstance(val, (tuple, list)) else (val,)
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def keep_whole(table: dict[OpOverload, Callable[..., Any]], numerics: object) -> dict[OpOverload, Callable[..., Any]]:
    """A table of decompositions that leaves the ops whole of which ``numerics`` ask for eager's own."""
    if not isinstance(numerics, NumericsByPlace) or not numerics.has_ops:
        return table
    return {op: _whole_where_kept(op, fn, numerics) for op, fn in table.items()}


def _whole_where_kept(op: OpOverload, function: Callable[..., Any], numerics: NumericsByPlace) -> Callable[..., Any]:
    if op.namespace != "aten" or op._opname in _EXACT or any(r.alias_info for r in op._schema.returns):
        return function

    @wraps(function)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        meta = traceback.get_current_meta()
        if str(meta.get("original_aten", op)) == str(op) and OP in numerics.kept(place_of(op, meta)):
            return NotImplemented
        return function(*args, **kwargs)

    return decomposed
