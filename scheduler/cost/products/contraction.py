"""Which products leave their library, on any machine."""

from __future__ import annotations

from ....ir.machine import Machine
from ...facts.contraction import Decision, LibraryProduct
from .contraction_cpu import decide_cpu
from .contraction_gpu import decide_gpu


def decide_product(product: LibraryProduct, machine: Machine) -> Decision:
    """Whether our loops do a product, how, and why."""
    return decide_gpu(product, machine) if machine.is_gpu else decide_cpu(product, machine)
