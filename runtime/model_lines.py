"""Which line of the model a host program is at, or failed at: read from the comments of its text."""

from __future__ import annotations

import inspect
import re
from types import FrameType, TracebackType

import torch

# Of the functions of a text: how the name of their file begins, and the global that holds the text.
FILE, TEXT = "<mlc host program ", "host_text_"
_NOTE = "In the model: "
# What looks at the memory of arguments, before the steps that read them.
_CHECK = re.compile(r"with_(memory|storage)_\(")


def current_line() -> str:
    """Where in the model the step is from that a host program on this thread is at, as its text says; "" if nowhere."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.startswith(FILE):
        frame = frame.f_back
    return _line_at(frame, frame.f_lineno) if frame is not None else ""


def note_line(error: BaseException) -> None:
    """Let an error that leaves a host program name the line of the model whose step failed, as a note.

    Pythons before 3.11 have no notes: there the line goes behind the message.
    """
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return  # by the program of a body of control flow, which is nearer
    frames = _frames(error.__traceback__)
    inside = [k for k, (frame, _) in enumerate(frames) if frame.f_code.co_filename.startswith(FILE)]
    line = ""
    if inside:
        frame, number = frames[inside[-1]]
        line = _line_at(frame, number)
        if _CHECK.match(_lines(frame)[number - 1]):
            tensor = frames[-1][0].f_locals.get("tensor")
            name = next((n for n, v in frame.f_locals.items() if v is tensor and isinstance(v, torch.Tensor)), "")
            line = _reader(frame, number, name) or line
    add_line(error, line)


def add_line(error: BaseException, line: str) -> None:
    """Let an error name a line of the model, "" for none."""
    if line and hasattr(error, "add_note"):
        error.add_note(f"{_NOTE}{line}")
    elif line and error.args and isinstance(error.args[0], str) and _NOTE not in error.args[0]:
        error.args = (f"{error.args[0]}\n{_NOTE}{line}", *error.args[1:])


def _frames(at: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while at is not None:
        found.append((at.tb_frame, at.tb_lineno))
        at = at.tb_next
    return found


def _lines(frame: FrameType) -> list[str]:
    # As Python counts lines; a comment may hold characters that str.splitlines cuts at.
    return [line.strip() for line in frame.f_globals[TEXT].split("\n")]


def _line_at(frame: FrameType, number: int) -> str:
    """The comment above a line of a host program's function."""
    before = _lines(frame)[frame.f_code.co_firstlineno : number]
    return next((line[1:].strip() for line in reversed(before) if line.startswith("#")), "")


def _reader(frame: FrameType, number: int, name: str) -> str:
    """The comment above the first line behind one that reads a variable, or the first that there is."""
    comment, first = "", ""
    word = re.compile(rf"\b{re.escape(name)}\b")
    for line in _lines(frame)[number:]:
        if line.startswith("def "):
            break
        if line.startswith("#"):
            comment = line[1:].strip()
            first = first or comment
        elif name and word.search(line) and not _CHECK.match(line) and comment:
            return comment
    return first
