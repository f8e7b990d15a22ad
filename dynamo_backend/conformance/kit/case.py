"""A case: one small program, and what a backend may get wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .subject import Subject


@dataclass(frozen=True, slots=True)
class Case:
    """A program that a backend has to run as eager does. ``name`` is ``topic::function``. One that starts processes
    spends most of its time on waiting for them."""

    name: str
    trap: str
    why: str
    run: Callable[[Subject], None]
    starts_processes: bool = False

    @property
    def topic(self) -> str:
        return self.name.partition("::")[0]


def case(trap: str, why: str, *, starts_processes: bool = False) -> Callable[[Callable[[Subject], None]], Case]:
    """Makes a case of a function: ``trap`` is what goes wrong, ``why`` is who is hurt by it."""

    def made(run: Callable[[Subject], None]) -> Case:
        topic = run.__module__.rpartition(".")[2]
        return Case(f"{topic}::{run.__name__}", trap, why, run, starts_processes)

    return made
