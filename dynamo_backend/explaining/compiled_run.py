"""A model runs through ``torch.compile`` once: the backend compiles its graphs, all stages kept; torch's ops run."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils import _pytree as pytree

from ...ir.errors import MlcError
from ...runtime.settings.options import Options
from ...scheduler.numerics import NumericsPlace
from ..aten_passes.rounding.numerics import placed_nodes
from ..compiling.compiled import CompiledGraph
from ..entry.backend import GraphJob, job_of
from ..entry.capture import fake_mode_of
from ..entry.partition import copied_graph
from ..reports.report import GraphBreak
from ..tracing.fake_device import on_fake_device, retarget
from .dynamo_graph import function_of_graph
from .untouched import KeptTensors, dynamo_as_it_was, random_state_as_it_was, tensors_as_they_were


@dataclass(frozen=True, slots=True)
class CompiledRun:
    """The graphs that one call compiled, in the order in which they were, and why there are several; and the places
    that may keep eager's numerics."""

    graphs: tuple[CompiledGraph, ...]
    breaks: tuple[GraphBreak, ...]
    places: tuple[NumericsPlace, ...] = ()


def run_and_compile(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Options,
    dynamic: bool | None,
    training: bool,
) -> CompiledRun:
    """Compile what ``call(*args, **kwargs)`` runs, for the GPU that the target names where nothing is on a GPU yet.

    Gradients are taken of the sum of floating results with ``training``. Nothing of the model, its arguments, random
    states or what Dynamo has compiled is changed.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    elsewhere = settings.gpu is not None and not any(isinstance(t, torch.Tensor) and t.is_cuda for t in leaves)
    # Autograd's engine cannot run the backward of fakes on a device that torch was not built for: graphs of this
    # device are made and moved.
    faked = elsewhere and not training and isinstance(call, torch.nn.Module)
    if faked:
        call, (args, kwargs) = on_fake_device(call, (tuple(args), dict(kwargs)), "cuda")
        leaves = pytree.tree_leaves((args, kwargs))
    with (
        random_state_as_it_was(),
        tensors_as_they_were(call, leaves) as kept,
        dynamo_as_it_was() as breaks,
        fake_mode_of(call, leaves) or contextlib.nullcontext(),
        torch.set_grad_enabled(training),
    ):
        keeper = _Keeper(settings, kept, late=elsewhere, devices=("cuda:0",) if elsewhere and not faked else ())
        try:
            result = torch.compile(call, backend=keeper.backend, dynamic=dynamic, **ISOLATED)(*args, **kwargs)
        except BackendCompilerFailed as error:
            # What is wrong with a schedule or a setting is told as it is, not as a fault of the backend.
            if isinstance(error.inner_exception, MlcError):
                raise error.inner_exception from None
            raise
        if training:
            _differentiate(result, leaves)
    if elsewhere:
        retarget([job.gm for job in keeper.jobs], "cuda", host=not faked)
        keeper.graphs += [_compiled(replace(job, example_inputs=())) for job in keeper.jobs]
    graphs = _named(keeper.graphs, keeper.kinds)
    return CompiledRun(graphs, tuple(dict.fromkeys(map(_break, breaks))), tuple(keeper.places))


_PARAMETERS = inspect.signature(torch.compile).parameters
# What compilations that are forgotten afterwards ask of torch.compile.
ISOLATED: Mapping[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in _PARAMETERS else {}


@dataclass(slots=True)
class _Keeper:
    """The backend of one run. With ``late`` graphs are kept to be compiled after it, for the ``devices`` that they are
    moved to."""

    settings: Options
    kept: KeptTensors
    late: bool
    devices: tuple[str, ...] = ()
    graphs: list[CompiledGraph] = field(default_factory=list)
    jobs: list[GraphJob] = field(default_factory=list)
    # Of each graph, which of Dynamo's it is of and what of it.
    kinds: list[tuple[int, str]] = field(default_factory=list)
    dynamo_graphs: int = 0
    places: dict[NumericsPlace, None] = field(default_factory=dict)

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        number = self.dynamo_graphs
        self.dynamo_graphs += 1

        def part(graph: fx.GraphModule, inputs: Sequence[Any], *, kind: str, **of: Any) -> Callable[..., Any]:
            eager = fx.GraphModule(graph, copied_graph(graph.graph))
            self.kinds.append((number, kind))
            self.take(job_of(graph, inputs, settings=self.settings, kind=kind, devices=self.devices, **of))
            return make_boxed_func(eager.forward)

        return function_of_graph(gm, example_inputs, self.settings, self.kept, part)

    def take(self, job: GraphJob) -> None:
        self.places.update(dict.fromkeys(place for _, place in placed_nodes(job.gm)))
        if self.late:
            self.jobs.append(job)
        else:
            self.graphs.append(_compiled(job))


def _compiled(job: GraphJob) -> CompiledGraph:
    return job.compile(load=False, fresh=True)


def _differentiate(result: Any, arguments: Iterable[Any]) -> None:
    """Run the backward of the sum of all results, as far as arguments and leaves, and leave no gradient anywhere."""
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    given = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad and not t.is_leaf]
    losses = [t.float().sum() for t in results]
    if losses:
        torch.autograd.grad(losses, [*given, *leaves_of(losses, given)], allow_unused=True)


def leaves_of(results: Iterable[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that ``results`` depend on, not through what is ``given``."""
    found: dict[int, torch.Tensor] = {}
    seen = {t.grad_fn for t in given}
    pending = [t.grad_fn for t in results]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        pending += [following for following, _ in node.next_functions]
    return list(found.values())


def _named(graphs: Sequence[CompiledGraph], kinds: Sequence[tuple[int, str]]) -> tuple[CompiledGraph, ...]:
    """By what they are of: "graph", "forward" and "backward", with a number where there are several of a name."""
    names = ["graph" if kind == "inference" else kind for _, kind in kinds]
    numbers = {number: k for k, number in enumerate(dict.fromkeys(number for number, _ in kinds))}
    several = max(Counter(names).values(), default=0) > 1
    labels = [f"{name} {numbers[number]}" if several else name for name, (number, _) in zip(names, kinds, strict=True)]
    return tuple(_renamed(graph, graph.name, label) for graph, label in zip(graphs, labels, strict=True))


def _renamed(graph: CompiledGraph, before: str, name: str) -> CompiledGraph:
    """A graph and the bodies of its control flow, whose names begin with its own."""
    regions = tuple(_renamed(r, before, name) for r in graph.regions)
    return replace(graph, name=name + graph.name.removeprefix(before), regions=regions)


def _break(reason: Any) -> GraphBreak:
    """torch's account of a graph break, with the line of the innermost frame."""
    where = f"{(last := reason.user_stack[-1]).filename}:{last.lineno}: {last.line or ''}" if reason.user_stack else ""
    return GraphBreak(str(reason.reason).strip(), where.rstrip(": "))
