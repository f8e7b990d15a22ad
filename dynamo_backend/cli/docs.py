"""`torch-mlc docs`."""

from __future__ import annotations

from pathlib import Path

import click

from .near import near_command, tell

# Beside the rooms, in a checkout and as installed.
FOLDER = Path(__file__).resolve().parents[2] / "docs"


def pages() -> dict[str, str]:
    """Every page's text, by its name."""
    return {p.stem: p.read_text(encoding="utf-8") for p in sorted(FOLDER.glob("*.md"))}


def title_of(text: str) -> str:
    """The first heading of a page."""
    return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")), "")


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Print a page about torch-mlc, as docs/PAGE.md has it; without one, their names and titles."""
    found = pages()
    if page is None:
        width = max(map(len, found))
        for name, text in found.items():
            tell(f"{name:{width}}  {title_of(text)}")
        return
    asked = Path(page).stem
    if asked not in found:
        near = near_command(asked, found)
        raise click.UsageError(
            f"no page {page!r}.{f' Did you mean {near!r}?' if near else ''} There are: {', '.join(found)}."
        )
    tell(found[asked])
