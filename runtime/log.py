"""Warnings, topics and traces.

Every module logs under its own name, so ``TORCH_LOGS=+torch_mlc`` or ``TORCH_LOGS=torch_mlc.runtime`` work as for
torch's own modules. ``MLC_LOG=timing,cache`` prints what happened on those topics to standard error without TORCH_LOGS.
``TORCH_LOGS=output_code,fusion,schedule``, names of Inductor's, answer with our text.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from torch._logging import getArtifactLogger, trace_structured


class MlcWarning(UserWarning):
    """Something went less well than it could have, and the results are right all the same."""


class KernelFallbackWarning(MlcWarning):
    """A kernel could not be compiled, and its ATen ops run in its place."""


class CacheWarning(MlcWarning):
    """The disk cache, or an entry of it, could not be used."""


# What Inductor tells under a name in TORCH_LOGS, we do too. Below torch's logger, since that has the handlers.
_ARTIFACTS = {name: getArtifactLogger("torch.mlc", name) for name in ("output_code", "fusion", "schedule")}


def asks_for_stages(topics: tuple[str, ...]) -> bool:
    """Whether somebody reads what only compiling tells, and no cache: how nodes were fused, schedules, sources."""
    return any(t in _ARTIFACTS for t in topics) or any(x.isEnabledFor(logging.DEBUG) for x in _ARTIFACTS.values())


def logger(name: str) -> logging.Logger:
    """The logger of a module, by its ``__name__``."""
    return logging.getLogger(name)


def say(topics: tuple[str, ...], topic: str, text: Callable[[], str]) -> None:
    """Tell what happened on a topic: to the logger ``torch_mlc.<topic>``, to that of TORCH_LOGS with the topic's name,
    and to standard error where ``topics`` names it.

    The text is made only where somebody reads it.
    """
    loggers = [x for x in (logging.getLogger(f"torch_mlc.{topic}"), _ARTIFACTS.get(topic)) if x is not None]
    asked = [x for x in loggers if x.isEnabledFor(logging.DEBUG)]
    if topic not in topics and not asked:
        return
    message = text()
    for logger in asked:
        logger.debug("%s", message)
    if topic in topics:
        print(f"[mlc {topic}] {message}", file=sys.stderr)


def trace_text(name: str, text: str) -> None:
    """Put a text into torch's structured trace (tlparse), where TORCH_TRACE asks for one."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)
