"""Functions of a library in LLVM IR under construction: fields of records, loops, and calls that may fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Routine:
    """Lines of one function. ``block`` is the block that is being written.

    ``failures`` are the calls that may fail, by the block in which each was made: what was called, and its status.
    """

    lines: list[str] = field(default_factory=list)
    block: str = "entry"
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    count: int = 0

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def note(self, text: str) -> None:
        self.lines.append(f"  ; {text}")

    def value(self, text: str) -> str:
        """What ``text`` gives, as a register."""
        self.count += 1
        self.line(f"%v{self.count} = {text}")
        return f"%v{self.count}"

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.block = name

    def fresh(self, name: str) -> str:
        self.count += 1
        return f"{name}{self.count}"

    def text(self, head: str) -> str:
        """The function, whose first line begins with ``head``."""
        return "\n".join([f"{head} {{", "entry:", *self.lines, "}", ""])

    # --- memory -------------------------------------------------------------------------------------------------------

    def at(self, record: str, base: str, place: int | str) -> str:
        """The address of a field of a record, "%Spec", or of an item of an array of such type, "i64"."""
        fields = f"i32 0, i32 {place}" if record.startswith(("%", "{")) else f"i64 {place}"
        return self.value(f"getelementptr inbounds {record}, ptr {base}, {fields}")

    def item(self, record: str, base: str, place: int | str) -> str:
        """The address of a record in an array of them."""
        return self.value(f"getelementptr inbounds {record}, ptr {base}, i64 {place}")

    def load(self, kind: str, record: str, base: str, place: int | str) -> str:
        return self.value(f"load {kind}, ptr {self.at(record, base, place)}")

    def store(self, kind: str, value: str | int, record: str, base: str, place: int | str) -> None:
        self.line(f"store {kind} {value}, ptr {self.at(record, base, place)}")

    # --- control ------------------------------------------------------------------------------------------------------

    @contextmanager
    def each(self, count: str | int, name: str = "each") -> Iterator[str]:
        """What is written inside is done for each number below ``count`` (i64), which may be zero: the number."""
        name = self.fresh(name)
        before, index, following = self.block, f"%{name}.k", f"%{name}.next"
        self.line(f"br label %{name}")
        self.label(name)
        body = len(self.lines)
        more = self.value(f"icmp ult i64 {index}, {count}")
        self.line(f"br i1 {more}, label %{name}.one, label %{name}.done")
        self.label(f"{name}.one")
        yield index
        self.line(f"{following} = add i64 {index}, 1")
        last = self.block
        self.line(f"br label %{name}")
        self.lines.insert(body, f"  {index} = phi i64 [ 0, %{before} ], [ {following}, %{last} ]")
        self.label(f"{name}.done")

    @contextmanager
    def when(self, condition: str, name: str = "when") -> Iterator[None]:
        """What is written inside is done where the condition (i1) holds; it may end the function."""
        name = self.fresh(name)
        self.line(f"br i1 {condition}, label %{name}, label %{name}.end")
        self.label(name)
        yield
        if not self.lines[-1].lstrip().startswith(("ret ", "br ")):
            self.line(f"br label %{name}.end")
        self.label(f"{name}.end")

    def passed(self, call: str) -> None:
        """Call a function that gives a code; what is not zero is this function's too."""
        code = self.value(f"call i32 {call}")
        with self.when(self.value(f"icmp ne i32 {code}, 0"), "refused"):
            self.line(f"ret i32 {code}")

    def tried(self, what: str, call: str, good: str = "0", kind: str = "i32") -> None:
        """Call something that gives ``good`` where all is well; elsewhere go to the block ``failed``, which has
        ``what`` and the status."""
        status = self.value(call)
        fine = self.value(f"icmp eq {kind} {status}, {good}")
        name = self.fresh("fine")
        self.failures.append((self.block, what, status))
        self.line(f"br i1 {fine}, label %{name}, label %failed")
        self.label(name)

    def failed(self) -> tuple[str, str]:
        """Begin the block ``failed``: what failed (a pointer), and its status."""
        self.label("failed")
        whats = ", ".join(f"[ {what}, %{block} ]" for block, what, _ in self.failures)
        statuses = ", ".join(f"[ {status}, %{block} ]" for block, _, status in self.failures)
        return self.value(f"phi ptr {whats}"), self.value(f"phi i32 {statuses}")
