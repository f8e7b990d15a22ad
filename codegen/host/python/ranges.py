"""The host program with a profiler's range around each kernel and each op, by which traces name model lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from .text import HostText


def with_ranges(host: HostText, kernels: Mapping[str, str]) -> HostText:
    """A program that enters ``range_(text)`` for the time of each call of a kernel or an op; ``kernels`` gives names of
    kernels by variable.

    A range is called "kernel | model.py:12 in forward: x = self.norm(x)", by the comment above the call.
    """
    called = {**kernels, **host.called}
    call = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(called, key=len, reverse=True)))})\(")
    lines: list[str] = []
    origin = ""
    # Comments are lines of the user's, which may hold characters that str.splitlines cuts at, and Python does not.
    for line in host.text.removesuffix("\n").split("\n"):
        code = line.lstrip()
        indent = line[: len(line) - len(code)]
        found = None
        if code.startswith("#"):
            origin = code[1:].strip() if indent else ""
        elif called and not code.startswith("def "):
            found = call.search(code)
        if found is None:
            lines.append(line)
            continue
        told = " | ".join(filter(None, (called[found[1]], origin)))
        lines += [f"{indent}with range_({told!r}):", f"{indent}    {code}"]
    return replace(host, text="\n".join(lines) + "\n")
