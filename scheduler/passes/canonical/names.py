"""Names for what a pass adds to a graph."""

from __future__ import annotations


def fresh_name(name: str, taken: set[str]) -> str:
    """``name``, with a number behind it where it is taken; it is taken from now on."""
    found, k = name, 0
    while found in taken:
        k += 1
        found = f"{name}_{k}"
    taken.add(found)
    return found
