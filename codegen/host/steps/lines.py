"""Lines of the model in the text of a program.

A program that is kept serves every model whose graph is the same, so its text names places in the graph, by their
number among its nodes: ``@mlc[12,15]``. Lines of the model at hand are put in where the program is loaded or shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ....ir.graph.graph import Origin

# The line of the model that the node of a number comes from, "" where nobody knows.
Lines: TypeAlias = Callable[[int], str]
# In square brackets the lines alone; in round ones " (…)" with the lines, or nothing.
# How many lines of a step a text that people read has. An error's note has all.
SHOWN, ALL = 3, sys.maxsize
_TOKEN = re.compile(r"@mlc(?:\[([\d,]+)\]|\(([\d,]+)\))")


def origin_text(origins: Sequence[Origin]) -> str:
    """The model lines of a step on one line: each line once, at most three."""
    return _joined((o.source for o in origins), SHOWN)


def place_text(origins: Sequence[Origin], *, aside: bool = False) -> str:
    """What stands for the model lines of a step in a program's text; the lines where their places are not known.

    ``aside`` has them in brackets with a space before."""
    places = ",".join(str(p) for p in dict.fromkeys(o.place for o in origins if o.place >= 0))
    if places:
        return f"@mlc({places})" if aside else f"@mlc[{places}]"
    lines = origin_text(origins)
    return f" ({lines})" if aside and lines else lines


def places_in(texts: Iterable[str]) -> set[int]:
    """The places that texts name."""
    found = (f"{inside},{aside}" for text in texts for inside, aside in _TOKEN.findall(text))
    return {int(p) for row in found for p in row.split(",") if p}


def lines_in(texts: Iterable[str], lines: Lines) -> Lines:
    """The lines that texts name, and nothing else of the graph that ``lines`` read them from."""
    known = {place: lines(place) for place in places_in(texts)}
    return lambda place: known.get(place, "")


def with_lines(text: str, lines: Lines, most: int = SHOWN) -> str:
    """A message with lines of the model in place of their numbers, at most so many of a step."""
    return _TOKEN.sub(lambda m: _written(m, lines, most), text) if "@mlc" in text else text


def program_with_lines(text: str, lines: Lines, most: int = SHOWN) -> str:
    """A program's text with lines of the model in its comments, each where it begins, at most so many of a step."""
    if "@mlc" not in text:
        return text
    written: list[str] = []
    last, depth = "", 0
    for line in text.split("\n"):
        code = line.lstrip()
        if len(line) - len(code) < depth:
            last = ""
        if "@mlc" in line:
            line = with_lines(line, lines, most)
            if code.startswith("#"):
                comment = line.strip()
                if comment in ("#", last):
                    continue
                last, depth = comment, len(line) - len(line.lstrip())
        written.append(line)
    return "\n".join(written)


def _written(found: re.Match[str], lines: Lines, most: int) -> str:
    inside, aside = found.groups()
    told = _joined((lines(int(p)) for p in (inside or aside).split(",")), most)
    return f" ({told})" if aside and told else told


def _joined(sources: Iterable[str], most: int) -> str:
    lines = list(dict.fromkeys(filter(None, sources)))
    more = f" … and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
