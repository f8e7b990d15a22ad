"""What passes over ATen graphs rewrite, and what they may ask of the compilation that they are part of."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from ...ir.passes import Level, Plain, Setting
from ...ir.target import Target
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...scheduler.decisions import Alternative, Decider, text_key
from ...scheduler.numerics import is_fast, passes_left_out


@dataclass(frozen=True, slots=True)
class AtenContext:
    """``metadata`` is what AOTAutograd knows of the inputs and results of a graph that is no backward.

    Of the graph that holds forward and backward, and of its parts: ``results`` is how many results of the forward the
    caller gets, ``unread`` are names in it that no gradient op reads, so that eager does not save them, and ``forward``
    is that of a backward. ``frozen`` are the inputs, by name, of which the caller promised that they do not change.
    ``decider`` is asked about decisions; without one the cost model's stand.
    """

    options: Options
    metadata: Any = None
    results: int = 0
    unread: Set[str] = frozenset()
    forward: fx.GraphModule | None = field(default=None, repr=False)
    frozen: Set[str] = frozenset()
    decider: Decider | None = field(default=None, repr=False)

    @property
    def left_out(self) -> Set[str]:
        """The passes that are not to run."""
        return passes_left_out(self.options.numerics)

    def target(self, device: str) -> Target:
        """The machine that code for tensors on a device is made for. Where another is named, the graph was captured on
        the CPU in its place, and its tensors are taken there later."""
        there = self.options.gpu is not None
        return target_for(
            "cuda" if there else device,
            self.options.target,
            self.options.threads,
            self.options.cpu_products,
            self.options.libraries,
        )

    def decide(
        self, kind: str, place: Iterable[object], ways: tuple[Alternative, Alternative], pays: bool, *, at: str,
        nbytes: int = 0,
    ) -> bool:  # fmt: skip
        """Whether the first of two ways is taken at a place, which some sizes and types tell; by cost it ``pays``."""
        if self.decider is None:
            return pays
        default = ways[0 if pays else 1].name
        key = partial(text_key, map(str, place))
        return self.decider.decide(kind, key, ways, default, at=at, nbytes=nbytes) == ways[0].name


FAST: Setting[AtenContext] = Setting("fast numerics", lambda context: is_fast(context.options.numerics))
FROZEN: Setting[AtenContext] = Setting("inputs that do not change", lambda context: bool(context.frozen))
HAS_METADATA: Setting[AtenContext] = Setting("results of the caller", lambda context: context.metadata is not None)


@dataclass(frozen=True, slots=True)
class OnGraph(Plain[Any]):
    """A rewrite, in place, that needs the graph of a module alone."""

    def __call__(self, subject: fx.GraphModule, context: object) -> int:
        done: int = self.rewrite(subject.graph)
        return done


def _text(gm: fx.GraphModule) -> str:
    return str(gm.graph.python_code("self", verbose=True).src)


def _size(gm: fx.GraphModule) -> int:
    return len(gm.graph.nodes)


def _lint(gm: fx.GraphModule) -> None:
    gm.graph.lint()


# In place: a pass tells how often it rewrote something.
ATEN: Level[fx.GraphModule] = Level("aten", _text, _size, _lint, suffix="py")
