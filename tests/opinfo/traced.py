"""Calls given to the backend without Dynamo, which takes longer to read them than all that comes after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torch_mlc.dynamo_backend.entry.backend import mlc_backend


def without_dynamo(fn: Callable[[Any], list[Any]], options: dict[str, object]) -> Callable[[Any], list[Any]]:
    """``fn`` by the backend, as ``torch.compile`` has it where Dynamo captures the whole of it in one graph. It is
    compiled anew in each call, whose tensors are the graph's arguments and whose numbers its constants.

    Raises what torch raises where Python looks at data or at anything but tensors and numbers, and NotImplementedError
    for sparse tensors.
    """

    def run(calls: Any) -> list[Any]:
        leaves, spec = tree_flatten(calls)
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[k] for k in places]
        if any(t.layout is not torch.strided for t in tensors):
            raise NotImplementedError("tensors without strides, of which functionalization aborts the process")
        made: list[TreeSpec] = []

        class Calls(torch.nn.Module):
            def forward(self, *operands: torch.Tensor) -> list[Any]:
                given = dict(zip(places, operands, strict=True))
                found = fn(tree_unflatten([given.get(k, leaf) for k, leaf in enumerate(leaves)], spec))
                results, how = tree_flatten(found)
                made[:] = [how]
                return results

        environment = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=False)
        with tracing(TracingContext(mode)):
            fakes = [mode.from_tensor(t, static_shapes=True) for t in tensors]
            compiled = mlc_backend(Calls(), fakes, options=options)  # type: ignore[arg-type]
        return tree_unflatten(list(compiled(*tensors)), made[0])

    return run
