"""Which convolutions become loops of ours.

A convolution over many channels is a product of matrices, which is its library's. A depthwise one multiplies each
element a few times only: it is bound by memory and by loads, and what our loops save is every visit of what comes
before and after it, and the copies into the layout that a library computes in.
"""

from __future__ import annotations

import enum

from ..contraction import Decision
from ..convolution import Convolution, can_gather

# Taps that a kernel writes out at most.
MOST_TAPS = 128


class Part(enum.Enum):
    """What of a convolution is asked for."""

    OUTPUT = "output"
    INPUT = "gradient of the input"
    WEIGHT = "gradient of the weight"
    BIAS = "gradient of the bias"


def decide(c: Convolution, part: Part) -> Decision:
    """Open a part of a depthwise convolution where our loops take less time than the library."""
    on_cpu = c.input.device.startswith("cpu")
    library = "convolution: oneDNN" if on_cpu else "convolution: cuDNN"
    if not c.is_depthwise or not on_cpu:
        return Decision(False, library)
    if c.taps > MOST_TAPS:
        return Decision(False, f"{library}; windows of {c.taps} elements are no stencil")
    told = f"depthwise: a stencil of {c.taps} taps"
    gathers = c.transposed if part is Part.OUTPUT else part is Part.INPUT
    if c.transposed and part is not Part.OUTPUT:
        return Decision(False, f"{library}; gradients of a transposed convolution")
    if gathers and not can_gather(c):
        return Decision(False, f"{library}; strides and dilations together")
    if gathers and max(c.stride) > 1:
        return Decision(False, f"{library}; windows {max(c.stride)} apart cover each place differently")
    if part in (Part.WEIGHT, Part.BIAS):
        return Decision(False, f"{library}, which sums over images faster")
    return Decision(True, told)
