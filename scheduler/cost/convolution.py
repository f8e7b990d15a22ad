"""Which convolutions become loops of ours.

A convolution over many channels is a product of matrices, which is its library's. A depthwise one multiplies each
element a few times only: it is bound by memory and by loads, and what our loops save is every visit of what comes
before and after it, and the copies into the layout that a library computes in.

On GPUs a model of time decides, as for products: bytes over the bandwidth or instructions over the rate at which they
are issued, whichever takes longer. The libraries' depthwise kernels (ATen's; cuDNN's for half types with channels
innermost and windows of 1, 3 or 5) have a thread for each result that computes where each tap reads, tests it, and
loads it and its filter, and images with channels innermost that cuDNN does not take are copied first and behind.
"""

from __future__ import annotations

import enum
from dataclasses import replace

import sympy

from ...ir.expr.symbols import SymbolTable
from ...ir.expr.windows import MOST_TAPS
from ...ir.machine import Machine
from ..facts.contraction import Decision
from ..facts.convolution import Convolution, can_gather
from .programs import CHANNELS, pieces_of_images

# Sums over the same elements that a stencil's program keeps at most.
MOST_SUMS = 64
# Instructions for each tap of a result, of the libraries' kernels and of ours, which share what they load and where.
THEIR_TERM, OUR_TERM = 9.0, 3.0
# What either reaches of the bandwidth.
THEIR_READING, OUR_READING = 0.6, 0.9
# Windows that cuDNN's kernels take.
CUDNN_WINDOWS = (1, 3, 5)


class Direction(enum.Enum):
    """What of a convolution is asked for."""

    OUTPUT = "output"
    INPUT = "gradient of the input"
    WEIGHT = "gradient of the weight"
    BIAS = "gradient of the bias"


def decide(c: Convolution, direction: Direction, table: SymbolTable, machine: Machine) -> Decision:
    """Open one direction of a depthwise convolution where our loops take less time than the library."""
    if not machine.calls_libraries:
        told = _told(c) if c.is_depthwise else f"convolution: sums of {c.taps} taps"
        return Decision(True, f"{told} in loops, for no library may be called")
    on_cpu = not machine.is_gpu
    library = f"convolution: {machine.libraries.convolutions}"
    if not c.is_depthwise:
        return Decision(False, library)
    if c.taps > MOST_TAPS:
        return Decision(False, f"{library}; windows of {c.taps} elements are no stencil")
    gathers = c.transposed if direction is Direction.OUTPUT else direction is Direction.INPUT
    if c.transposed and direction is not Direction.OUTPUT:
        return Decision(False, f"{library}; gradients of a transposed convolution")
    if gathers and not can_gather(c):
        return Decision(False, f"{library}; strides and dilations together")
    if on_cpu:
        return _decide_cpu(c, direction, gathers, library)
    return _decide_gpu(c, direction, table, machine)


def _decide_cpu(c: Convolution, direction: Direction, gathers: bool, library: str) -> Decision:
    if gathers and max(c.stride) > 1:
        return Decision(False, f"{library}; windows {max(c.stride)} apart cover each place differently")
    if direction in (Direction.WEIGHT, Direction.BIAS):
        return Decision(False, f"{library}, which sums over images faster")
    return _between(Decision(True, _told(c)), None, None)


def _decide_gpu(c: Convolution, direction: Direction, table: SymbolTable, machine: Machine) -> Decision:
    if direction is Direction.BIAS:
        return Decision(True, "depthwise: a sum where the gradient is read")
    if direction is Direction.WEIGHT and c.taps > MOST_SUMS:
        return Decision(False, f"convolution: the library; {c.taps} sums over the images are too many for a program")
    size = c.input.dtype.itemsize
    source, result = (max(table.hint(t.numel), 1) for t in (c.input, c.output))
    terms = (source if c.transposed else result) * c.taps
    moved = (source + result) * size
    ours = max(moved / (machine.bandwidth * OUR_READING), terms * OUR_TERM / machine.issued)
    if direction is Direction.WEIGHT:  # pieces, which another kernel adds
        ours += machine.launch
    theirs = max(moved / (machine.bandwidth * THEIR_READING), terms * THEIR_TERM / machine.issued)
    if _innermost(c) and not (c.input.dtype.is_half and max(c.kernel) in CUDNN_WINDOWS and c.rank == 2):
        theirs += 2 * moved / (machine.bandwidth * OUR_READING)
    if ours < theirs:
        taken = Decision(True, f"{_told(c)} in {_time(ours)} rather than {_time(theirs)}")
    else:
        library = machine.libraries.convolutions
        taken = Decision(False, f"convolution: {library} in {_time(theirs)}; as a stencil {_time(ours)}")
    return _between(taken, ours, theirs)


def _between(taken: Decision, loops: float | None, library: float | None) -> Decision:
    """A decision between both ways, whose times are None where nothing was measured."""
    other = Decision(not taken.decomposed, taken.reason)
    return replace(taken, loops=loops, library=library, otherwise=other)


def pieces_of(c: Convolution, direction: Direction, table: SymbolTable, machine: Machine) -> int:
    """In how many pieces a gradient that is a sum over all images is made, so that programs for channels and pieces
    occupy a GPU; 1 for those that are none, and on CPUs, whose schedules cut sums."""
    if direction not in (Direction.WEIGHT, Direction.BIAS) or not machine.is_gpu:
        return 1
    channels = int(c.output.shape[1])
    programs = -(-channels // CHANNELS) if _innermost(c) else channels
    each = max(table.hint(c.output.numel) // channels, 1)
    results = c.taps if direction is Direction.WEIGHT else 1
    return pieces_of_images(machine, programs, each * c.output.dtype.itemsize, results)


def _told(c: Convolution) -> str:
    return f"depthwise: a stencil of {c.taps} taps"


def _innermost(c: Convolution) -> bool:
    """Whether channels are the innermost dimension of the image in memory."""
    return c.input.strides[1] == 1 and c.input.strides[-1] != 1 and c.input.shape[-1] != sympy.S.One


def _time(ns: float) -> str:
    return f"{ns / 1000:.1f} µs" if ns >= 100 else f"{ns:.0f} ns"
