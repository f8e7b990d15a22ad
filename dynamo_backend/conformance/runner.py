"""Runs one case on one backend."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from .kit.case import Case
from .kit.errors import NotApplicable, Violation
from .kit.subject import Subject
from .kit.waiting import processor_seconds


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


def run_case(case: Case, subject: Subject) -> CaseVerdict:
    """Run a case, with nothing compiled before or left behind. ``seconds`` are the processor's."""
    begun = processor_seconds()
    try:
        with subject.fresh(), _unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.run(subject)
    except NotApplicable as reason:
        return CaseVerdict("skipped", str(reason), seconds=processor_seconds() - begun)
    except Violation as fault:
        return CaseVerdict("failed", str(fault), seconds=processor_seconds() - begun)
    except Exception as error:
        told = f"raised {type(error).__name__}: {error}".splitlines()
        details = "".join(traceback.format_exception(error))
        return CaseVerdict("failed", told[0][:500], details, processor_seconds() - begun)
    return CaseVerdict("passed", seconds=processor_seconds() - begun)
