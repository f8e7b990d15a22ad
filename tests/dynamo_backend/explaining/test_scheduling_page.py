"""docs/scheduling.md: its blocks run, in order, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

_BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)


def run_page(page: str, folder: Path) -> str:
    """The page with each ``text`` block as what the ``python`` block before it prints; blocks that begin with
    ``# name.py`` are files."""
    scope: dict[str, object] = {}
    printed = ""

    def run(match: re.Match[str]) -> str:
        nonlocal printed
        kind, text = match.groups()
        if kind == "text":
            return f"```text\n{printed.rstrip()}\n```\n"
        name = re.match(r"# (\w+\.py)\n", text)
        if name is not None:
            (folder / name[1]).write_text(text)
        else:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, "scheduling.md", "exec"), scope)
            printed = out.getvalue()
        return match[0]

    return _BLOCK.sub(run, page)


def test_the_page_prints_what_it_says(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = repository / "docs" / "scheduling.md"
    torch.manual_seed(0)
    found = run_page(path.read_text(), tmp_path)
    if request.config.getoption("--update-golden"):
        path.write_text(found)
    assert found == path.read_text(), "if it should differ, run pytest --update-golden"
