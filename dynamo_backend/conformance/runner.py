"""Runs one case on one backend."""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Literal

from .kit.case import Case
from .kit.errors import NotApplicable, Violation
from .kit.subject import Subject


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a case ended. ``told`` is one line; ``details`` a traceback where the backend raised."""

    status: Literal["passed", "failed", "skipped"]
    told: str = ""
    details: str = ""
    seconds: float = 0.0


def run_case(case: Case, subject: Subject) -> Verdict:
    """Run a case, with nothing compiled before or left behind. ``seconds`` are the processor's, of all threads."""
    begun = time.process_time()
    try:
        with subject.fresh(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.run(subject)
    except NotApplicable as reason:
        return Verdict("skipped", str(reason), seconds=time.process_time() - begun)
    except Violation as fault:
        return Verdict("failed", str(fault), seconds=time.process_time() - begun)
    except Exception as error:
        told = f"raised {type(error).__name__}: {error}".splitlines()
        details = "".join(traceback.format_exception(error))
        return Verdict("failed", told[0][:500], details, time.process_time() - begun)
    return Verdict("passed", seconds=time.process_time() - begun)
