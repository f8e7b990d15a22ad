"""torch's minifier over this backend, as docs/debugging.md has it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def test_what_can_be_run_is_not_taken_for_a_failure(tmp_path: Path) -> None:
    """torch calls what a backend returns by itself, once, and writes a script where that fails."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).softmax(-1).sum(0) + x.amax(-1).mean()

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    settings = {"repro_after": "dynamo", "repro_level": 2, "debug_dir_root": str(tmp_path)}
    with torch._dynamo.config.patch(settings):
        ours = torch.compile(f, backend="mlc", fullgraph=True)(x, y)
    torch.testing.assert_close(ours, f(x, y))
    assert not list(tmp_path.rglob("*.py"))
