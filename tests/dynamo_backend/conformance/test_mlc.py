"""Every conformance case with mlc: one test a case."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_mlc.dynamo_backend.conformance.kit.case import Case
from torch_mlc.dynamo_backend.conformance.kit.subject import Subject
from torch_mlc.dynamo_backend.conformance.registry import CASES
from torch_mlc.dynamo_backend.conformance.runner import run_case


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# These start processes that import torch, which takes seconds.
SLOW = {"subclasses::two_ranks", "threads::spawned_process_compiles"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c.name in SLOW), id=c.name) for c in CASES]
)
def test_mlc(case: Case) -> None:
    verdict = run_case(case, Subject("mlc", other_options={"numerics": "eager"}))
    assert verdict.status == "passed", f"{verdict.told}\n{case.trap}\n{verdict.details}"
