"""What one frame's compilation took outside of us: Dynamo's tracing, and AOTAutograd around our compilers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.utils import get_metrics_context

from ...runtime.log import say
from ...runtime.timing import process_times


@contextmanager
def frame_budget(topics: tuple[str, ...]) -> Iterator[None]:
    """Tell on the topic ``timing``, after the body, what Dynamo, AOTAutograd and our own phases took.

    The body is the backend's whole work on a graph of Dynamo's. A backward that is compiled later tells of itself.
    """
    traced, begin, ours = _seconds_of_dynamo(), time.perf_counter(), process_times.total
    yield
    ours = process_times.total - ours
    aot = time.perf_counter() - begin - ours
    before = "" if traced is None else f"Dynamo {traced * 1e3:.0f} ms, "
    say(topics, "timing", lambda: f"frame: {before}AOTAutograd {aot * 1e3:.0f} ms, torch-mlc {ours * 1e3:.0f} ms")


def _seconds_of_dynamo() -> float | None:
    """How long ago Dynamo began with the frame, as its own metrics know it; None outside of a frame."""
    context = get_metrics_context()
    begun: int = getattr(context, "_start_time_ns", 0) if context.in_progress() else 0
    return (time.time_ns() - begun) / 1e9 if begun else None
