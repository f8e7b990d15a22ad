"""Backends that are wrong on purpose are found, each by the cases that are for what it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dynamo_backend.conformance.planted import failing, gradients, memory, numbers, programs
from tests.dynamo_backend.conformance.planted.planting import PLANTED
from torch_mlc.dynamo_backend.conformance.kit.subject import Subject
from torch_mlc.dynamo_backend.conformance.registry import CASES
from torch_mlc.dynamo_backend.conformance.runner import run_case

BY_NAME = {c.name: c for c in CASES}
# What these do wrong is done with options.
WITH_OPTIONS = {"writes_options": {"rounds": False}, "key_without_options": {"rounds": False}}
# What `aot_eager`, which most of them wrap, does not do right itself, or says nothing about.
RIGHT = {"failures::minifier_looks_on": "mlc"}
SAYS_NOTHING = {"caches::two_sets_of_options", "caches::compiled_ahead_of_time", "caches::saved_artifacts"}
STARTS_PROCESSES = {"subclasses::two_ranks", "caches::saved_artifacts"}
MODULES = (failing, gradients, memory, numbers, programs)
PAIRS = [(backend, case) for backend, cases in PLANTED.items() for case in cases]


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=[f"{b.rpartition(':')[2]}-{c}" for b, c in PAIRS])
def test_it_is_found(backend: str, case: str) -> None:
    options = WITH_OPTIONS.get(backend.rpartition(":")[2], {})
    patience = 60 if case in STARTS_PROCESSES else 3
    verdict = run_case(BY_NAME[case], Subject(backend, options, {"rounds": True}, patience=patience))
    assert verdict.status == "failed", verdict.told


@pytest.mark.parametrize(
    "case", sorted({case for _, case in PAIRS} - {"options::unknown_option", "options::unknown_mode"})
)
def test_what_is_right_is_not_found(case: str) -> None:
    """The same cases with the backend that the others wrap."""
    verdict = run_case(BY_NAME[case], Subject(RIGHT.get(case, "aot_eager")))
    assert verdict.status == ("skipped" if case in SAYS_NOTHING else "passed"), verdict.told


def test_a_call_that_never_ends_is_nothing_to_later_ones() -> None:
    """Whatever compiles behind a graph break is compiled."""
    backend = f"{failing.__name__}:keeps_its_lock_after_an_error"
    hangs = run_case(BY_NAME["failures::the_next_call_works"], Subject(backend, patience=1))
    assert hangs.status == "failed" and "did not end" in hangs.told
    graphs: list[Any] = []

    def count(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch.compile(breaks, backend=count)(torch.ones(3))
    assert len(graphs) == 2


def test_there_are_enough_of_them() -> None:
    """And every file of them is looked at."""
    assert len(PLANTED) >= 50
    assert {name.partition(":")[0] for name in PLANTED} == {m.__name__ for m in MODULES}
