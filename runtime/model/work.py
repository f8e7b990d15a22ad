"""What a launch asks of a GPU, in the units of its sheet: the input of the prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...ir.machine import Machine
from ..machine_code.counts import Counted
from ..machine_code.issue import asked_bytes
from ..triton.compile import GpuBinary
from .alone import warp_clocks
from .opcodes import Pipe, by_groups, cached_bytes, is_tensor_memory_product, pipes_of, products_of

# The least that comes from the second cache.
_SECTOR = 32
_TILE_PRODUCT = re.compile(r"\btcgen05\.mma\.[^;]*?\.kind::(?P<kind>\w+)\s[^;]*?,\s*(?P<described>%r\d+)\s*[,;]")
_DESCRIPTION = re.compile(r"\bmov\.[bu]32\s+(?P<register>%r\d+),\s*(?P<bits>-?\d+);")


@dataclass(frozen=True, slots=True)
class ArrayTraffic:
    """An array in global memory as a kernel visits it.

    ``touched`` bytes are asked for at all, ``read`` and ``written`` are those of all visits of one program each, added
    up over programs that have different parts; ``sharing`` programs have the same part, of so many rounds of programs
    that run together (``rounds``). ``contiguous`` are the bytes that a warp asks for together, None where all of its
    lanes ask for the same. ``kept`` is what caches are asked to hold until it is visited again.
    """

    touched: int
    read: int
    written: int
    sharing: int = 1
    rounds: float = 1.0
    contiguous: int | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Of one program: ``slots`` and ``lanes`` by pipe are instructions times threads, ``products`` multiply-adds in
    tensor cores (as those of half types; by groups of warps where ``grouped``), ``cached`` bytes of shared memory and
    the first cache.

    ``alone`` are the clocks of a program by itself, where memory is idle and where it is full. ``programs`` are those
    of the launch, of which a multiprocessor holds ``resident``. ``moved`` are the bytes between multiprocessors and the
    second cache, ``memory`` those to and from memory, where what is fetched in vain counts too.
    """

    programs: int
    resident: int
    slots: float = 0.0
    lanes: Mapping[Pipe, float] = field(default_factory=dict)
    products: float = 0.0
    grouped: bool = False
    cached: float = 0.0
    alone: tuple[float, float] = (0.0, 0.0)
    moved: float = 0.0
    memory: float = 0.0


def work_of(
    counted: Counted, binary: GpuBinary, programs: int, resident: int, arrays: Sequence[ArrayTraffic], machine: Machine
) -> Work:
    """The work of a launch of so many programs, of which ``resident`` fit on a multiprocessor.

    Raises ValueError for a machine that is no GPU.
    """
    if machine.pipes is None:
        raise ValueError(f"{machine.part} has no pipes that are known")
    tile = tile_products(binary.assembly) if binary.kind == "cuda" else 0.0
    lanes: dict[Pipe, float] = {}
    products = cached = 0.0
    grouped = False
    for runs, i in zip(counted.runs, counted.code.instructions, strict=True):
        for pipe in pipes_of(i.opcode):
            lanes[pipe] = lanes.get(pipe, 0.0) + runs * binary.threads
        cached += runs * cached_bytes(i) * binary.threads
        if is_tensor_memory_product(i.opcode):
            products += runs * tile
        elif each := products_of(i.opcode):
            products += runs * each * binary.threads / machine.warp
        grouped |= by_groups(i.opcode)
    asked = asked_bytes(counted) * binary.threads * programs
    named = sum((a.read + a.written) * a.sharing * _sectors(a.contiguous) for a in arrays)
    memory = sum(memory_bytes(a, programs, resident, arrays, machine) for a in arrays)
    # Where copies are made by descriptors the code names less than it moves, elsewhere lanes may ask for the same.
    moved = min(named, asked) if asked >= 0.5 * named else named
    near = machine.pipes.l2_latency
    far = _share_of_memory(arrays, memory, moved)
    alone = tuple(
        warp_clocks(counted.code, counted.runs, machine, near + far * (latency - near), tile)
        for latency in (machine.pipes.memory_latency, machine.pipes.loaded_latency)
    )
    return Work(
        programs, resident, counted.slots * binary.threads, lanes, products, grouped, cached, (alone[0], alone[1]),
        moved, memory,
    )  # fmt: skip


def _share_of_memory(arrays: Sequence[ArrayTraffic], memory: float, moved: float) -> float:
    """The share of what is asked for that memory has and no cache."""
    return min(memory / moved, 1.0) if moved and arrays else 1.0


def _sectors(contiguous: int | None) -> float:
    return 1.0 if contiguous is None else max(_SECTOR / contiguous, 1.0)


def memory_bytes(
    array: ArrayTraffic, programs: int, resident: int, arrays: Sequence[ArrayTraffic], machine: Machine
) -> float:
    """Bytes of an array that pass between memory and the second cache, as many as take as long where runs are short.

    What a program visits again is in the cache where it holds what all programs that run meanwhile touch, each byte
    once, or of what it is asked to keep, where it holds all that; what other programs visit too is fetched again by
    those that run later, as far as all arrays together exceed the cache.
    """
    at_once = min(programs, machine.cores * resident)
    everything = sum(a.touched for a in arrays)
    beside = [a for a in arrays if a.kept] if array.kept else arrays
    meanwhile = sum((min(a.read, a.touched) + a.written) * a.rounds for a in beside) / max(programs, 1) * at_once
    own = array.read / array.touched if array.touched else 0.0
    again = max(own - 1.0, 0.0) * _missed(meanwhile, machine)
    shared = (array.rounds - 1.0) * _missed(everything, machine)
    fetched = array.touched * (min(own, 1.0) + again) * (1.0 + shared)
    return (fetched + array.written) / _efficiency(array.contiguous, machine)


def _missed(footprint: float, machine: Machine) -> float:
    return max(1.0 - machine.l2_bytes / footprint, 0.0) if footprint else 0.0


def _efficiency(contiguous: int | None, machine: Machine) -> float:
    """What runs of that many bytes reach of memory's rate: bursts are half used by half a burst, and pages are opened
    for less than they could give."""
    assert machine.pipes is not None
    if contiguous is None:
        return 1.0
    return min(1.0, (contiguous / machine.pipes.page_run) ** 0.5, 2 * contiguous / machine.pipes.burst)


def tile_products(ptx: str) -> float:
    """Multiply-adds of a product of tiles in tensor memory (``tcgen05.mma``), on average over those of the text, as
    those of half types; 0.0 where there are none. Their descriptions are numbers (PTX ISA 9.0, 9.7.16.4.2)."""
    known = {m["register"]: int(m["bits"]) for m in _DESCRIPTION.finditer(ptx)}
    found = [known[m["described"]] for m in _TILE_PRODUCT.finditer(ptx) if m["described"] in known]
    # Rows and columns; the depth is 32 bytes, and the types of so many bytes multiply as fast by bytes.
    return sum((bits >> 17 & 63) * 8 * (bits >> 24 & 31) * 16 * 16 for bits in found) / max(len(found), 1)
