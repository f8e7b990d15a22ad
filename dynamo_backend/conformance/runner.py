"""Runs one case on one backend."""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from .kit.case import Case
from .kit.errors import NotApplicable, Violation
from .kit.subject import Subject


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """How a case ended. ``told`` is one line; ``details`` a traceback where the backend raised."""

    status: Literal["passed", "failed", "skipped"]
    told: str = ""
    details: str = ""
    seconds: float = 0.0


@contextmanager
def _unlogged() -> Iterator[None]:
    """Torch's structured trace, which is for files, stays out of what pytest shows of a failure."""
    trace = logging.getLogger("torch.__trace")
    before, trace.propagate = trace.propagate, False
    try:
        yield
    finally:
        trace.propagate = before


def _processor() -> float:
    """The processor's seconds of this process, of all threads, and of those that it started and that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def run_case(case: Case, subject: Subject) -> CaseVerdict:
    """Run a case, with nothing compiled before or left behind. ``seconds`` are the processor's."""
    begun = _processor()
    try:
        with subject.fresh(), _unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.run(subject)
    except NotApplicable as reason:
        return CaseVerdict("skipped", str(reason), seconds=_processor() - begun)
    except Violation as fault:
        return CaseVerdict("failed", str(fault), seconds=_processor() - begun)
    except Exception as error:
        told = f"raised {type(error).__name__}: {error}".splitlines()
        details = "".join(traceback.format_exception(error))
        return CaseVerdict("failed", told[0][:500], details, _processor() - begun)
    return CaseVerdict("passed", seconds=_processor() - begun)
