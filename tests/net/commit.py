"""What the commit under test chooses: seeds of random programs, and which tenth of the slow tests is run."""

from __future__ import annotations

import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

from ..workers import ROOT

PARTS = 10


@dataclass(frozen=True, slots=True)
class Commit:
    """``name`` is the hash in hexadecimal, "" where git knows none (an unpacked sdist). ``number`` counts the commits
    up to this one along first parents; None where the history is not here (a shallow clone).
    """

    name: str = ""
    number: int | None = None

    @classmethod
    def at(cls, root: Path = ROOT) -> Commit:
        """The commit that is checked out in a folder, if the folder is the root of a checkout."""
        try:
            if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
                return cls()
            name = _git(root, "rev-parse", "HEAD")
            if _git(root, "rev-parse", "--is-shallow-repository") != "false":
                return cls(name)
            return cls(name, int(_git(root, "rev-list", "--count", "--first-parent", "HEAD")))
        except (OSError, subprocess.SubprocessError, ValueError):
            return cls()

    @property
    def seed(self) -> int:
        """The first seed of random programs; those of other commits are far away."""
        return int(self.name[:7], 16) * 10_000 if self.name else 0

    @property
    def part(self) -> int:
        """Which tenth of the slow tests is run. A count, and no hash, says it where it can: ten commits in a row then
        run all of them, where ten hashes would leave out a third.
        """
        if self.number is not None:
            return self.number % PARTS
        return int(self.name, 16) % PARTS if self.name else 0

    def __str__(self) -> str:
        if not self.name:
            return f"no commit (not a checkout of git): seeds from {self.seed}, part {self.part}"
        why = "by its hash, for the clone is shallow" if self.number is None else f"it is number {self.number}"
        return f"commit {self.name[:10]}: seeds from {self.seed}, part {self.part} of {PARTS} ({why})"


def part_of(test: str) -> int:
    """The part that a test is in, by its id alone: it stays there when others come and go."""
    return zlib.crc32(test.encode()) % PARTS


def _git(root: Path, *words: str) -> str:
    # A checkout may belong to another user than the one who tests it, as in containers.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
