"""Processes that are started anew, with nothing of their parent's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

from .errors import Violation, expect


def anew(run: Callable[..., None], words: Sequence[Any], patience: float, count: int = 1) -> Any:
    """What ``run``, a function of a module, sends to the connection that is its last argument, in a new process.

    With a ``count``, a list of what that many processes send which run at once. Raises Violation where one dies, or
    does not answer within ``patience`` seconds.
    """
    context, children = multiprocessing.get_context("spawn"), []
    for _ in range(count):
        mine, theirs = context.Pipe(duplex=False)
        child = context.Process(target=run, args=(*words, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append((child, mine))
    answers = []
    try:
        for _, answer in children:
            expect(answer.poll(patience), f"a process did not answer in {patience:g} s")
            try:
                answers.append(answer.recv())
            except EOFError:
                raise Violation("a process that was started anew died") from None
    finally:
        for child, _ in children:
            child.kill()
            child.join()
    return answers if count > 1 else answers[0]
