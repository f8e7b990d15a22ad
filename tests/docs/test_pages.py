"""The pages under docs/: their blocks run, in order, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from torch._dynamo import pgo
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import logging_utils

from tests.workers import leave_guards_untimed

leave_guards_untimed()

PAGES = (
    "scheduling", "ir", "fusion", "attention", "products", "memory", "host-programs", "numbers", "caches",
    "importing", "substitutions", "targets", "export", "decisions", "regions", "attribution", "lock", "quantization",
    "generate",
)  # fmt: skip
_BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)


@pytest.fixture(autouse=True)
def nothing_compiled_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process: no sizes seen, and graphs numbered from zero."""
    monkeypatch.setattr(aot_autograd, "AOT_COUNTER", count())
    monkeypatch.setattr(logging_utils, "nth_graph", 0)
    pgo.reset_code_state()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def run_page(page: str, folder: Path, name: str) -> str:
    """The page with each ``text`` block as what the ``python`` block before it prints; blocks that begin with
    ``# name.py`` are files."""
    scope: dict[str, object] = {}
    printed: str | None = None

    def run(match: re.Match[str]) -> str:
        nonlocal printed
        kind, text = match.groups()
        if kind == "text":
            if printed is None:  # a text that no block has printed
                return match[0]
            told, printed = printed, None
            return f"```text\n{told.rstrip()}\n```\n"
        file = re.match(r"# (\w+\.py)\n", text)
        if file is not None:
            (folder / file[1]).write_text(text)
        else:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, f"{name}.md", "exec"), scope)
            printed = out.getvalue()
        return match[0]

    return _BLOCK.sub(run, page)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_prints_what_it_says(
    name: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = repository / "docs" / f"{name}.md"
    found = run_page(path.read_text(), tmp_path, name)
    if request.config.getoption("--update-golden"):
        path.write_text(found)
    assert found == path.read_text(), "if it should differ, run pytest --update-golden"


def test_a_page_that_prints_otherwise_is_seen(tmp_path: Path) -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert run_page(page, tmp_path, "sums") == page.replace("3", "2")
