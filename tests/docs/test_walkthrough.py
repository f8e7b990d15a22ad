"""docs/walkthrough.md is what the generator makes: every stage with the text that it really has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.docs.walkthrough import MOST_LINES, block, changed_lines, stages, walkthrough
from tests.versions import TORCH, TRITON


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.skipif((TORCH, TRITON) != ((2, 13), (3, 9)), reason="the page has the texts of torch 2.13 and Triton 3.9")
def test_the_committed_page_is_up_to_date(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    page, made = repository / "docs" / "walkthrough.md", walkthrough(tmp_path, monkeypatch.setattr)
    if request.config.getoption("--update-golden"):
        page.write_text(made)
    assert page.read_text() == made, "run pytest tests/docs --update-golden"


def test_dumps_are_told_in_order_and_unchanged_ones_left_out(tmp_path: Path) -> None:
    for name, text in [
        ("00_input.txt", "a"),
        ("01_fold.txt", "a"),
        ("02_fuse.txt", "b"),
        ("03_schedule_f_0.txt", "# lowered\nnest\n# rule cpu_row\nsteps\n# scheduled\nloops\n"),
        ("04_emit_f_0.ll", "code"),
    ]:
        (tmp_path / name).write_text(text)
    found = list(stages(tmp_path, ["f_0"]))
    assert [(text, language) for _, text, language in found] == [
        ("a", "text"), ("b", "text"), ("nest\n", "text"), ("steps\n", "python"), ("loops\n", "text"), ("code", "llvm"),
    ]  # fmt: skip
    assert "`cpu_row`" in found[3][0] and "`f_0`" in found[5][0]


def test_long_texts_lose_their_middle_and_folders() -> None:
    lines = block("\n".join(f"/some/folder/m.py:{n}" for n in range(100))).splitlines()
    assert lines[1] == "m.py:0" and lines[-2] == "m.py:99" and len(lines) == MOST_LINES + 3
    assert f"... {100 - MOST_LINES} lines" in lines


def test_of_a_rewritten_text_the_changed_lines_are_told() -> None:
    assert changed_lines("a\nb\nc\nd", "a\nb\ne\nd") == "  ... 2 lines as before\n- c\n+ e\n  ... 1 lines as before"
    assert not changed_lines("a\nb", "c\nd")
