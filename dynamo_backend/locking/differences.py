"""Two sections of lock files as a difference that a person reads: what changed, below which line, of which line of the
model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher

# Lines around a change that are shown; the most lines of the model that are told, and the most names for each.
_AROUND, _MOST_LINES, _MOST_NAMES = 2, 12, 4


def difference(before: Sequence[str], after: Sequence[str], names: tuple[str, str]) -> list[str]:
    """A unified difference; each hunk is headed by the lines that its first change is indented below. Empty where
    there is none."""
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    found = [f"--- {names[0]}", f"+++ {names[1]}"]
    for group in matcher.get_grouped_opcodes(_AROUND):
        found.append(f"@@ {_above(group, before, after)} @@")
        for tag, i, j, k, n in group:
            if tag == "equal":
                found += [f" {line}" for line in before[i:j]]
            else:
                found += [f"-{line}" for line in before[i:j]]
                found += [f"+{line}" for line in after[k:n]]
    return found if len(found) > 2 else []


def model_lines(lines: Iterable[str], mentioned: Callable[[str], str], source: Callable[[str], str]) -> list[str]:
    """The lines of the model that changed lines of a difference are about: ``file:line: code``, and the names there."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        if line[:1] in "+-" and not line.startswith(("---", "+++")):
            name = mentioned(line)
            if name and source(name):
                found.setdefault(source(name), {})[name] = None
    told = [f"{where}  ({'; '.join(list(names)[:_MOST_NAMES])})" for where, names in found.items()]
    more = len(told) - _MOST_LINES
    return [*told[:_MOST_LINES], *([f"and {more} more"] if more > 0 else [])]


def _above(group: Sequence[tuple[str, int, int, int, int]], before: Sequence[str], after: Sequence[str]) -> str:
    """The lines that the first change of a hunk is below, from the outermost in."""
    _, i, j, k, _ = next(op for op in group if op[0] != "equal")
    lines, at = (before, i) if j > i else (after, k)
    level, found = _level(lines[at]), list[str]()
    for line in reversed(lines[:at]):
        if _level(line) < level:
            level = _level(line)
            found.append(line.strip())
    return ", ".join(reversed(found)) or lines[at].strip()


def _level(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
