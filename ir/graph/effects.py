"""What nodes do beside making their results: memory that they may pass on, memory that they write, and other effects.
Of ops of torch their schemas tell."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import IRError
from .begun import WAIT_COPIES
from .by_size import BY_SIZE
from .graph import CallRegion, CallTensor, Library, Node, refs, uses
from .slices import NOTHING

# The namespace of ops of ATen's that are called as they are: no pass reads them as something else.
KEPT_OP = "eager"
# Calls whose effect is not their result.
_EFFECTS = ("copy_", "_assert", "set_", "resize_", "hop::", "_c10d_functional", "wait_tensor", "mlc::")


# oneDNN's product of rows with a weight [columns, inner].
LINEAR = "mkldnn::_linear_pointwise.default"
# What such a call says, as its last argument, of an activation of several forms that it does not have: where the weight
# is plain memory. A call whose weight is packed has an empty text there.
PLAIN_WEIGHT = None
# Its convolutions of images, which it makes with channels innermost; that to whose result another image is added; the
# transposed one.
CONVOLUTION = "mkldnn::_convolution_pointwise.default"
CONVOLUTION_SUM = "mkldnn::_convolution_pointwise.binary"
CONVOLUTION_TRANSPOSED = "mkldnn::_convolution_transpose_pointwise.default"
CONVOLUTIONS = (CONVOLUTION, CONVOLUTION_SUM, CONVOLUTION_TRANSPOSED)
# Places of operands that lie in a layout of a library's own: these have no strides, and no address to look at.
_OPAQUE = {LINEAR: 1, CONVOLUTION: 1, CONVOLUTION_SUM: 2, CONVOLUTION_TRANSPOSED: 1}


def opaque_operand(node: Node) -> str | None:
    """The tensor that a library call may be given in a layout of the library's own."""
    if not isinstance(node, Library) or node.target not in _OPAQUE or node.args[-1] is PLAIN_WEIGHT:
        return None
    (name,) = refs((node.args[_OPAQUE[node.target]],))
    return name


def resolve_op(target: str) -> Any:
    """The op of a library target: "aten::addmm.default", the same of "eager", or "hop::cond". Raises IRError where
    torch has none."""
    namespace, _, rest = target.partition("::")
    namespace = "aten" if namespace == KEPT_OP else namespace
    found: Any = torch.ops.higher_order if namespace == "hop" else getattr(torch.ops, namespace)
    try:
        for part in rest.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise IRError(f"torch {torch.__version__} has no op {target}") from None
    return found


def schema_of(target: str) -> Any:
    """The schema of a library target; None where it has none, or torch has no such op."""
    try:
        return getattr(resolve_op(target), "_schema", None)
    except (IRError, AttributeError):
        return None


def may_alias(target: str) -> bool:
    """Whether an op may return memory that it was given, going by its schema; yes where there is none."""
    if "::" not in target or target.startswith("hop::") or "::wait_tensor." in target or target == WAIT_COPIES:
        return True
    if target.startswith("mlc::"):
        return False
    schema = schema_of(target)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def written(node: Node) -> tuple[str, ...]:
    """The tensors that a node writes over. Of a library call its schema tells; without one, all that it is given, as of
    a region that writes anything."""
    match node:
        case CallRegion():
            return uses(node) if any(map(written, node.region.nodes)) else ()
        case CallTensor():
            return tuple(t for t in node.into if t is not None)
        case Library(target=target) if not target.startswith(("mlc::", "hop::")):  # those are functional
            schema = schema_of(target)
            if schema is None:
                return tuple(refs((node.args, tuple(v for _, v in node.kwargs))))
            given = dict(zip((a.name for a in schema.arguments), node.args)) | dict(node.kwargs)
            over = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            return tuple(name for argument in over if argument in given for name in refs((given[argument],)))
    return ()


def has_effect(node: Node) -> bool:
    """Whether a node must run though nobody reads its result."""
    if isinstance(node, CallRegion):
        return any(map(has_effect, node.region.nodes))
    if not isinstance(node, Library) or node.target in NOTHING or node.target == BY_SIZE:
        return False
    return node.refused or any(e in node.target for e in _EFFECTS) or _mutates(node.target)


def _mutates(target: str) -> bool:
    op = target.split("::")[-1].split(".")[0]
    return op.endswith("_") and not op.endswith("__")


__all__ = ["has_effect", "may_alias", "resolve_op", "schema_of", "written"]
