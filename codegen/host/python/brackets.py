"""Brackets of texts that are written."""

from __future__ import annotations


def closes_at_end(text: str) -> bool:
    """Whether the first bracket closes with the last character."""
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return k == len(text) - 1
    return False
