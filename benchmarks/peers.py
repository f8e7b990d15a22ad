"""The peers: eager, or any backend that torch.compile knows, each with its own counts of kernels."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch._inductor import metrics

EAGER = "eager"
# What backends call the promise that parameters do not change.
FREEZE = {"mlc": "freeze", "inductor": "freezing"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to run a function: ``eager`` as it is, anything else through ``torch.compile(backend=name)``. With
    ``options`` the backend is named without what follows a ``+``."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self.name.partition("+")[0]

    @property
    def frozen(self) -> Peer:
        """The same with parameters that do not change."""
        return Peer(f"{self.name}+freeze", {FREEZE[self.name]: True})

    def compile(self, function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        """The function as this peer runs it.

        Every peer gets a copy of the function with its own code object: TorchDynamo keeps its compiled entries by code
        object and would check the entries of all other peers at each call.
        """
        if self.name == EAGER:
            return function
        assert isinstance(function, FunctionType), function
        own = FunctionType(
            function.__code__.replace(co_name=f"{function.__name__}_{self.name.replace('+', '_')}"),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        options = {"options": dict(self.options)} if self.options else {}
        return torch.compile(own, backend=self.backend, dynamic=dynamic, fullgraph=True, **options)

    def counts(self) -> dict[str, int]:
        """Counters of this peer's compiler so far; the difference of two is what a compilation added."""
        if self.backend == "inductor":
            return {"kernels_generated": metrics.generated_kernel_count}
        if self.backend == "mlc":
            return _mlc_counts()
        return {}


def _mlc_counts() -> dict[str, int]:
    # Found by name so that the other peers can be measured where torch_mlc is not installed.
    if importlib.util.find_spec("torch_mlc") is None:
        return {}
    return importlib.import_module("torch_mlc.runtime.counters").counters.snapshot()


def added(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What each counter gained."""
    return {name: count - before.get(name, 0) for name, count in after.items()}


def parse_peers(text: str) -> tuple[Peer, ...]:
    """Peers from ``eager,mlc,inductor``. Raises: ValueError for a name that torch.compile does not know."""
    known = [EAGER, *torch._dynamo.list_backends(exclude_tags=())]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"no peers in {text!r}; give a list such as eager,mlc,inductor")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no backend called {name!r}{hint} torch.compile knows {', '.join(sorted(set(known)))}.")
    return tuple(Peer(name) for name in dict.fromkeys(names))
