"""How the pages are written: links and names that lead somewhere, short paragraphs, words that are used."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = {"operators", "options", "primitives", "walkthrough"}
WRITTEN = sorted(p for p in DOCS.glob("*.md") if p.stem not in GENERATED)
LINKING = sorted(
    p for p in ROOT.rglob("*.md") if not any(x == "build" or x.startswith(".") for x in p.relative_to(ROOT).parts)
)
MOST_IN_PARAGRAPH, MOST_IN_PAGE, MOST_IN_ARCHITECTURE = 120, 2000, 1500

# Files that pages name and that are nobody's of ours: what a house has not, what torch's minifier writes.
FOREIGN = {"utils.py", "repro.py"}

_FENCE = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAMED = re.compile(r"`([\w-]+(?:/[\w.-]+)+/?|[\w-]+\.py)`")


def prose(page: str) -> str:
    return _FENCE.sub("", page)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in _LINK.findall(prose(text)):
        place, _, anchor = link.partition("#")
        if place.startswith(("http:", "https:", "mailto:")):
            continue
        file = page.parent / place if place else page
        if not file.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"{link}: no such heading"


def unknown_names(text: str, files: list[str]) -> Iterator[str]:
    """Files and folders of ours that a page names and that are not there. Of a file without a folder, one of that name
    is enough; other slashes (``image/png``) are nobody's folders, and files that begin with a number are dumps of a
    user's."""
    rooms = {f.partition("/")[0] for f in files if "/" in f}
    for name in _NAMED.findall(prose(text)):
        whole = name.rstrip("/")
        if name in FOREIGN or re.match(r"\d\d_", name) or ("/" in name and name.partition("/")[0] not in rooms):
            continue
        inside = [f for f in files if f == whole or f.startswith(f"{whole}/")]
        if not inside and ("/" in name or not any(f.endswith(f"/{name}") for f in files)):
            yield name


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and cells of tables."""
    for part in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", prose(text)):
        if part.lstrip().startswith("|"):
            yield from (cell for row in part.splitlines() for cell in row.split("|"))
        else:
            yield part


def repository_files() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode == 0 and listing.stdout:
        return listing.stdout.split("\n")
    return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken_links(page, page.read_text()))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN], ids=name_of)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    assert not list(unknown_names(page.read_text(), repository_files()))


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_a_page_can_be_read(page: Path) -> None:
    text = page.read_text()
    most = MOST_IN_ARCHITECTURE if page.stem == "architecture" else MOST_IN_PAGE
    words = len(prose(text).split())
    assert words <= most, f"{words} words"
    long = [p for p in paragraphs(text) if len(p.split()) > MOST_IN_PARAGRAPH]
    assert not long, "\n\n".join(f"{len(p.split())} words: {p}" for p in long)


def test_every_page_is_linked_from_the_architecture() -> None:
    linked = set(_LINK.findall((DOCS / "architecture.md").read_text()))
    assert {p.name for p in DOCS.glob("*.md")} - linked == {"architecture.md"}


def terms() -> dict[str, str]:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    return {term: told for term, told in rows if term not in ("Term", "---")}


@pytest.fixture(scope="module")
def written() -> str:
    """All text of ours but the glossary, in lower case, with the words of names apart."""
    files = [
        f for f in repository_files()
        if f.endswith((".py", ".md")) and not f.startswith("tests/") and f != "docs/glossary.md"
    ]  # fmt: skip
    return re.sub(r"[\s_]+", " ", "\n".join((ROOT / f).read_text() for f in files if (ROOT / f).is_file()).lower())


@pytest.mark.parametrize("term", terms())
def test_a_term_of_the_glossary_is_used(term: str, written: str) -> None:
    assert re.search(rf"\b{re.escape(term.lower())}(s|es)?\b", written.replace("tensorfunction", "tensor function"))


def test_the_glossary_is_short_and_in_order() -> None:
    found = terms()
    assert list(found) == sorted(found, key=str.lower)
    long = [term for term, told in found.items() if len(told.split()) > 45]
    assert found and not long


def test_faults_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A title\n")
    text = "[a](other.md#a-title) [b](other.md#none) [c](gone.md) `ir/gone.py` `ir/expr` `parser.py` `image/png`"
    assert list(broken_links(page, text)) == ["other.md#none: no such heading", "gone.md: no such file"]
    assert list(unknown_names(text, ["ir/expr/ops.py", "ir/text/parser.py"])) == ["ir/gone.py"]
    assert [len(p.split()) for p in paragraphs("a b\n- c d e\n- f\n\n| g h | i |\n")] == [2, 4, 2, 0, 2, 1, 0]
