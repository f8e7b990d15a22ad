"""Which inputs of a graph are parameters and buffers that the caller promised not to change, and what the model calls
them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...runtime.log import logger
from ...runtime.settings.options import Options
from ..aten_passes.frozen.known import unwritten

_LOG = logger(__name__)
# What a name in Dynamo's words has that one in the model's has not: L['self']._modules['c']._parameters['weight'].
_NOISE = ("_modules", "_parameters", "_buffers")
# What the model itself is called where Dynamo begins, in its own forward or around it.
_ROOTS = ("self", "fn")


@dataclass(frozen=True, slots=True)
class FrozenInputs:
    """``names`` are of all inputs of AOTAutograd's graph, as the model has them; ``static`` are the positions of those
    that Dynamo takes for parameters, buffers, or tensors of a fixed address. ``wrapped``: some are tensors of classes
    of others, of which a graph has the parts. ``discard``: those give their memory back that nobody reads any more."""

    names: tuple[str, ...] = ()
    static: tuple[int, ...] = ()
    wrapped: bool = False
    discard: bool = False

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> FrozenInputs:
        """Those of a graph of Dynamo's, where settings promise that they do not change. What it holds itself comes
        before its inputs."""
        if not settings.freeze:
            return NOTHING_FROZEN
        inside = [*dict(gm.named_parameters()), *dict(gm.named_buffers())]
        known = getattr(gm, "_param_name_to_source", None) or {}
        names = [_readable(known.get(n)) or n for n in inside]
        static = [*range(len(inside))]
        for node in gm.graph.find_nodes(op="placeholder"):
            if (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
                static.append(len(names))
            names.append(_readable(getattr(node, "_dynamo_source", None)) or node.name)
        return cls(
            tuple(names),
            tuple(static),
            any(map(is_traceable_wrapper_subclass, example_inputs)),
            settings.freeze_discard,
        )

    @property
    def text(self) -> str:
        """What a key of AOTAutograd's cache must tell of these."""
        return repr(self) if self.names else ""

    def sources(self, gm: fx.GraphModule, metadata: Any, kind: str) -> dict[fx.Node, str]:
        """The inputs of an ATen graph that do not change, by what the model calls them. None in graphs of a
        differentiated model, which is told once."""
        if not self.static or kind == "backward":
            return {}
        if kind == "forward":
            _tell_once(
                "freeze does nothing where gradients are computed: call the model in torch.no_grad() or "
                "torch.inference_mode(), or set requires_grad_(False) on its parameters"
            )
            return {}
        inputs = gm.graph.find_nodes(op="placeholder")
        if metadata is None or metadata.tokens or (len(inputs) != len(self.names) and not self.wrapped):
            _tell_once("freeze does nothing for a graph whose inputs AOTAutograd has put together or ordered anew")
            return {}
        found = [k for k in metadata.static_input_indices or () if k < len(inputs)]
        names = dict.fromkeys(found, "a parameter or buffer") if self.wrapped else dict(enumerate(self.names))
        kept = unwritten(gm.graph, [inputs[k] for k in found])
        return {inputs[k]: names[k] for k in found if inputs[k] in kept}


NOTHING_FROZEN = FrozenInputs()


def _readable(source: Any) -> str:
    """The name of a tensor in the model, "layers.0.weight"; "" where it is not known."""
    name = getattr(source, "name", "")
    text = str(name() if callable(name) else name)  # a method before torch 2.12
    words = [w for w in re.findall(r"\w+", text) if w not in _NOISE]
    words = words[1:] if words[:1] in (["L"], ["G"]) else words
    if not words:
        return ""
    return ".".join(words[1:] if words[0] in _ROOTS and len(words) > 1 else words)


@cache
def _tell_once(text: str) -> None:
    _LOG.warning(text)


def forget_warnings() -> None:
    """Tell again what was told once."""
    _tell_once.cache_clear()


__all__ = ["NOTHING_FROZEN", "FrozenInputs", "forget_warnings"]
