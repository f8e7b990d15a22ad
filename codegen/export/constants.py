"""Constants of a library in LLVM IR: texts, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Constants:
    """Lines of a module; a text that is met again is written once."""

    lines: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def text(self, content: str) -> str:
        """A C string: the name of the constant."""
        if content not in self.texts:
            self.texts[content] = name = f"@text{len(self.texts)}"
            data = content.encode()
            shown = "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in data)
            self.lines.append(f'{name} = private unnamed_addr constant [{len(data) + 1} x i8] c"{shown}\\00"')
        return self.texts[content]

    def data(self, content: bytes) -> str:
        """Bytes as they are, at a multiple of 64: the name of the constant."""
        name = f"@data{len(self.lines)}"
        shown = "".join(f"\\{b:02X}" for b in content)
        self.lines.append(f'{name} = private unnamed_addr constant [{len(content)} x i8] c"{shown}", align 64')
        return name

    def array(self, name: str, kind: str, items: Sequence[str]) -> str:
        """An array of constants of one type; null where there are none."""
        if not items:
            return "null"
        body = ", ".join(f"{kind} {i}" for i in items)
        self.lines.append(f"@{name} = private unnamed_addr constant [{len(items)} x {kind}] [{body}]")
        return f"@{name}"


def struct(*fields: tuple[str, str | int]) -> str:
    """A constant of a structure, from types and values."""
    return "{ " + ", ".join(f"{kind} {value}" for kind, value in fields) + " }"
