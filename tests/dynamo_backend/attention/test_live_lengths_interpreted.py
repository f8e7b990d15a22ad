"""Kernels of a GPU whose loops end where data say, run by Triton's interpreter in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from tests.fuzz.interpreted import interpreted  # before Triton

import torch
from tests.dynamo_backend.attention.test_live_lengths import paged, positions_of, window

torch.manual_seed(0)
k, v = torch.randn(2, 2, 600, 16), torch.randn(2, 2, 600, 16)
pools = torch.randn(130, 10, 2, 16), torch.randn(130, 10, 2, 16)
table = torch.randperm(130)[:120].view(2, 60)
for queries in (1, 20):
    q = torch.randn(2, 4, queries, 16)
    for fn, given in ((window, (k, v)), (paged, (*pools, table))):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="mlc", options={"target": "cuda:sm_90"})
        for last in ((0, 599), (63, 64), (127, 400)):
            positions = positions_of(last, queries)
            with interpreted():
                found = compiled(q, *given, positions)
            double = [x.double() if x.is_floating_point() else x for x in given]
            torch.testing.assert_close(found.double(), fn(q.double(), *double, positions), rtol=1e-5, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_lengths_at_borders(repository: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=repository, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
