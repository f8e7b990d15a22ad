"""What it costs to compute an element again where it is read, rather than to write it and read it back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.machine import Machine
from .rows import longest_row

# Traffic must fall at least so far: what is computed again also costs instructions.
GAIN = 0.75
# Operations of a function from which it is not repeated for each of so many rows.
COSTLY, MANY = 4, 256
# Instructions that an element of a row takes beside its operations: its load and its conversion. What our loops reach
# of a memory's rate.
BESIDE, READING = 2, 0.9
ROWS_FOR_ONE = 2


def is_costly_in_lanes(machine: Machine, flops: int) -> bool:
    """Whether lanes along what is made would spend more on computing it in each row than on visiting it: roots and
    quotients on a CPU, where no loop outside the lanes knows it."""
    return not machine.is_gpu and flops >= COSTLY


def is_read_where_kept(machine: Machine) -> bool:
    """Whether what is computed again reads a tensor that its kernel keeps for another one anyway, and not what that is
    made of. On CPUs such results are written and read back: nothing was measured there."""
    return machine.is_gpu


@dataclass(frozen=True, slots=True)
class Reader:
    """A kernel whose every program is to make a short row again: its ``rows``, the ``nbytes`` that it reads in any
    case, the operations that it does for them, and those of making the row once."""

    rows: int
    nbytes: int
    own: int
    again: int


def may_repeat_row(machine: Machine, length: int) -> bool:
    """Whether programs can make a row of ``length`` elements beside what they do with it. A CPU makes a row once: its
    calls cost less than the row."""
    return machine.is_gpu and length <= longest_row(machine)


def repeats_row(machine: Machine, readers: Iterable[Reader]) -> bool:
    """Whether kernels that read a row make it again in each of their programs, rather than wait for a kernel that makes
    it once: they wait for memory most of the time, and what they compute meanwhile costs nothing."""
    return added_time(machine, readers) < machine.launch


def added_time(machine: Machine, readers: Iterable[Reader]) -> float:
    """Nanoseconds by which making a row again in each of their programs makes kernels longer."""
    return sum(_more(machine, r) for r in readers)


def _more(machine: Machine, r: Reader) -> float:
    """Nanoseconds by which making the row again in each program makes a kernel longer."""
    reading = r.nbytes / (machine.bandwidth * READING)
    again = r.again * r.rows / rows_for_one(machine, r.rows)
    return max(reading, (r.own + again) / machine.issued) - max(reading, r.own / machine.issued)


def rows_for_one(machine: Machine, rows: int) -> int:
    """How many of its rows a program has that makes another one, the same for all, for them: several, as long as each
    multiprocessor has two programs."""
    return ROWS_FOR_ONE if rows >= 2 * ROWS_FOR_ONE * machine.cores else 1
