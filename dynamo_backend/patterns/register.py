"""``torch_mlc.register_pattern``: what takes the place of a sub-graph, told by a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx

from ...ir.registration import LOCK, Registration, RegistrationError
from ...runtime.log import logger
from ..converters.register import new_ops
from .match import key_of
from .trace import Example, TensorExample, trace_like, trace_symbolic

_LOG = logger(__name__)
# Element types that a pattern of floats is looked for in.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A function of tensors, and one of as many that gives the same; ``check`` is asked of the operands of a match."""

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: tuple[Example, ...]
    check: Callable[..., bool] | None = None

    @property
    def free(self) -> frozenset[Any]:
        """The numbers in whose place any may stand."""
        return frozenset(key_of(e) for e in self.examples if not isinstance(e, TensorExample))

    def variants(self) -> tuple[fx.Graph, ...]:
        """The graphs of the pattern, one for each element type that it is looked for in."""
        return _variants(self, new_ops())


# By name, in the order in which they were registered.
PATTERNS: dict[str, Pattern] = {}


def register_pattern(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any] | None = None,
    *,
    examples: Sequence[Any],
    name: str = "",
    check: Callable[..., bool] | None = None,
) -> Any:
    """Put a call of yours in the place of a sub-graph of ATen ops, wherever a model has it.

    ``pattern`` and ``replacement`` are functions of the same tensors (and numbers) that give the same results. Both are
    traced to ATen ops as models are. ``pattern`` is found where a graph has the same ops of the same operands, none of
    whose results in between is read elsewhere. ``replacement`` may call ops of ``torch.library``, or any of ATen's.

    ``examples`` say what the arguments are. A tensor stands for all of its rank: its sizes are free, but for 0 and 1,
    and so is its device. Where all floating tensors among them have one type, float32, bfloat16, float16 and float64
    are looked for; else those types. A number is free: whatever a graph has in its place is handed to ``replacement``.
    It must be one that the pattern does not use otherwise. All other constants of the pattern must be the same.

    ``check(*arguments)`` is given the operands of a match, as fake tensors and numbers, and may refuse it. Without a
    ``replacement`` this is a decorator of it; ``name`` is that of ``pattern``, unless it is given, and reports have it.
    The last pattern that was registered is looked for first.
    Raises: RegistrationError for a name that is taken, for functions that cannot be traced, or of which one gives other
    results than the other, and for an example that a pattern does not use.
    """
    if replacement is None:
        return partial(register_pattern, pattern, examples=examples, name=name, check=check)
    called = name or getattr(pattern, "__name__", "")
    if not called.isidentifier():
        raise RegistrationError(f"a pattern needs a name, such as name='my_pattern'; {called!r} is none")
    made = Pattern(called, pattern, replacement, tuple(map(_example, examples)), check)
    _check(made)
    with LOCK:
        if called in PATTERNS:
            raise RegistrationError(f"there is a pattern {called!r} already; give yours another name")
        PATTERNS[called] = made
        return Registration("pattern", called, replacement, partial(PATTERNS.__delitem__, called))


def _example(value: Any) -> Example:
    match value:
        case torch.Tensor():
            return TensorExample(tuple(int(n) for n in value.shape), value.dtype)
        case bool() | int() | float():
            return value
    raise RegistrationError(f"an example is a tensor or a number, not a {type(value).__name__}")


def _check(pattern: Pattern) -> None:
    """Raises RegistrationError where something is amiss that shows when both functions are traced."""
    name = pattern.name
    if not any(isinstance(e, TensorExample) for e in pattern.examples):
        raise RegistrationError(f"pattern {name} has no tensor among its examples, so that nothing is made of any")
    graphs = []
    for what, function in (("pattern", pattern.pattern), ("replacement", pattern.replacement)):
        try:
            traced = trace_symbolic(function, pattern.examples)
        except Exception as error:
            raise RegistrationError(f"the {what} of {name} cannot be traced with its examples: {error}") from error
        if traced.graph.find_nodes(op="get_attr"):
            raise RegistrationError(f"the {what} of {name} holds a tensor; make it an argument, or make it by an op")
        graphs.append(traced.graph)
    first, second = graphs
    if _told(first) != _told(second):
        raise RegistrationError(
            f"the replacement of {name} gives {_told(second)}, and the pattern {_told(first)}: they must be the same"
        )
    (end,) = first.find_nodes(op="output")
    if any(not isinstance(r, fx.Node) or r.op != "call_function" for r in end.args[0]):  # type: ignore[union-attr]
        raise RegistrationError(f"pattern {name} must give results of ops, and not one of its arguments")
    for k, place in enumerate(first.find_nodes(op="placeholder")):
        if not place.users:
            raise RegistrationError(f"pattern {name} does not use its tensor {k}")
    literals = [key_of(a) for n in first.nodes for a in _leaves((n.args, n.kwargs))]
    for number in pattern.examples:
        if not isinstance(number, TensorExample) and key_of(number) not in literals:
            raise RegistrationError(
                f"pattern {name} lacks {number!r} among the arguments of its ops; a free number must reach one as it is"
            )


def _leaves(value: Any) -> list[Any]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, (bool, int, float))]


def _told(graph: fx.Graph) -> str:
    """The types and ranks of the results."""
    (end,) = graph.find_nodes(op="output")
    values = [r.meta["val"] if isinstance(r, fx.Node) else r for r in end.args[0]]  # type: ignore[union-attr]
    return ", ".join(
        f"{str(v.dtype).removeprefix('torch.')} of {v.dim()} dimensions" if isinstance(v, torch.Tensor) else repr(v)
        for v in values
    )


@lru_cache(maxsize=64)
def _variants(pattern: Pattern, whole: frozenset[str]) -> tuple[fx.Graph, ...]:
    """As the graphs are where the ops ``whole`` are not decomposed."""
    tensors = [e for e in pattern.examples if isinstance(e, TensorExample) and e.dtype.is_floating_point]
    kinds = {e.dtype for e in tensors}
    graphs: list[fx.Graph] = []
    for kind in _FLOATS if len(kinds) == 1 else (None,):
        examples = [
            replace(e, dtype=kind) if isinstance(e, TensorExample) and e in tensors and kind is not None else e
            for e in pattern.examples
        ]
        try:
            graphs.append(trace_symbolic(pattern.pattern, examples).graph)
        except Exception:  # no model computes it in that type either
            _LOG.debug("pattern %s cannot be traced in %s", pattern.name, kind, exc_info=True)
    return tuple(graphs)


def replacement_for(pattern: Pattern, values: Sequence[Any]) -> fx.GraphModule:
    """What takes the place of a match of these operands."""
    return trace_like(pattern.replacement, values)
