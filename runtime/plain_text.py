"""Text for a terminal or file that shows nothing but ASCII (``PYTHONIOENCODING=ascii``), written out in it."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata
from typing import TextIO

# The name of the handler of errors, as ``str.encode(errors=…)`` knows it.
HANDLER = "torch_mlc.plain"
_PLAIN = {
    "…": "...", "–": "-", "—": "-", "−": "-", "×": "x", "÷": "/", "±": "+-", "≤": "<=", "≥": ">=", "→": "->", "←": "<-",
    "·": ".", "•": "*", "“": '"', "”": '"', "‘": "'", "’": "'", "µ": "u", "μ": "u", "²": "2", "√": "sqrt",
    "│": "|", "─": "-", "━": "-", "╸": "-", "╺": "-", "✓": "yes", "✗": "no",
}  # fmt: skip


def _plain(character: str) -> str:
    known = _PLAIN.get(character)
    if known is not None:
        return known
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return base or character.encode("ascii", "backslashreplace").decode()


def _written_out(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


codecs.register_error(HANDLER, _written_out)


def readable(text: str, stream: TextIO | None = None) -> str:
    """The text, with what ``stream`` (standard output) cannot show written out in characters that it can."""
    encoding = getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, HANDLER).decode(encoding)
    return text


def write_out() -> None:
    """Let this process's standard output and error write out what they cannot show. For programs, not for libraries."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def counted(number: int, what: str, many: str = "") -> str:
    """A number of things: "1 kernel", "2 kernels"."""
    return f"{number} {what if number == 1 else many or what + 's'}"
