"""What AOTAutograd's key of a graph of ours is made of.

torch's key holds whatever Inductor's code depends on as well: every registered generator of code, whose import takes
longer than all that a warm process does besides, and Triton's own sources. A program of ours depends on none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
from torch._inductor import config as inductor_config
from torch._inductor.codecache import FxGraphHashDetails
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..aten_passes.share_nodes import storage_of
from ..tracing.substitution import Substitution

# Ops whose definitions are torch's own text. Others may run a user's Triton kernels, whose text torch's key has.
OWN = ("aten", "prims", "prim")


class _WithoutInductor(FxGraphHashDetails):
    """The graph, its inputs and the settings of the process that tracing looks at.

    A graph that names ops, or is given objects, whose meaning lies outside of torch is described as torch does it.
    """

    def __init__(self, gm: Any, example_inputs: Sequence[Any], fx_kwargs: Any, inputs_to_check: Sequence[int]) -> None:
        self.shared_memory = _shared_memory(example_inputs)
        if not _is_plain(gm, example_inputs):
            super().__init__(gm, example_inputs, fx_kwargs, inputs_to_check)
            return
        self.gm = gm
        self.example_inputs = list(example_inputs)
        self.cache_key_tag = torch.compiler.config.cache_key_tag
        self.default_dtype = torch.get_default_dtype()
        self.default_device = str(torch.get_default_device())
        self.deterministic_algorithms_settings = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        self.matmul_settings = (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        )
        if torch.accelerator.is_available() and not any(isinstance(x, torch.Tensor) for x in example_inputs):
            self.default_device_index = torch.accelerator.current_device_index()
        self.inductor_config = _settings()
        self.hints = _overridden_hints()


class GraphDetails(AOTAutogradCacheDetails, _WithoutInductor):
    """AOTAutograd's own details; what it leaves to Inductor's class is made by ours, which stands before that."""

    def get_triton_source_codes_from_gm(self, gm: fx.GraphModule) -> list[str]:
        """The text of the Triton kernels that ops of the graph run."""
        return [] if _is_plain(gm, ()) else list(super().get_triton_source_codes_from_gm(gm))


# AOTAutograd's cache makes its keys of our details inside.
KEYS_WITHOUT_INDUCTOR = Substitution(autograd_cache, "AOTAutogradCacheDetails", GraphDetails)


def _is_plain(gm: Any, inputs: Sequence[Any]) -> bool:
    """Whether a graph consists of what torch's own version and sources define, over numbers and plain tensors."""
    if not isinstance(gm, fx.GraphModule):
        return False
    if not all(x is None or type(x) in _PLAIN_INPUTS for x in inputs):
        return False
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return all(_is_own(node.target) for graph in graphs for node in graph.nodes)


_PLAIN_INPUTS = (
    bool, int, float, str, torch.Tensor, torch.nn.Parameter, FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip


def _is_own(target: Any) -> bool:
    match target:
        case OpOverload():
            return target.namespace in OWN
        case OpOverloadPacket():
            return str(target._qualified_op_name).partition("::")[0] in OWN
        case HigherOrderOperator():
            return "triton" not in target.name()
    return True


def _shared_memory(inputs: Sequence[Any]) -> list[tuple[int, Any, bool]]:
    """For each input the first one in the same storage, how far behind that it begins, and whether autograd knows it
    for a view: writes to one are seen in others, and results that are views are made again of one of them. The
    metadata that a key has of a tensor tells nothing of that."""
    first: dict[Any, int] = {}
    found = []
    for k, x in enumerate(inputs):
        one = first.setdefault(storage_of(x) or k, k)
        shared = one != k
        found.append((one, x.storage_offset() - inputs[one].storage_offset() if shared else 0, shared and x._is_view()))
    return found


def _settings() -> dict[str, Any]:
    """Inductor's settings, some of which tracing and partitioners look at, but for those that no result depends on.

    Settings that are code (passes, choices of templates) serve Inductor's lowering alone. torch's own portable form
    describes them by loading that lowering.
    """
    ignored = tuple(getattr(inductor_config, "_cache_config_ignore_prefix", ()))
    settings = inductor_config.get_config_copy()
    return {name: x for name, x in settings.items() if not name.startswith(ignored) and _is_data(x)}


def _is_data(x: Any) -> bool:
    match x:
        case dict():
            return all(_is_data(k) and _is_data(v) for k, v in x.items())
        case list() | tuple() | set() | frozenset():
            return all(_is_data(v) for v in x)
    return x is None or isinstance(x, bool | int | float | str | bytes)


def _overridden_hints() -> list[tuple[str, Any]]:
    """Sizes that the user told to expect instead of those seen, which a key of symbols has not got."""
    return sorted((str(s), v) for s, v in (getattr(shape_env(), "var_to_hint_override", None) or {}).items())


def shape_env() -> ShapeEnv | None:
    """That of the graph that is traced or compiled at the moment, None where its sizes are all numbers."""
    context = torch._guards.TracingContext.try_get()
    return context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
