"""The suites over workloads for a GPU, by name: how a run begins, goes on, takes a step, and is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from torch_mlc.ir.target import TargetError, gpu_target

from . import across, attention, beside, defaults, run
from .compared import COMPARED
from .made import Workload
from .results import begin, go_on
from .workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Suite:
    """``check(target)`` raises TargetError; ``begin(**settings)`` and ``resume(path, **settings)`` give results, the
    latter with the versions that have changed, and raises ValueError; ``compare(results, name, keep)`` adds a
    workload. ``missed(results)`` are those that a gate stops."""

    workloads: Mapping[str, Workload]
    check: Callable[[str], object]
    begin: Callable[..., Any]
    resume: Callable[..., Any]
    compare: Callable[..., None]
    show: Callable[..., None]
    missed: Callable[[Any], Sequence[str]] = lambda results: ()


SUITES: Mapping[str, Suite] = MappingProxyType({
    "static": Suite(
        WORKLOADS, gpu_target, run.begin_static, run.resume_static, run.compile_static, run.print_static
    ),
    "defaults": Suite(
        COMPARED, gpu_target, partial(begin, defaults.FORM), partial(go_on, defaults.FORM), defaults.compare,
        defaults.print_defaults,
    ),
    "predicted": Suite(
        beside.WORKLOADS, beside.cuda_target, partial(begin, beside.FORM), partial(go_on, beside.FORM), beside.compare,
        beside.print_predicted,
    ),
    "attention": Suite(
        attention.WORKLOADS, attention.check, partial(begin, attention.FORM), partial(go_on, attention.FORM),
        attention.compare, attention.print_attention,
    ),
    "slots": Suite(
        WORKLOADS, attention.check, partial(begin, across.FORM), partial(go_on, across.FORM), across.compare,
        across.print_slots, partial(across.over, measured=True),
    ),
})  # fmt: skip

__all__ = ["SUITES", "Suite", "TargetError"]
