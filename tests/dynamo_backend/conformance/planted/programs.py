"""Wrong programs: options, keys of caches, what is built in, settings and subclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable
from torch._dynamo.backends.debugging import aot_eager
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from .planting import PLANTED, Run, changed, compiled_as, found_by, of_floats, played


@found_by("options::unknown_option", "options::unknown_mode")
def ignores_options(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


@found_by("options::options_are_left_alone")
def writes_options(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Run:
    (options if options is not None else {}).clear()
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


_PROGRAMS: dict[Any, Run] = {}


@found_by("caches::look_alikes")
def key_without_constants(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Takes programs for equal that differ in numbers alone."""
    key = tuple((n.op, str(n.target)) for n in gm.graph.nodes), tuple(str(getattr(a, "shape", "")) for a in inputs)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = aot_eager(gm, inputs)
    return _PROGRAMS[key]


@found_by("caches::parameters_change", "modules::training_loop", "modules::state_dict")
def builds_parameters_in(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Computes with the parameters of the first call."""
    first: dict[int, Tensor] = {}

    def run(compiled: Run, arguments: list[Any]) -> Any:
        for i, a in enumerate(arguments):
            if isinstance(a, torch.nn.Parameter):
                first.setdefault(i, a.detach().clone())
        with torch.no_grad():
            now = {i: arguments[i].detach().clone() for i in first}
            for i, old in first.items():
                arguments[i].data = old
        results = compiled(*arguments)
        for i, new in now.items():
            arguments[i].data = new
        return results

    return changed(gm, inputs, run)


@found_by("settings::number_of_threads")
def leaves_settings_changed(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Sets the number of threads to one, and does not set it back."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        results = compiled(*arguments)
        torch.set_num_threads(1)
        return results

    return changed(gm, inputs, run)


@found_by("subclasses::wrapper_in_and_out")
def unwraps_tensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Gives plain tensors, whatever went in."""

    def plain(t: Tensor) -> Tensor:
        inner = getattr(t, "first", t)
        return inner.as_subclass(Tensor) if isinstance(inner, Tensor) else t

    compiled: Run = lambda *arguments: torch.utils._pytree.tree_map_only(Tensor, plain, gm(*arguments))  # noqa: E731
    return compiled


@found_by("caches::two_sets_of_options")
def key_without_options(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Run:
    """Has an option that changes roundings, and a cache whose key lacks it."""
    key = tuple(str(n.target) for n in gm.graph.nodes)
    if key not in _PROGRAMS:
        by = 1.01 if (options or {}).get("rounds") else 1.0
        _PROGRAMS[key] = changed(gm, inputs, lambda run, arguments: of_floats(run(*arguments), lambda t: t * by))
    return _PROGRAMS[key]


@found_by("control_flow::cond", "control_flow::loop")
def builds_branches_in(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Replays what the first call computed for tensors without dimensions."""
    first: dict[str, Any] = {}

    class Replaying(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and not result.dim() and not result.requires_grad:
                return first.setdefault(n.name, result)
            return result

    return lambda *arguments: Replaying(gm).run(*arguments)


class WithoutAttributes:
    """A backend that is an object of slots."""

    __slots__ = ()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        compiled: Run = aot_eager(gm, inputs)
        return compiled


takes_no_attributes = WithoutAttributes()
PLANTED[f"{__name__}:takes_no_attributes"] = ("options::takes_attributes",)


@found_by("caches::reset")
def ends_with_a_reset(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """What a reset closes is not opened again."""
    if getattr(ends_with_a_reset, "closed", False):
        raise RuntimeError("the compiler was closed")
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


def _close() -> None:
    ends_with_a_reset.closed = True  # type: ignore[attr-defined]


ends_with_a_reset.reset = _close  # type: ignore[attr-defined]


@found_by("caches::saved_artifacts")
def keeps_its_artifacts_kind_to_itself(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Makes the kind of its artifacts known when it compiles, and so not where they are loaded."""

    class Artifact(CacheArtifact):
        def populate_cache(self) -> None:
            pass

        @staticmethod
        def type() -> str:
            return "mlc_planted"

    if "mlc_planted" not in CacheArtifactFactory._artifact_types:
        CacheArtifactFactory.register(Artifact)
    CacheArtifactManager.record_artifact("mlc_planted", "a key", b"its content")
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


class Forgetful(GraphModuleSerializableCallable):
    """A graph whose numbers are cut to integers when it is saved."""

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        for node in fn.graph_module.graph.nodes:
            node.args = tuple(int(a) if isinstance(a, float) else a for a in node.args)
        return super().serialize_compile_artifacts(fn)


@found_by("caches::compiled_ahead_of_time")
def saves_numbers_as_integers(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    return Forgetful(gm)


@found_by("settings::profiler_around")
def ends_its_range_with_the_next(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Begins a range of the profiler in each call, and ends it in the next one."""
    ranges: list[Any] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        while ranges:
            ranges.pop().__exit__(None, None, None)
        ranges.append(torch.profiler.record_function("a compiled graph"))
        ranges[-1].__enter__()
        return compiled(*arguments)

    return changed(gm, inputs, run)


@found_by("subclasses::two_ranks")
def leaves_sums_over_ranks_out(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """Takes the sum over all processes for the part of its own, which it is in a group of one."""
    total = torch.ops._c10d_functional.all_reduce.default
    return compiled_as(lambda g, i: played(g, total, lambda n, x, *_: x.clone()))(gm, inputs)


@found_by("control_flow::repeated_region")
def runs_a_region_once(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Takes the result of a region's first place for those of all its places."""

    def run(*arguments: Any) -> Any:
        first: dict[str, Any] = {}
        region = torch.ops.higher_order.invoke_subgraph

        def once(n: fx.Node, graph: Any, *others: Any) -> Any:
            name = str(n.args[1])
            return first[name] if name in first else first.setdefault(name, region(graph, *others))

        return played(gm, region, once)(*arguments)

    return run


@found_by("control_flow::flexible_attention")
def leaves_the_function_of_scores_out(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    attention = torch.ops.higher_order.flex_attention

    def plain(n: fx.Node, q: Any, k: Any, v: Any, score: Any, *others: Any) -> Any:
        return attention(q, k, v, lambda s, *_: s, *others)

    return played(gm, attention, plain)
