"""Control flow between programs: branches, loops and regions whose bodies are compiled graphs.

Each function stands in the host program for the higher-order op of its name, with the arguments of that op; bodies are
boxed (they take the list of their arguments, and clear it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Body = Callable[[list[Any]], Sequence[Any]]


def cond(pred: Any, if_true: Body, if_false: Body, operands: Sequence[Any] = ()) -> Sequence[Any]:
    """The results of one of two bodies. ``pred`` is a bool or a tensor of one element, which is waited for."""
    return (if_true if pred else if_false)(list(operands))


def while_loop(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any] = (), *_: Any
) -> Sequence[Any]:
    """What ``body`` makes of the carried values as long as ``condition`` of them holds; copies if it never did."""
    values, turns = carried, 0
    while condition([*values, *additional])[0]:
        values = body([*values, *additional])
        turns += 1
    return values if turns else [v.clone() if isinstance(v, torch.Tensor) else v for v in values]


def while_loop_stack_output(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any] = (), *_: Any
) -> Sequence[Any]:
    """Each carried value after every turn, stacked along a new first dimension; the given ones if there was none."""
    values: Sequence[Any] = carried
    turns: list[Sequence[Any]] = []
    while condition([*values, *additional])[0]:
        values = body([*values, *additional])
        turns.append(values)
    return [torch.stack(list(column)) for column in zip(*(turns or [carried]), strict=True)]


def scan(step: Body, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any] = ()) -> Sequence[Any]:
    """The carried values after the last step, then what the steps gave besides, stacked along a new first dimension.

    ``step`` takes the carried values, one slice of each of ``xs`` along the first dimension, and ``additional``.
    """
    carry: Sequence[Any] = init
    stacked: list[Any] = []
    length = xs[0].shape[0] if xs else 0
    if not length:
        return list(init)
    for k in range(length):
        results = step([*carry, *(x.select(0, k) for x in xs), *additional])
        carry, given = results[: len(init)], results[len(init) :]
        if k == 0:
            stacked = [_room(g, length) for g in given]
        for room, g in zip(stacked, given, strict=True):
            if room is not None:
                room.select(0, k).copy_(g)
    return [*carry, *stacked]


def invoke_subgraph(body: Body, identifier: str | None, *operands: Any) -> Sequence[Any]:
    """The results of a region."""
    return body(list(operands))


def triton_kernel_wrapper_functional(*, grid: Sequence[Sequence[int]], **given: Any) -> Any:
    """The tensors that a Triton kernel of the user's writes, after it. Grids are tuples, where the text has lists."""
    return torch.ops.higher_order.triton_kernel_wrapper_functional(grid=[tuple(g) for g in grid], **given)


def _room(value: Any, length: int) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    return torch.empty((length, *value.shape), dtype=value.dtype, device=value.device)


# By the name of the higher-order op.
CONTROL: dict[str, Callable[..., Any]] = {
    "cond": cond,
    "while_loop": while_loop,
    "while_loop_stack_output": while_loop_stack_output,
    "scan": scan,
    "invoke_subgraph": invoke_subgraph,
    "triton_kernel_wrapper_functional": triton_kernel_wrapper_functional,
}
