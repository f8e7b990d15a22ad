"""Processes that are started anew, with nothing of their parent's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from .errors import Violation, expect


@contextmanager
def started(run: Callable[..., None], each: Iterable[Sequence[Any]]) -> Iterator[list[Connection]]:
    """Processes that run a function of a module with some words each, and as its last argument a connection, of which
    the other end is here. They end with the block."""
    context, children = multiprocessing.get_context("spawn"), []
    answers: list[Connection] = []
    try:
        for words in each:
            mine, theirs = context.Pipe(duplex=False)
            answers.append(mine)
            child = context.Process(target=run, args=(*words, theirs), daemon=True)
            child.start()
            children.append(child)
            theirs.close()
        yield answers
    finally:
        for child in children:
            child.kill()
            child.join()


def anew(run: Callable[..., None], words: Sequence[Any], patience: float, count: int = 1) -> Any:
    """What ``run``, a function of a module, sends to the connection that is its last argument, in a new process.

    With a ``count``, a list of what that many processes send which run at once. Raises Violation where one dies, or
    does not answer within ``patience`` seconds.
    """
    told = []
    with started(run, [words] * count) as answers:
        for answer in answers:
            expect(answer.poll(patience), f"a process did not answer in {patience:g} s")
            try:
                told.append(answer.recv())
            except EOFError:
                raise Violation("a process that was started anew died") from None
    return told if count > 1 else told[0]
