"""Where a graph's program is found again: its key, what is looked for under it, and what is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ...runtime.cache.fingerprint import key_of
from ...runtime.compile.kernels import KIND_GRAPH
from ...runtime.counters import counters
from ...runtime.log import say
from ...runtime.plain_text import counted
from ..caches.aot_key import shape_env
from ..compiling.compiled import CompiledGraph, Program, stored_graph
from ..compiling.job import Job
from ..importing.graph_key import GraphKey, graph_key
from ..tracing.origins import lines_of


@dataclass(frozen=True, slots=True)
class GraphCache:
    """The cache as one graph sees it. ``key`` is None where it cannot be told what decides the graph's code before it
    is compiled."""

    job: Job
    key: GraphKey | None

    @classmethod
    def of(cls, job: Job, lock: str = "") -> GraphCache:
        """With the graph's key, which has what a ``lock`` file is told of it."""
        options = job.options
        with job.timer.phase("key"):
            kind = "region" if job.region else f"whole, results saved from {job.saved}"
            places = enumerate(job.gm.graph.find_nodes(op="placeholder"))
            held = " ".join(f"{k}{'!' * (n.name in job.owned)}" for k, n in places if n.name in job.given)
            around = {
                **job.outside, "kind of graph": kind, "inputs that nobody else holds": held,
                "inputs that may come with bits": repr(job.lazy),  # gradients, and a backward may be as an inference is
                **({"lock": lock} if lock else {}),
                **({} if options.memory_limit is None else {"what a limit tells of": _model_text(job.gm)}),
            }  # fmt: skip
            is_known = options.schedules is None or options.schedules.content is not None
            return cls(job, graph_key(job.gm, job.example_inputs, job.static, around) if is_known else None)

    @property
    def text(self) -> str:
        """The key under which the program is kept; "" where nothing is."""
        return self.key.text if self.key is not None and not self.job.fresh else ""

    def find(self) -> CompiledGraph | None:
        """The graph from memory or disk, with nothing imported, fused, lowered, scheduled or emitted."""
        job = self.job
        if not self.text or job.options.retunes or job.options.shows_stages:
            return None
        found = stored_graph(
            self.text, options=job.options, name=job.name, constants=job.named(job.constants), load=job.load,
            region=job.region, timer=job.timer, lines=job.lines,
        )  # fmt: skip
        return job.with_named(found) if found is not None else None

    def lock(self) -> AbstractContextManager[Any]:
        """Held while the program is made that is not there."""
        counters.add("graph_cache_misses")
        say(self.job.options.log, "cache", lambda: f"{self.job.name}: {self._why_missed()}")
        return self.job.store.lock(KIND_GRAPH, self.text or "none")

    def of_variant(self, number: int) -> GraphCache:
        """The cache as one of the programs of the graph sees it: under a key of its own."""
        if self.key is None:
            return self
        text = key_of([self.key.text, f"variant {number}"])
        return replace(self, key=replace(self.key, text=text))

    def keep(self, kept: Program | None) -> str:
        """Put the program into the cache; its key, "" where it cannot be found again."""
        job = self.job
        if self.key is None or kept is None or job.fresh:
            return ""
        with job.timer.phase("cache"):
            record = {**kept.record, "parts": dict(self.key.parts)}
            job.store.keep_graph(self.key.text, record, f"{job.name}: {counted(kept.record['launches'], 'kernel')}")
        return self.key.text

    def _why_missed(self) -> str:
        """How the graph differs from the entry that is closest to it."""
        if self.key is None or self.job.fresh:
            return "not looked for in the cache"
        closest: tuple[str, ...] | None = None
        for record in self.job.store.graphs():
            differing = self.key.differing(record.get("parts", {}))
            if closest is None or len(differing) < len(closest):
                closest = differing
        if closest is None:
            return "not in the cache, which has no graph"
        if not closest:
            return "in the cache but not to be used: kernels of it are gone, or it is written anew"
        return f"not in the cache; the closest entry differs in {', '.join(closest)}"


def _model_text(gm: fx.GraphModule) -> str:
    """The model's lines and sizes, which the message about a limit of memory has."""
    lines = lines_of(gm)
    told = [lines(k) for k in range(len(gm.graph.nodes))]
    env = shape_env()
    hints = getattr(env, "backed_var_to_val", None) or {}
    return key_of([*told, repr(sorted((str(s), str(v)) for s, v in hints.items()))])
