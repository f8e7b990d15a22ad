"""What of a row stays near the arithmetic units between its visits: registers of a GPU's program, caches of a CPU."""

from __future__ import annotations

from collections.abc import Iterable

from ...ir.expr.dtypes import DType
from ...ir.machine import Machine

# Registers of a thread that hold elements where a program lasts, and threads of a program that are worth having: more
# of either a program does not use, whatever a multiprocessor has.
THREADS, EACH = 512, 128
# Second-level caches that are larger than this were not measured.
MOST_CACHE = 512 << 10
# Rows shorter than this are no work for vectors and tiles along them; fewer rows are soon visited again.
SHORT_ROW, FEW_ROWS = 32, 16
# Registers of a thread that hold no element, but addresses.
ADDRESSES = 48


def registers(machine: Machine) -> int:
    """Registers of 32 bits of the programs on a multiprocessor."""
    return min(machine.registers, THREADS * EACH)


def held_elements(machine: Machine) -> int:
    """Elements of a row, times tensors that are kept for all of it, that stay in the registers of one program."""
    return registers(machine) // 2


def held_bytes(machine: Machine) -> int:
    """Bytes of the tensors that stay there of a row half as long."""
    return registers(machine) * 4 * 3 // 8


def scanned_elements(machine: Machine) -> int:
    """Elements of a row of a scan that stay in the registers of one program."""
    return registers(machine) // 4


def scanned_whole(machine: Machine) -> int:
    """Elements of rows of a scan that stay there beside whatever else is made of them."""
    return registers(machine) // 32


def longest_row(machine: Machine) -> int:
    """Elements of the longest row that a program holds beside the sums of all columns."""
    return registers(machine) // 4


def long_row(machine: Machine) -> int:
    """Of rows of more elements than this a multiprocessor holds one program."""
    return registers(machine) // 8


def rows_together(machine: Machine, elements: int) -> int:
    """How many rows of so many elements a multiprocessor is to hold at a time, each by a program of its own, so that
    one is read while another is reduced; 0 where it holds as many without being asked, 1 where it cannot.

    A row of fewer elements leaves registers for others. Of a longer one a thread has ``EACH`` registers for half as
    many elements, and two programs of such threads fill a multiprocessor.
    """
    if machine.registers > registers(machine) or elements <= long_row(machine):
        return 0
    return 2 if 4 * elements <= registers(machine) else 1


def warps_of_rows(machine: Machine, together: int) -> int:
    """Warps of a program, where a multiprocessor holds so many ``together`` and a thread has ``EACH`` registers."""
    return registers(machine) // (EACH * machine.warp * together)


def held_sums(machine: Machine, length: int) -> int:
    """Elements of all sums over rows of ``length`` elements that a program holds: twice as many where it is alone."""
    most = registers(machine) // 4
    return most if length <= long_row(machine) else 2 * most


def held_words(machine: Machine) -> int:
    """32-bit words of a row and its sums that a program holds where it is alone."""
    return registers(machine) * 3 // 4


def keeps_narrow(read: Iterable[DType]) -> bool:
    """Whether visits of a row can begin from what was loaded of it, two elements in a register."""
    return all(kind.is_half for kind in read)


def keeps_in_caches(machine: Machine) -> bool:
    """Whether a row is found again in a core's cache, rather than in the registers of a program."""
    return not machine.is_gpu


def comes_back(machine: Machine, nbytes: int) -> bool:
    """Whether the cache that a GPU's multiprocessors share holds a row of so many bytes for each of them, so that
    further visits find it there; of a CPU each core has its own."""
    return machine.is_gpu and machine.cores * nbytes <= machine.l2_bytes


def cache(machine: Machine) -> int:
    """Bytes of a row that a CPU's core finds again in its second-level cache."""
    return min(machine.l2_bytes, MOST_CACHE)
