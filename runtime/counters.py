"""What the compiler did, counted: kernels generated, cache hits, library calls.

The counters observe and never decide anything, so they may be shared by the whole process: ``counters`` is the one
instance. Tests and reports take a ``snapshot`` before and after and look at the difference.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

NAMES = (
    "graphs_compiled",  # graphs, or variants of one, that went through the whole path
    "graph_cache_hits",  # graphs whose host program came from memory or disk
    "graph_cache_misses",
    "kernels_generated",  # kernels that were lowered, scheduled, emitted and compiled
    "kernel_cache_hits",  # unique kernels whose code came from memory or disk
    "kernel_cache_misses",
    "kernels_shared",  # calls of a function that equals one already compiled in the same graph
    "kernel_calls",  # kernel launches in the compiled graphs' text
    "library_calls",  # library calls in the compiled graphs' text
    "kernel_fallbacks",  # kernels that run as ATen ops because compiling them failed
    "kernels_lightened",  # kernels with smaller tiles than by default, which took more than the GPU has
    "kernels_tuned",
    "kernels_verified",  # kernels that were compared with their definition at one size or more
    "kernels_unverified",  # kernels that ought to have been and could not be
    "native_programs",  # graphs whose host program is machine code
    "cuda_graphs",  # captures of what graphs launch on GPUs
    "cuda_graph_refusals",  # graphs that were to be captured and could not be, or not any further
    "variants_compiled",  # programs of graphs that have several, by regions of a size
    "native_refusals",  # calls of such graphs that Python ran, since an argument was no plain tensor
)


class Counters:
    """Named counts that only grow, until ``reset``. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add to one of ``NAMES``."""
        assert name in NAMES, f"no counter {name!r}; there are {', '.join(NAMES)}"
        with self._lock:
            self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """Every count, zeros included."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        """What was added since a snapshot; only what changed."""
        return {name: n - before.get(name, 0) for name, n in self.snapshot().items() if n != before.get(name, 0)}

    def reset(self) -> None:
        """Back to zero."""
        with self._lock:
            self._counts.clear()


counters = Counters()
"""The counters of this process."""
