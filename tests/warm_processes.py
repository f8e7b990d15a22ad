"""Processes that have torch and the compiler imported and have compiled nothing: a fraction of an interpreter's start.

They are forked from a server that only imports, so what one of them has in memory no other one sees.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch_mlc.dynamo_backend.entry.backend", "tests.warm_processes"]
)


@dataclass(frozen=True, slots=True)
class Started:
    """A script that runs in a process of its own."""

    process: BaseProcess
    answers: Connection

    def output(self, timeout: float = 240.0) -> str:
        """What the script printed. Raises AssertionError with its traceback where it failed, crashed or hung."""
        try:
            assert self.answers.poll(timeout), f"no answer within {timeout:g} s"
            printed, failure = self.answers.recv()
        except EOFError:
            self.process.join(10)
            raise AssertionError(f"the process ended with {self.process.exitcode}") from None
        finally:
            self.process.terminate()
            self.process.join(10)
        assert not failure, failure
        return str(printed)


def start(script: str, *arguments: str, env: Mapping[str, str] | None = None) -> Started:
    """Run ``script`` as a main program with ``sys.argv[1:] = arguments`` and more environment variables."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = _SERVER.Process(target=_run, args=(script, arguments, dict(os.environ) | dict(env or {}), theirs))
    process.start()
    theirs.close()
    return Started(process, ours)


def _run(script: str, arguments: tuple[str, ...], env: dict[str, str], answers: Connection) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["script", *arguments]
    printed, failure = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        except BaseException:
            failure = traceback.format_exc()
    answers.send((printed.getvalue(), failure))
