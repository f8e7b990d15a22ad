"""Backends that are wrong on purpose are found, each by the cases that are for what it does."""

from __future__ import annotations

import pytest

from tests.dynamo_backend.conformance import planted
from torch_mlc.dynamo_backend.conformance.kit.subject import Subject
from torch_mlc.dynamo_backend.conformance.registry import CASES
from torch_mlc.dynamo_backend.conformance.runner import run_case

BY_NAME = {c.name: c for c in CASES}
# What these do wrong is done with options.
WITH_OPTIONS = {"writes_options": {"rounds": False}, "key_without_options": {"rounds": False}}
PAIRS = [(backend, case) for backend, cases in planted.PLANTED.items() for case in cases]


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=[f"{b}-{c}" for b, c in PAIRS])
def test_it_is_found(backend: str, case: str) -> None:
    options = WITH_OPTIONS.get(backend, {})
    subject = Subject(f"{planted.__name__}:{backend}", options, {"rounds": True}, patience=3)
    assert run_case(BY_NAME[case], subject).status == "failed"


@pytest.mark.parametrize(
    "case", sorted({case for _, case in PAIRS} - {"options::unknown_option", "options::unknown_mode"})
)
def test_what_is_right_is_not_found(case: str) -> None:
    """The same cases with the backend that the others wrap."""
    verdict = run_case(BY_NAME[case], Subject("aot_eager"))
    assert verdict.status == "passed" or case == "caches::two_sets_of_options", verdict.told


def test_there_are_enough_of_them() -> None:
    assert len(planted.PLANTED) >= 35
