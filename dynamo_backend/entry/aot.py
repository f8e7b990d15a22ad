"""AOTAutograd over a graph of Dynamo's.

``torch._dynamo.backends.common.aot_autograd`` does the same, and loads half of Inductor on its way for a log that only
TORCH_COMPILE_DEBUG asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters, flatten_graph_inputs
from torch._functorch.aot_autograd import aot_module_simplified
from torch._logging._internal import trace_log

from ..aten_passes.views.written_arguments import views_as_they_are
from ..tracing.substitution import Substitution

Compiler = Callable[..., Any]
_PRINT = fx.GraphModule.print_readable


def compile_with_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that runs a graph through what the compilers make of its ATen graphs.

    Dynamo neither traces the compilers, nor what they return.
    """
    settings: dict[str, Any] = {
        "forward": forward, "backward": backward, "inference": inference, "partition": partition,
        "decompositions": decompositions,
    }  # fmt: skip
    if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
        # Compiled autograd and the like hand over lists of tensors.
        flat: Callable[..., Any] = flatten_graph_inputs(gm, example_inputs, partial(compile_with_aot, **settings))
        return flat

    def untraced(*args: Any, **kwargs: Any) -> Any:
        compiled = torch.compiler.disable(backward, reason="a compiler of backward graphs")(*args, **kwargs)
        return torch.compiler.disable(compiled, reason="a compiled backward graph")

    counters["aot_autograd"]["total"] += 1
    try:
        with _UNPRINTED.here(), views_as_they_are():
            compiled: Callable[..., Any] = aot_module_simplified(
                gm,
                example_inputs,
                fw_compiler=forward,
                bw_compiler=untraced,
                inference_compiler=inference,
                partition_fn=partition,
                decompositions=decompositions,
                keep_inference_input_mutations=True,
            )
    except Exception:
        counters["aot_autograd"]["not_ok"] += 1
        raise
    counters["aot_autograd"]["ok"] += 1
    result: Any = torch.compiler.disable(compiled, reason="a compiled graph")
    result._boxed_call = False  # as the function inside of it is, whose attributes it has: torch's minifier asks
    return result  # type: ignore[no-any-return]


def _print_readable(gm: fx.GraphModule, print_output: bool = True, *args: Any, **kwargs: Any) -> str | None:
    if print_output or trace_log.handlers:
        return _PRINT(gm, print_output, *args, **kwargs)
    return None


# AOTAutograd writes the joint graph and both its parts in full for a trace (TORCH_TRACE), whether or not one is kept,
# which takes a twelfth of its time.
_UNPRINTED = Substitution(fx.GraphModule, "print_readable", _print_readable)
