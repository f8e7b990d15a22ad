"""Processes that are started anew, with nothing of their parent's.

Where the system can, they are forked from a server that has imported torch and nothing else, which takes seconds. What
their parent compiled, loaded or locked is not in them, as in a process that is spawned.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from .errors import Violation, expect
from .waiting import ended

HOW = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@contextmanager
def started(run: Callable[..., None], each: Iterable[Sequence[Any]]) -> Iterator[list[Connection]]:
    """Processes that run a function of a module with some words each, and as its last argument a connection, of which
    the other end is here. They end with the block."""
    context: Any = multiprocessing.get_context(HOW)
    if HOW == "forkserver":
        context.set_forkserver_preload(["torch", "torch._dynamo"])
    children: list[Any] = []
    answers: list[Connection] = []
    try:
        for words in each:
            mine, theirs = context.Pipe(duplex=False)
            answers.append(mine)
            child = context.Process(target=_begin, args=(run, dict(os.environ), *words, theirs), daemon=True)
            child.start()
            children.append(child)
            theirs.close()
        yield answers
    finally:
        for child in children:
            child.join(0.5)  # one that has answered is about to end
            child.kill()
            child.join()


def _begin(run: Callable[..., None], environment: Mapping[str, str], *words: Any) -> None:
    os.environ.clear()  # the server's is that of the first process
    os.environ.update(environment)
    run(*words)


def anew(run: Callable[..., None], words: Sequence[Any], patience: float, count: int = 1) -> Any:
    """What ``run``, a function of a module, sends to the connection that is its last argument, in a new process.

    With a ``count``, a list of what that many processes send which run at once. Raises Violation where one dies, or
    does not answer within ``patience`` seconds.
    """
    told = []
    with started(run, [words] * count) as answers:
        for answer in answers:
            why = ended(answer.poll, patience)
            expect(not why, f"a process that was started anew {why}")
            try:
                told.append(answer.recv())
            except EOFError:
                raise Violation("a process that was started anew died") from None
    return told if count > 1 else told[0]
