"""The format of a lock file: sections of indented lines.

A file begins with ``# torch-mlc lock 1``. A section is a line ``graph NAME`` and what is indented below it, two spaces
a level. Other lines that begin with # are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...ir.errors import MlcError

VERSION = 1
HEAD = f"# torch-mlc lock {VERSION}"
EXPLAINED = "# What torch-mlc decided for each graph of a model (docs/lock.md). Written with MLC_LOCK_MODE=write."
_HEAD = re.compile(r"# torch-mlc lock (\d+)\s*")
GRAPH = "graph "
SETTINGS, PROGRAMS, CALLS, SAVED = "settings", "programs", "calls", "saved"
DECISIONS, SCHEDULES = "decisions", "schedules"
PARTS = (SETTINGS, PROGRAMS, CALLS, SAVED, DECISIONS, SCHEDULES)
# Stands between the name of a graph of several programs and the sizes that one of them is for.
WHERE = " where "
# Who decided: told, and no part of what is compared.
_BY = re.compile(r", by [a-z ]+$")
_DECISION = re.compile(r"(?P<kind>[a-z][\w-]*): (?P<way>[^()]+?)(?: \(with (?P<beside>.+)\))?")


class LockError(MlcError):
    """A build decides otherwise than the lock file has it, or the file cannot be used; the text says what to do."""


class LockFileError(LockError):
    """A lock file cannot be read; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class LockLine:
    """A line and what is indented below it; ``number`` is where it stands in its file, 0 for nowhere."""

    text: str
    below: tuple[LockLine, ...] = ()
    number: int = field(default=0, compare=False)

    def written(self, level: int = 0) -> Iterator[str]:
        """As lines of a file."""
        yield "  " * level + self.text
        for line in self.below:
            yield from line.written(level + 1)


@dataclass(frozen=True, slots=True)
class LockedDecision:
    """A decision of a place: of a kind, about what else ("" for nothing), and the way that was taken."""

    kind: str
    way: str
    beside: str
    number: int


@dataclass(frozen=True, slots=True)
class Section:
    """What was decided for one graph. ``lines`` are those of a file, ``number`` where they begin; comments above its
    first line belong to it."""

    name: str
    lines: tuple[str, ...]
    number: int = field(default=0, compare=False)
    path: Path | None = field(default=None, compare=False)

    @classmethod
    def of(cls, name: str, body: Iterable[str]) -> Section:
        """A section whose ``body`` is indented by one level."""
        return cls(name, (GRAPH + name, *body))

    @property
    def content(self) -> list[str]:
        """The lines without comments, and without who decided: equal for equal decisions."""
        return [_BY.sub("", line) for line in self.lines if _is_content(line)]

    def tree(self) -> dict[str, tuple[LockLine, ...]]:
        """The lines below each part. Raises LockFileError for lines that are no part of a lock file."""
        (top,) = _nested(self.lines, self.number, self._fault)
        found: dict[str, tuple[LockLine, ...]] = {}
        for part in top.below:
            if part.text not in PARTS:
                raise self._fault(part.number, f"{part.text!r} is no part of a section: {', '.join(PARTS)}")
            if part.text in found:
                raise self._fault(part.number, f"the section has {part.text} twice")
            found[part.text] = part.below
        return found

    @property
    def programs(self) -> list[str]:
        """The names of the sections of a graph's programs, where it has several. Raises LockFileError."""
        return [self.name + WHERE + line.text for line in self.tree().get(PROGRAMS, ())]

    def decisions(self) -> dict[str, list[LockedDecision]]:
        """The decisions by the name of their place. Raises LockFileError."""
        found: dict[str, list[LockedDecision]] = {}
        for place in self.tree().get(DECISIONS, ()):
            for line in place.below:
                match = _DECISION.fullmatch(_BY.sub("", line.text))
                if match is None:
                    raise self._fault(line.number, f"{line.text!r} is no decision: it should be KIND: WAY (with PLACE)")
                told = LockedDecision(match["kind"], match["way"], match["beside"] or "", line.number)
                found.setdefault(place.text, []).append(told)
        return found

    def _fault(self, number: int, what: str) -> LockFileError:
        return fault(self.path, number, what)


