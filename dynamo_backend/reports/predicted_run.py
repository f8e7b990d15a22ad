"""What is predicted of one run of a graph on a GPU: its kernels by the model, its library calls by the data sheet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ...runtime.model.predict import Prediction, microseconds


class PredictedKernel(Protocol):
    """A kernel of a report."""

    @property
    def name(self) -> str: ...

    @property
    def calls(self) -> int: ...

    @property
    def prediction(self) -> Prediction | None: ...


class PredictedCalls(Protocol):
    """Library calls of a report."""

    @property
    def op(self) -> str: ...

    @property
    def calls(self) -> int: ...

    @property
    def seconds(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """``kernels`` by name with how often each runs; ``libraries`` by op, with the seconds of all calls. ``unknown`` are
    kernels of a GPU of which nothing is predicted: they did not compile, or nothing here reads their code."""

    kernels: tuple[tuple[str, int, Prediction], ...] = ()
    libraries: tuple[tuple[str, int, float], ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Of all kernels and calls, one after the other; None on CPUs, and where a kernel is unknown."""
        if self.unknown or not (self.kernels or self.libraries):
            return None
        return sum(calls * p.seconds for _, calls, p in self.kernels) + sum(s for _, _, s in self.libraries)

    @property
    def lines(self) -> list[str]:
        """A table, the longest first; nothing on CPUs."""
        if not (self.kernels or self.libraries):
            return []
        rows = [(n, calls, calls * p.seconds, p.bound) for n, calls, p in self.kernels]
        rows += [(op, calls, s, "a library, by the data sheet") for op, calls, s in self.libraries]
        rows.sort(key=lambda row: -row[2])
        width = max(len("kernel"), *(len(name) for name, _, _, _ in rows))
        total = sum(seconds for _, _, seconds, _ in rows)
        rest = f" without {', '.join(self.unknown)}" if self.unknown else ""
        head = f"{'kernel':{width}}  {'runs':>4}  {'each':>9}  {'all':>9}  bound by"
        told = f"predicted to take {microseconds(total)}{rest}, by a model that no measurement has corrected"
        return [told, head] + [
            f"{name:{width}}  {calls:>4}  {microseconds(s / calls):>9}  {microseconds(s):>9}  {bound}"
            for name, calls, s, bound in rows
        ]


def predicted_run(kernels: Sequence[PredictedKernel], libraries: Sequence[PredictedCalls]) -> PredictedRun:
    """Predict every kernel, several at a time: disassemblers are processes."""
    timed = tuple((c.op, c.calls, c.seconds) for c in libraries if c.seconds is not None)
    if not kernels:
        return PredictedRun((), timed)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torch-mlc prediction") as pool:
        found = [*pool.map(lambda k: k.prediction, kernels)]
    known = tuple((k.name, k.calls, p) for k, p in zip(kernels, found, strict=True) if p is not None)
    unknown = tuple(k.name for k, p in zip(kernels, found, strict=True) if p is None) if known or timed else ()
    return PredictedRun(known, timed, unknown)
