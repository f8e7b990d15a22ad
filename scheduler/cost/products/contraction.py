"""Which products leave their library, on any machine."""

from __future__ import annotations

from ....ir.machine import Machine
from ...facts.contraction import Decision, LibraryProduct
from .contraction_cpu import decide_cpu
from .contraction_gpu import decide_gpu


def decide_product(product: LibraryProduct, machine: Machine, fast: bool = True) -> Decision:
    """Whether our loops do a product, how, and why. ``fast``: its roundings need not be those of a library."""
    return decide_gpu(product, machine) if machine.is_gpu else decide_cpu(product, machine, fast)
