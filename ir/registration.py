"""What users add to the compiler: the handle of each addition, by which it is taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from threading import RLock
from typing import Any

from .errors import MlcError

# Held while a table is changed; compilation reads each table at once.
LOCK = RLock()


class RegistrationError(MlcError, ValueError):
    """What is to be registered cannot be; the text names what, why not, and how to mend it."""


class Registration:
    """What a ``torch_mlc.register_…`` gives: ``remove()`` takes the addition back, and so does the end of a ``with``.

    Called, it is the function that was registered, whose name it takes where that was decorated.
    """

    __slots__ = ("_undo", "kind", "name", "value")

    def __init__(self, kind: str, name: str, value: Any, undo: Callable[[], None]) -> None:
        self.kind, self.name, self.value = kind, name, value
        self._undo: Callable[[], None] | None = undo

    @property
    def is_removed(self) -> bool:
        return self._undo is None

    def remove(self) -> None:
        """Take the addition back; what has been compiled with it stays as it is. Nothing where that is done already."""
        with LOCK:
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}{', removed' * self.is_removed}>"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The names that a wrong one may be meant for, as the end of a sentence; "" for none."""
    near = get_close_matches(name, list(known), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
