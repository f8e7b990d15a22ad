"""One file of HTML that shows a report: data as JSON, with a style sheet and a script, and nothing from a network."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

_ASSETS, _SCRIPTS = "assets", ("draw.js", "compare.js", "page.js")
# Pixels of a frame in a notebook.
_HEIGHT = 760


def page_of(data: Mapping[str, Any], plain: str) -> str:
    """The page of a report, or of two that are compared. ``plain`` is the same as text, for who runs no scripts."""
    # "</script>" in a text would end the data; in JSON a slash may be written so.
    told = json.dumps(data, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return _asset("page.html").format(
        style=_asset("page.css"), script="\n".join(map(_asset, _SCRIPTS)), data=told, plain=html.escape(plain)
    )


def framed(page: str) -> str:
    """A page in a frame of its own, so that a notebook's styles and scripts do not meet those of the page."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" title="torch-mlc report" '
        f'style="box-sizing:border-box;width:100%;height:{_HEIGHT}px;border:1px solid #8886;border-radius:6px">'
        "</iframe>"
    )


def write_report(path: Path, forms: Mapping[str, Callable[[], str]]) -> None:
    """Write the form that the ending of a path asks for, whole or not at all. Raises ValueError and OSError."""
    form = forms.get(path.suffix.lower())
    if form is None:
        raise ValueError(f"a report is saved as {', '.join(forms)}; {path.name!r} ends with none of these")
    text = form()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / _ASSETS / name).read_text(encoding="utf-8")
