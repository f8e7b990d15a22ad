"""How a backend is made wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager

Run = Callable[..., Any]
# The cases that find each, by the name of the backend's module and function, as a subject is named.
PLANTED: dict[str, tuple[str, ...]] = {}


def found_by(*cases: str) -> Callable[[Run], Run]:
    def note(backend: Run) -> Run:
        PLANTED[f"{backend.__module__}:{backend.__name__}"] = cases
        return backend

    return note


def changed(gm: fx.GraphModule, inputs: Sequence[Any], run: Callable[[Run, list[Any]], Any]) -> Run:
    """What `aot_eager` compiles, called by ``run`` with the compiled function and its arguments."""
    compiled = aot_eager(gm, inputs)
    return lambda *arguments: run(compiled, list(arguments))


def compiled_as(
    forward: Callable[[fx.GraphModule, Sequence[Any]], Run], backward: Callable[..., Run] | None = None
) -> Callable[..., Run]:
    """A backend over AOTAutograd, from functions that compile ATen graphs."""

    def boxed(compile_graph: Callable[..., Run]) -> Callable[..., Run]:
        return lambda gm, inputs: make_boxed_func(compile_graph(gm, inputs))

    made: Callable[..., Run] = aot_autograd(fw_compiler=boxed(forward), bw_compiler=boxed(backward or forward))
    return made


def of_floats(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change float tensors of results, wherever they are."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: change(t) if t.is_floating_point() and type(t) is Tensor else t, value
    )


def played(gm: fx.GraphModule, target: Any, instead: Callable[..., Any]) -> Run:
    """A graph in eager, but for the ops that are ``target``: ``instead`` gets the node and the arguments of each."""

    class Played(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.op == "call_function" and n.target is target:
                return instead(n, *self.fetch_args_kwargs_from_env(n)[0])
            return super().run_node(n)

    return lambda *arguments: Played(gm).run(*arguments)
