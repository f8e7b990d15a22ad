"""Groups of processes of the CPU: one of this process alone, and one of two that are started for a case."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .errors import NotApplicable, Violation, expect
from .processes import started
from .subject import Subject
from .waiting import ended


def _gloo() -> None:
    """Raises NotApplicable where there can be no group."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise NotApplicable("this torch has no process groups for CPUs (torch.distributed with gloo)")


@contextmanager
def group_of_one() -> Iterator[Any]:
    """A mesh of one process of the CPU. Raises NotApplicable where there is a group already, or can be none."""
    _gloo()
    if dist.is_initialized():
        raise NotApplicable("this process is in a group already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def group_of_two(subject: Subject, program: Callable[[Subject, Any], None]) -> None:
    """``program``, a function of a module, in two processes that are one group; it is given a mesh of both.

    Raises NotApplicable where no such group can be made, and Violation with what a rank says is wrong, or where one of
    them does not end within twice the subject's patience.
    """
    _gloo()
    with tempfile.TemporaryDirectory() as folder:
        store, words = str(Path(folder, "store")), (subject.name, dict(subject.options), subject.patience, program)
        with started(_rank, [(rank, store, *words) for rank in range(2)]) as ranks:
            _answers(ranks, 2 * subject.patience)


def _answers(ranks: list[Connection], patience: float) -> None:
    """The first answer that says something counts: where one rank fails, the other one waits for it in vain."""
    waiting = dict(enumerate(ranks))

    def done(pause: float) -> bool:
        for answer in wait(list(waiting.values()), pause):
            rank = next(r for r, other in waiting.items() if other is answer)
            try:
                kind, told = waiting.pop(rank).recv()
            except EOFError:
                raise Violation(f"rank {rank} of two died") from None
            if kind == "no group":
                raise NotApplicable(f"no group of two processes can be made here: {told}")
            expect(kind == "right", f"rank {rank} of two: {told}")
        return not waiting

    told = ended(done, patience)
    expect(not told, f"rank {min(waiting, default=0)} of two {told}")


def _rank(
    rank: int,
    store: str,
    name: str,
    options: Mapping[str, Any],
    patience: float,
    program: Callable[[Subject, Any], None],
    answer: Connection,
) -> None:
    """What one of the processes does."""
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=patience)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
        mesh = dist.init_device_mesh("cpu", (2,))
        dist.barrier()
    except Exception as error:
        answer.send(("no group", f"{type(error).__name__}: {str(error)[:200]}"))
        return
    told = ("right", "")
    try:
        program(Subject(name, options, patience=patience), mesh)
        dist.barrier()
    except Violation as fault:
        told = ("wrong", str(fault))
    except BaseException as error:
        told = ("wrong", f"raised {type(error).__name__}: {str(error)[:500]}")
    answer.send(told)
    dist.destroy_process_group()
