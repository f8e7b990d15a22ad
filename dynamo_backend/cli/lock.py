"""`torch-mlc lock`."""

import sys
from pathlib import Path

import click

from ..locking.differences import difference
from ..locking.lock_store import read_lock
from ..locking.lock_text import LockError, LockText
from ..locking.show import shown
from .near import Commands, tell

_FILE = click.Path(dir_okay=False, path_type=Path)


class _Unreadable(click.ClickException):
    exit_code = 2  # 1 says that files differ


@click.group(cls=Commands)
def lock() -> None:
    """Lock files: what was decided for the graphs of a model (docs/lock.md)."""


@lock.command()
@click.argument("file", type=_FILE)
def show(file: Path) -> None:
    """Print a table of each graph in FILE: its calls, what makes most bytes first, and what was decided there."""
    text = _read(file)
    try:
        for line in shown(text):
            tell(line)
    except LockError as error:
        raise _Unreadable(str(error)) from error


@lock.command()
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
def diff(before: Path, after: Path) -> None:
    """Print what differs between two lock files, and exit with 1 where anything does, as diff does.

    Who chose a schedule or a way is told by show, and is no difference.
    """
    a, b = _read(before).sections, _read(after).sections
    found: list[str] = []
    for name in sorted({**a, **b}):
        one = a[name].content[1:] if name in a else []
        other = b[name].content[1:] if name in b else []
        lines = difference(one, other, (f"{before}: {name}", f"{after}: {name}"))
        if lines and not (one and other):
            lines = [f"only in {before if one else after}: {name}"]
        found += lines
    for line in found:
        tell(line)
    sys.exit(1 if found else 0)


def _read(path: Path) -> LockText:
    try:
        return read_lock(path)
    except LockError as error:
        raise _Unreadable(str(error)) from error
