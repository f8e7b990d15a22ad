"""Runs of a model: compiled with some places as eager has them, by eager, and by eager in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...ir.errors import MlcError
from ...runtime.settings.options import Options
from ..compiling.compiled import CompiledGraph, with_values
from ..entry.backend import compiled_part
from ..explaining.compiled_run import ISOLATED, leaves_of
from ..explaining.dynamo_graph import function_of_graph
from ..explaining.untouched import KeptTensors, dynamo_as_it_was, random_state_as_it_was, tensors_as_they_were
from .results import Results

# What makes a loss of a result; True is the sum of all floating results.
Backward = bool | Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """One graph of AOTAutograd that a run compiled: after the rewrites of it, and what it became."""

    gm: fx.GraphModule
    compiled: CompiledGraph


@dataclass(slots=True)
class Runs:
    """A call of a model, which is run as often as asked; each run leaves everything as it was, random states too."""

    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    settings: Options
    dynamic: bool | None
    backward: Backward
    compiled: int = 0
    _leaves: dict[str, Tensor] | None = field(default=None, repr=False)

    def by_eager(self) -> Results:
        """What eager gives."""
        with random_state_as_it_was(), tensors_as_they_were(self.call, self._given), self._gradients():
            return self._results(self.call(*self.args, **self.kwargs))

    def in_double(self) -> Results:
        """What eager gives in float64: a copy of the model, its inputs, and every conversion to a narrower type."""
        if self.backward and self._leaves is None:
            self.by_eager()
        wide = {id(t): _double(t) for t in (self._leaves or {}).values()}
        call = self.call
        if isinstance(call, torch.nn.Module):
            call = copy.deepcopy(call).double()
            own = dict(call.named_parameters())
            wide |= {id(p): own[n] for n, p in self.call.named_parameters()}  # type: ignore[attr-defined]
        wide |= {id(x): wide.get(id(x), _double(x)) for x in self._given if isinstance(x, Tensor)}
        args, kwargs = pytree.tree_map(lambda x: wide.get(id(x), x), (tuple(self.args), dict(self.kwargs)))
        with random_state_as_it_was(), self._gradients(), _InDouble(wide):
            return self._results(call(*args, **kwargs), wide)

    def compile(self, settings: Options) -> tuple[Results, tuple[CompiledPart, ...]]:
        """What the compiled model gives, and what was compiled. Raises what a compilation raises."""
        self.compiled += 1
        with (
            random_state_as_it_was(),
            tensors_as_they_were(self.call, self._given) as kept,
            dynamo_as_it_was(),
            self._gradients(),
        ):
            backend = _Backend(settings, kept)
            try:
                made = torch.compile(self.call, backend=backend.compile, dynamic=self.dynamic, **ISOLATED)
                return self._results(made(*self.args, **self.kwargs)), tuple(backend.parts)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, MlcError):
                    raise error.inner_exception from None
                raise

    def traced(self) -> Results:
        """What torch's ops give in the form in which AOTAutograd traces the model, nothing of which is compiled."""
        with (
            random_state_as_it_was(),
            tensors_as_they_were(self.call, self._given),
            dynamo_as_it_was(),
            self._gradients(),
        ):
            made = torch.compile(self.call, backend="aot_eager", dynamic=self.dynamic, **ISOLATED)
            return self._results(made(*self.args, **self.kwargs))

    @property
    def _given(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs))

    def _gradients(self) -> Any:
        return torch.set_grad_enabled(bool(self.backward))

    def _results(self, result: Any, moved: Mapping[int, Tensor] = {}) -> Results:
        if not self.backward:
            return Results.of(result)
        leaves = {n: moved.get(id(t), t) for n, t in self._differentiated(result).items()}
        loss = self.backward(result) if callable(self.backward) else _sum(result)
        if loss is None or not leaves:
            return Results.of(result)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=False)
        return Results.of(result, dict(zip(leaves, found, strict=True)))

    def _differentiated(self, result: Any) -> dict[str, Tensor]:
        """What gradients are taken of, by name: parameters, inputs, and other leaves that eager's result depends on."""
        if self._leaves is None:
            if not self.backward:
                return {}
            results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            given = [t for t in self._given if isinstance(t, Tensor) and t.requires_grad]
            owner = getattr(self.call, "__self__", self.call)
            names = {id(p): n for n, p in owner.named_parameters()} if isinstance(owner, torch.nn.Module) else {}
            names |= {id(t): f"input {k}" for k, t in enumerate(self._given) if isinstance(t, Tensor)}
            found = dict.fromkeys([*given, *leaves_of(results, [t for t in given if not t.is_leaf])])
            self._leaves = {names.get(id(t), f"tensor {k}"): t for k, t in enumerate(found)}
        return self._leaves


@dataclass(slots=True)
class _Backend:
    settings: Options
    kept: KeptTensors
    parts: list[CompiledPart] = field(default_factory=list)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return function_of_graph(gm, example_inputs, self.settings, self.kept, self._part)

    def _part(self, graph: fx.GraphModule, inputs: Sequence[Any], **of: Any) -> Callable[..., Any]:
        job, compiled = compiled_part(graph, inputs, settings=self.settings, **of)
        assert compiled.call is not None
        self.parts.append(CompiledPart(job.gm, compiled))
        return with_values(compiled.call, compiled.recipe, job.name)


def measured_settings(settings: Options) -> Options:
    """Those that runs are compared with: random numbers are eager's, a kernel that fails its ATen ops, and nothing else
    is checked. A lock file, which says what is rounded where, would refuse whatever is switched."""
    return replace(settings, fallback_random=True, verify=0, strict=False, lock=None)


def _sum(result: Any) -> Tensor | None:
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    return sum((t.float().sum() for t in results), start=torch.zeros(())) if results else None


_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_TO = {"float", "half", "bfloat16"}


def _double(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype is torch.float64:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


class _InDouble(TorchFunctionMode):
    """Computes in float64 whatever a model asks for in a narrower type. Of tensors that it finds outside of its
    arguments there are copies, those of ``wide`` by their ids."""

    def __init__(self, wide: dict[int, Tensor]) -> None:
        super().__init__()
        self.wide = wide
        # What has a copy lives as long as that, so that nothing else has its id.
        self.held: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "detach", "requires_grad_", "grad"):
            return func(*args, **(kwargs or {}))
        given = pytree.tree_map(self._widened, (args, kwargs or {}))
        if name in _TO and given[0] and isinstance(given[0][0], Tensor):
            return given[0][0].double() if given[0][0].is_floating_point() else func(*args, **(kwargs or {})).double()
        result = func(*given[0], **given[1])
        if isinstance(result, Tensor) and result.dtype in _NARROW:
            return result.double()
        return result

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _NARROW else value
        if isinstance(value, Tensor) and value.dtype in _NARROW:
            if id(value) not in self.wide:
                self.wide[id(value)] = value.double()
                self.held.append(value)
            return self.wide[id(value)]
        return value


__all__ = ["Backward", "CompiledPart", "Runs", "measured_settings"]
