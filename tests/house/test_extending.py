"""The examples of docs/extending.md do what it says: each runs as it stands there."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import torch_mlc
from torch_mlc.dynamo_backend.compiling.pass_lists import USER_PASSES
from torch_mlc.dynamo_backend.converters.register import new_ops
from torch_mlc.dynamo_backend.patterns.register import PATTERNS
from torch_mlc.ir.expr.dots import USER_DOTS
from torch_mlc.ir.expr.intrinsics import INTRINSICS
from torch_mlc.scheduler.rules import USER_RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def examples() -> dict[str, str]:
    """The blocks of Python of the part for users, by the headings above them."""
    users = PAGE.read_text().split("\n# From outside\n")[1].split("\n# Within the project\n")[0]
    found: dict[str, str] = {}
    for section in users.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        for k, block in enumerate(re.findall(r"```python\n(.*?)```", body, re.DOTALL)):
            found[f"{heading} {k + 1}"] = block
    return found


@pytest.mark.parametrize("heading", examples())
def test_an_example(heading: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(examples()[heading])
    spec = spec_from_file_location("example", script)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    torch._dynamo.reset()
    try:
        spec.loader.exec_module(module)
    finally:
        for value in vars(module).values():
            if isinstance(value, torch_mlc.Registration):
                value.remove()
    assert not (new_ops() or INTRINSICS or PATTERNS or USER_PASSES or USER_RULES or USER_DOTS), (
        "each registration has a name in the example"
    )


def test_each_way_of_registering_has_an_example() -> None:
    text = "\n".join(examples().values())
    assert not [name for name in torch_mlc.__all__ if name.startswith("register_") and f"torch_mlc.{name}(" not in text]
