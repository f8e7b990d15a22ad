"""The format of lock files: read back as written, and what is wrong is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_mlc.dynamo_backend.locking.differences import difference
from torch_mlc.dynamo_backend.locking.lock_store import read_lock, write_graph
from torch_mlc.dynamo_backend.locking.lock_text import HEAD, LockError, LockFileError, LockText, Section
from torch_mlc.dynamo_backend.locking.steps import parsed_step

GOLDEN = Path(__file__).with_name("golden")
TEXT = f"""{HEAD}

# of the model that answers
graph b on cpu
  settings
    numerics fast
  decisions
    layers.0: add
      # because it is small
      fuse: apart (with layers.0: mm), by hand
      product: channels last

graph a on cpu
  calls
    kernel x: add
"""


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda p: p.stem)
def test_files_read_back_as_written(path: Path) -> None:
    text = LockText.parse(path.read_text(), path)
    assert text.written() == path.read_text()
    for section in text.sections.values():
        parts = section.tree()
        assert [line for top in parts.values() for x in top for line in x.written(2)]
        section.decisions()
        for schedule in parts.get("schedules", ()):
            assert [str(parsed_step(step.text)) for step in schedule.below] == [step.text for step in schedule.below]


def test_sections_decisions_and_comments() -> None:
    text = LockText.parse(TEXT)
    assert list(text.sections) == ["b on cpu", "a on cpu"]
    assert text.written().index("graph a") < text.written().index("# of the model that answers\ngraph b")
    first, second = text.sections["b on cpu"].decisions()["layers.0: add"]
    assert (first.kind, first.way, first.beside, first.number) == ("fuse", "apart", "layers.0: mm", 10)
    assert (second.kind, second.way, second.beside) == ("product", "channels last", "")
    again = Section.of("b on cpu", [x for x in text.sections["b on cpu"].lines[2:] if "#" not in x])
    assert text.having(again) is text, "comments are no content"
    changed = text.having(Section.of("b on cpu", ["  settings", "    numerics eager"]))
    assert "# of the model that answers\ngraph b on cpu\n  settings\n    numerics eager" in changed.written()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ":1: a lock file begins with"),
        ("# torch-mlc lock 2\n", ":1: the file is of version 2, and this torch-mlc reads version 1"),
        (f"{HEAD}\nsection a\n", ":2: 'section a' is no section"),
        (f"{HEAD}\n  numerics fast\n", ":2: 'numerics fast' stands in no section"),
        (f"{HEAD}\ngraph a\n\ngraph a\n", ":4: the file has 'a' twice"),
        (f"{HEAD}\ngraph a\n  calls\n     kernel\n", ":4: 'kernel' is indented by 5"),
        (f"{HEAD}\ngraph a\n    kernel\n", ":3: 'kernel' is indented by 4"),
        (f"{HEAD}\ngraph a\n  colors\n", ":3: 'colors' is no part of a section"),
        (f"{HEAD}\ngraph a\n  calls\n  calls\n", ":4: the section has calls twice"),
        (f"{HEAD}\ngraph a\n  decisions\n    x: add\n      together\n", ":5: 'together' is no decision"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.mlc.lock"
    path.write_text(text)
    with pytest.raises(LockFileError) as caught:
        for section in read_lock(path).sections.values():
            section.decisions()
    assert f"{path}{told}" in str(caught.value) and "MLC_LOCK_MODE=write" in str(caught.value)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockError, match="cannot be written"):
        write_graph(tmp_path / "file" / "model.mlc.lock", [Section.of("a", ["  calls"])])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LockError, match="cannot be read"):
        read_lock(tmp_path / "binary")


def test_a_difference_says_below_which_line_it_is() -> None:
    before = ["  decisions", "    layers.0: mm", "      blas: BLAS", "      product: library", "  schedules"]
    after = [*before[:3], "      product: loops", before[4]]
    assert difference(before, before, ("a", "b")) == []
    assert difference(before, after, ("a", "b")) == [
        "--- a", "+++ b", "@@ decisions, layers.0: mm @@",
        "     layers.0: mm", "       blas: BLAS", "-      product: library", "+      product: loops", "   schedules",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "s.parallel(loop='b0_i0')",
        "b0_i0_0, b0_i0_1 = s.split(loop='b0_i0', factors=[None, 16], tail='predicate')",
        "v0, v1 = s.sample_perfect_tile(loop='b0_i0', n=2, max_innermost=64, decision=[None, 8])",
        "b0_i0_b0_i1 = s.fuse('b0_i0', 'b0_i1')",
        "s.annotate(at='', key='num_warps', value=v1)",
        "a, b = s.split(loop='b0_i0', factors=[s.size('s0'), None], tail='perfect')",
        "s.vectorize(loop='x', scale=-0.5, deep=[[1, 2], [3]])",
    ],
)
def test_steps_read_back(text: str) -> None:
    assert str(parsed_step(text)) == text


@pytest.mark.parametrize(
    "text", ["", "s.parallel(", "parallel('x')", "s.parallel('x')", "import os", "s.f(x=open('y'))"]
)
def test_what_is_no_step(text: str) -> None:
    with pytest.raises(ValueError, match="is no step of a schedule"):
        parsed_step(text)
