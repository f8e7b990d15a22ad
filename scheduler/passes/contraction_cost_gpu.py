"""Which products a GPU computes with our loops."""

from __future__ import annotations

from ..contraction import Decision, Product


def decide_gpu(product: Product) -> Decision:
    """Products are cuBLAS calls."""
    return Decision(False, product.node.reason)
