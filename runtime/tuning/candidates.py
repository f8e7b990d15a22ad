"""The machine code of candidates of tuning, made side by side."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ...codegen.kernel import KernelSource
from ...codegen.llvm.module import emit_llvm
from ...codegen.triton.emit import emit_triton
from ...ir.errors import MlcError
from ...ir.target import Target
from ...scheduler.schedule.schedule import Schedule
from ..compile.kernels import KernelCode, compile_source
from ..triton.compile import RunTriton
from ..triton.triton_stages import run_stages
from ..triton.worker_pool import worker_pool


def source_of(candidate: Schedule, target: Target) -> KernelSource:
    """The text of a candidate in the language of its target. Raises EmitError."""
    return (emit_triton if target.is_gpu else emit_llvm)(candidate.nest, target)


def running(workers: int, stop: threading.Event, run: RunTriton | None = None) -> RunTriton:
    """Who runs Triton over candidates: ``run`` where that is given, else processes that compile until ``stop`` is set,
    or this one where there are none."""
    return run or (partial(worker_pool().run, stop=stop) if workers else run_stages)


def begun(
    candidates: Sequence[Schedule], target: Target, pool: ThreadPoolExecutor, run: RunTriton
) -> list[Future[KernelCode]]:
    """The code of each candidate, in the making; one that cannot be written has its error."""
    return [_begun(c, target, pool, run) for c in candidates]


def _begun(candidate: Schedule, target: Target, pool: ThreadPoolExecutor, run: RunTriton) -> Future[KernelCode]:
    try:
        source = source_of(candidate, target)
    except MlcError as error:
        failed: Future[KernelCode] = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(compile_source, source, target, "candidate", run=run)