@dataclass(frozen=True, slots=True)
class LockText:
    """A lock file: sections by name, in the order of the file. ``begin`` are the lines above the first of them."""

    begin: tuple[str, ...] = (HEAD, EXPLAINED)
    sections: dict[str, Section] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, path: Path | None = None) -> LockText:
        """Raises LockFileError, which names the line."""
        lines = text.splitlines()
        head = _HEAD.fullmatch(lines[0]) if lines else None
        if head is None:
            raise fault(path, 1, f"a lock file begins with {HEAD!r}")
        if int(head[1]) != VERSION:
            raise fault(path, 1, f"the file is of version {head[1]}, and this torch-mlc reads version {VERSION}")
        starts = [k for k, line in enumerate(lines) if line and not line.startswith((" ", "#"))]
        for k in starts:
            if not lines[k].startswith(GRAPH) or not lines[k][len(GRAPH) :].strip():
                raise fault(
                    path, k + 1, f"{lines[k]!r} is no section, which begins with {GRAPH.strip()!r} and its name"
                )
        first = [_with_comments(lines, k) for k in starts]
        begin = lines[: first[0]] if first else lines
        for k, line in enumerate(begin):
            if line.strip() and not line.startswith("#"):
                raise fault(path, k + 1, f"{line.strip()!r} stands in no section")
        sections: dict[str, Section] = {}
        for start, end in zip(first, [*first[1:], len(lines)], strict=True):
            at = next(k for k in range(start, end) if lines[k].startswith(GRAPH))
            name, own = lines[at][len(GRAPH) :].strip(), lines[start:end]
            if name in sections:
                raise fault(path, at + 1, f"the file has {name!r} twice")
            while own and not own[-1].strip():
                own.pop()
            sections[name] = Section(name, tuple(own), start + 1, path)
        return cls(tuple(_stripped(begin)), sections)

    def written(self) -> str:
        """The text of the file, sections in the order of their names."""
        parts = ["\n".join(self.begin)]
        parts += ["\n".join(self.sections[name].lines) for name in sorted(self.sections)]
        return "\n\n".join(parts) + "\n"

    def having_graph(self, sections: Sequence[Section]) -> LockText:
        """With the section of a graph and those of its programs, and without programs that it had before; the same
        object where nothing is another."""
        kept = {s.name for s in sections}
        gone = [n for n in self.sections if n.startswith(sections[0].name + WHERE) and n not in kept]
        text = LockText(self.begin, {n: s for n, s in self.sections.items() if n not in gone}) if gone else self
        for section in sections:
            text = text.having(section)
        return text

    def having(self, section: Section) -> LockText:
        """With a section in place of that of its name, whose comments above it stay; the same object where that has
        the same lines."""
        before = self.sections.get(section.name)
        if before is not None:
            if [x for x in before.lines if _is_content(x)] == [x for x in section.lines if _is_content(x)]:
                return self
            top = before.lines[: next(k for k, x in enumerate(before.lines) if x.startswith(GRAPH))]
            section = Section(section.name, (*top, *section.lines))
        return LockText(self.begin, {**self.sections, section.name: section})


def fault(path: Path | None, number: int, what: str) -> LockFileError:
    """What is wrong with a line of a file."""
    return LockFileError(
        f"{path or 'lock file'}:{number}: {what}. Mend the line, or delete the file and write it again "
        "(MLC_LOCK_MODE=write)"
    )


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _stripped(lines: Sequence[str]) -> list[str]:
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def _with_comments(lines: Sequence[str], at: int) -> int:
    """Where a section begins: with the comments right above its first line, but not those that begin the file."""
    while at > 2 and lines[at - 1].startswith("#"):
        at -= 1
    return at


def _nested(lines: Sequence[str], begin: int, fault: object) -> list[LockLine]:
    """Lines with those indented below each."""
    assert callable(fault)
    found: list[tuple[int, str, int]] = []
    for k, line in enumerate(lines):
        if not _is_content(line):
            continue
        spaces = len(line) - len(line.lstrip(" "))
        level = spaces // 2
        if spaces % 2 or "\t" in line[: spaces + 1] or level > (found[-1][0] + 1 if found else 0):
            raise fault(begin + k, f"{line.strip()!r} is indented by {spaces}: two spaces a level")
        found.append((level, line.strip(), begin + k))
    return _below(found, 0, len(found), 0)


def _below(found: Sequence[tuple[int, str, int]], start: int, end: int, level: int) -> list[LockLine]:
    tops = [k for k in range(start, end) if found[k][0] == level]
    ends = [*tops[1:], end][: len(tops)]
    return [
        LockLine(found[k][1], tuple(_below(found, k + 1, until, level + 1)), found[k][2])
        for k, until in zip(tops, ends, strict=True)
    ]
