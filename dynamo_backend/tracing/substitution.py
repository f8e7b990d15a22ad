"""Functions of torch that are others while this backend is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any


class Substitution:
    """``owner.name``, a function that torch looks up there at each call, is another one inside ``here()``.

    Only for what calls from inside: other threads, which may be compiling with another backend, keep torch's own,
    and the attribute itself is torch's own again when the last thread has left.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._original: Callable[..., Any] = getattr(owner, name)
        self._inside: ContextVar[bool] = ContextVar(f"mlc_substitutes_{name}", default=False)
        self._entered, self._lock = 0, Lock()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, and in this thread, the attribute is our function."""
        self._enter()
        token = self._inside.set(True)
        try:
            yield
        finally:
            self._inside.reset(token)
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._entered == 0:
                self._original = getattr(self._owner, self._name)
                setattr(self._owner, self._name, self._chosen())
            self._entered += 1

    def _leave(self) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                setattr(self._owner, self._name, self._original)

    def _chosen(self) -> Callable[..., Any]:
        """The function in the attribute's place; one, so that it is bound like a method where the owner is a class."""
        original = self._original

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (self._function if self._inside.get() else original)(*args, **kwargs)

        return chosen
