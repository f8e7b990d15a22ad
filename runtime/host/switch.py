"""Which form of a host program runs a call: what was loaded first, what is better once it is called often, or the one
that tells a profiler of its kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from ..model_lines import note_line
from .executable import Boxed

# Calls after which machine code is worth its compilation: it takes about 1.3 ms a step of the program, and spares about
# half a microsecond a step and call. Who calls that often goes on calling.
OFTEN = 64
# The call before which machine code is written as text, so that whoever finds the program in a cache can compile it.
AGAIN = 2
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def switched(
    run: Boxed,
    ranged: Callable[[], Boxed],
    better: Callable[[], Boxed | None] | None,
    name: str,
    again: Callable[[], None] = lambda: None,
) -> Boxed:
    """A function over the forms of a program; its errors name the line of the model.

    ``run`` is the one to begin with, ``ranged`` makes the one for calls under ``torch.profiler`` (and ``emit_nvtx``),
    and ``better`` the one that takes over after ``OFTEN`` calls, or None, which ``again`` prepares at the second call.
    """
    profiled = cache(ranged)
    if better is None:

        def call(args: list[Any]) -> Sequence[Any]:
            try:
                return profiled()(args) if _profiling() else run(args)
            except Exception as error:
                note_line(error)
                raise

    else:
        improving = _Improving(run, again, better)

        def call(args: list[Any]) -> Sequence[Any]:
            try:
                return profiled()(args) if _profiling() else improving.run(args)
            except Exception as error:
                note_line(error)
                raise

    call._boxed_call = True  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = f"mlc_{name}"
    return call


class _Improving:
    """``run`` is the form of the moment."""

    def __init__(self, first: Boxed, again: Callable[[], None], better: Callable[[], Boxed | None]) -> None:
        self._first, self._calls = first, 0
        # What is done before which call. The one thread that takes it out does it; the others go on as they were.
        self._due = {AGAIN: again, OFTEN + 1: lambda: self._improve(better)}
        self._next = AGAIN
        self._lock = threading.Lock()
        self.run: Boxed = self._counted

    def _counted(self, args: list[Any]) -> Sequence[Any]:
        self._calls += 1
        if self._calls >= self._next and self._lock.acquire(blocking=False):
            try:
                if self._calls >= self._next:  # nobody was here meanwhile
                    self._due.pop(self._next)()
                    self._next = min(self._due, default=sys.maxsize)
            finally:
                self._lock.release()
        return self._first(args)

    def _improve(self, better: Callable[[], Boxed | None]) -> None:
        self.run = better() or self._first
