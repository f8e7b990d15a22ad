"""What nodes of a backward are, as sums of products of a softmax's parts: a proof that a gradient, however autograd has
put it together, is that of the softmax, and that nothing flows back through what was subtracted from its scores.

A row has exponentials ``e``, their sum ``T`` and perhaps a number ``X`` that is added to it: ``D = T + X``. With ``g``
the gradient of ``e / D`` and ``S`` the row's sum of ``e g``, that of the scores is ``e g / D - e S / D^2``. The sum of
it over a row is ``S / D - T S / D^2``, and what flows through ``X`` is ``X S / D^2``, so that they cancel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

# Coefficients by the powers of e, D and X.
Terms = dict[tuple[int, int, int], float]

EXPONENTIAL: Terms = {(1, 0, 0): 1.0}
TOTAL: Terms = {(0, 1, 0): 1.0}
EXTRA: Terms = {(0, 0, 1): 1.0}
PROBABILITY: Terms = {(1, -1, 0): 1.0}

_NAMES = (aten.alias.default, aten.detach.default, aten.expand.default, aten.clone.default)
# What makes zeros of zeros, whatever else it reads.
_LINEAR = (
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.sum.dim_IntList,
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten._to_copy.default, *_NAMES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TermForm:
    """``own * g + sums * S``."""

    own: Terms = field(default_factory=dict)
    sums: Terms = field(default_factory=dict)

    def times(self, by: Terms) -> TermForm:
        return TermForm(_times(self.own, by), _times(self.sums, by))

    def plus(self, other: TermForm) -> TermForm:
        return TermForm(_plus(self.own, other.own), _plus(self.sums, other.sums))


ZERO = TermForm()
GIVEN = TermForm(own={(0, 0, 0): 1.0})
OF_SCORES = TermForm({(1, -1, 0): 1.0}, {(1, -2, 0): -1.0})
# Of the logarithm of X.
OF_EXTRA = TermForm({}, {(0, -2, 1): -1.0})


def _times(a: Terms, b: Terms) -> Terms:
    made: Terms = {}
    for p, x in a.items():
        for q, y in b.items():
            made = _plus(made, {(p[0] + q[0], p[1] + q[1], p[2] + q[2]): x * y})
    return made


def _plus(a: Terms, b: Terms) -> Terms:
    made = dict(a)
    for p, x in b.items():
        made[p] = made.get(p, 0.0) + x
    return {p: x for p, x in made.items() if x != 0.0}


def _inverse(a: Terms) -> Terms | None:
    if len(a) != 1:
        return None
    (((e, d, x), c),) = a.items()
    return {(-e, -d, -x): 1.0 / c}


def forms_of(
    nodes: Iterable[fx.Node],
    factors: Mapping[fx.Node, Terms],
    starts: Mapping[fx.Node, TermForm],
    columns: Any,
    extra: bool,
) -> dict[fx.Node, TermForm]:
    """The forms of all nodes that have one, by those of ``starts`` and what ``factors`` are; ``columns`` are the scores
    of a row, and ``extra`` says whether there is an ``X``."""
    parts, forms = dict(factors), dict(starts)
    for node in nodes:
        if node in parts or node in forms or node.op != "call_function":
            continue
        read = [n for n in node.all_input_nodes if n in forms]
        if read:
            found = _form(node, read, parts, forms, columns, extra)
            if found is not None:
                forms[node] = found
        elif (part := _part(node, parts)) is not None:
            parts[node] = part
    return forms


def _part(node: fx.Node, parts: Mapping[fx.Node, Terms]) -> Terms | None:
    """What a node is that reads parts of the softmax alone, and numbers."""
    if not node.all_input_nodes or any(n not in parts for n in node.all_input_nodes):
        return None
    a = _factor(node.args[0], parts)
    if a is None:
        return None
    if node.target in _NAMES or _is_cast(node):
        return a
    match node.target:
        case aten.neg.default:
            return _times(a, {(0, 0, 0): -1.0})
        case aten.reciprocal.default:
            return _inverse(a)
        case aten.mul.Tensor | aten.div.Tensor | aten.mul.Scalar | aten.div.Scalar if len(node.args) == 2:
            b = _factor(node.args[1], parts)
            b = _inverse(b) if b is not None and node.target in (aten.div.Tensor, aten.div.Scalar) else b
            return None if b is None or node.kwargs else _times(a, b)
    return None


def _factor(value: Any, parts: Mapping[fx.Node, Terms]) -> Terms | None:
    if isinstance(value, fx.Node):
        return parts.get(value)
    return {(0, 0, 0): float(value)} if isinstance(value, (int, float)) and value != 0 else None


def _form(
    node: fx.Node, read: list[fx.Node], parts: Mapping[fx.Node, Terms], forms: Mapping[fx.Node, TermForm], columns: Any,
    extra: bool,
) -> TermForm | None:  # fmt: skip
    if all(forms[n] == ZERO for n in read) and (stays := _stays_zero(node, read)):
        return ZERO if stays else None
    a = node.args[0]
    if node.target in _NAMES or _is_cast(node):
        return forms[a]  # type: ignore[index]
    match node.target:
        case aten.neg.default:
            return forms[a].times({(0, 0, 0): -1.0})  # type: ignore[index]
        case aten.add.Tensor | aten.sub.Tensor if not node.kwargs and len(read) == len(node.args):
            b = forms[node.args[1]]  # type: ignore[index]
            b = b.times({(0, 0, 0): -1.0}) if node.target is aten.sub.Tensor else b
            return forms[a].plus(b)  # type: ignore[index]
        case aten.mul.Tensor | aten.mul.Scalar | aten.div.Tensor | aten.div.Scalar if len(node.args) == 2:
            b = node.args[1]
            if node.target in (aten.mul.Tensor, aten.mul.Scalar) and b in forms:
                a, b = b, a
            by = _factor(b, parts) if a in forms and b not in forms else None
            by = _inverse(by) if by is not None and node.target in (aten.div.Tensor, aten.div.Scalar) else by
            return None if by is None or node.kwargs else forms[a].times(by)  # type: ignore[index]
        case aten.sum.dim_IntList:
            shape = a.meta["val"].shape  # type: ignore[union-attr]
            over_row = [d % len(shape) for d in node.args[1]] == [len(shape) - 1] and node.args[2:] == (True,)  # type: ignore
            if over_row and statically_known_true(shape[-1] == columns):
                return _summed(forms[a], extra)  # type: ignore[index]
    return None


def _summed(form: TermForm, extra: bool) -> TermForm | None:
    """The sum over a row: of ``e g`` it is S, and of ``e`` it is T."""
    if any(p[0] != 1 for p in (*form.own, *form.sums)):
        return None
    sums = {(0, d, x): c for (_, d, x), c in form.own.items()}
    whole: Terms = {(0, 1, 0): 1.0, (0, 0, 1): -1.0} if extra else TOTAL
    return TermForm({}, _plus(sums, _times({(0, d, x): c for (_, d, x), c in form.sums.items()}, whole)))


def _stays_zero(node: fx.Node, read: list[fx.Node]) -> bool:
    """Whether zeros in place of what is read make zeros of a node."""
    if node.target in _LINEAR:
        return node.args[0] in read or node.target is aten.mul.Tensor
    match node.target:
        case aten.add.Tensor | aten.sub.Tensor:
            return all(n in read for n in node.args)
        case aten.where.self:
            return node.args[0] not in read and all(n in read or is_zero(n) for n in node.args[1:])
        case aten.masked_fill.Scalar:
            return node.args[0] in read and node.args[2] == 0
        case aten.scatter.src:
            return is_zero(node.args[0]) and node.args[3] in read
    return False


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and bool(node.meta["val"].is_floating_point())


def is_zero(node: Any) -> bool:
    """Whether a node holds zeros."""
    if not isinstance(node, fx.Node):
        return bool(node == 0)
    match node.target:
        case aten.zeros_like.default | aten.zeros.default | aten.new_zeros.default:
            return True
        case aten.full.default | aten.full_like.default | aten.scalar_tensor.default:
            value = node.args[-1] if node.target is not aten.scalar_tensor.default else node.args[0]
            return bool(value == 0)
        case aten.expand.default | aten.view.default | aten.alias.default:
            return is_zero(node.args[0])
    return False


__all__ = [
    "EXPONENTIAL", "EXTRA", "GIVEN", "OF_EXTRA", "OF_SCORES", "PROBABILITY", "TOTAL", "ZERO", "TermForm", "Terms",
    "forms_of", "is_zero",
]  # fmt: skip
