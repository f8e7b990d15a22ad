"""What a stage of a tensor function, and the block that it becomes, does for the whole: said by the pass that made it,
proved by the verifier, read by the rules that schedule it."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """A part of attention, or a sum of any other function.

    Attention, forward or backward, is over rows, keys and features.

    Rows are what scores have besides keys; keys are what states combine over; features are axes of vectors alone.
    What is a row here may be a key of the model: the gradients of keys and values are sums over queries.
    """

    # Reduces elements of each row by itself, before there is any score.
    ROW_TOTAL = "row_total"
    # A sum over features of a product, for each row and key.
    SCORE = "score"
    # Point-wise on scores and other weights, for each row and key.
    WEIGHT = "weight"
    # The online state over keys: maximum, sum, and vectors weighted by the exponential of a score.
    STATE = "state"
    # A sum over keys of a product of weights with a vector.
    WEIGHTED_SUM = "weighted_sum"
    # A sum of weights over rows, at points of the others.
    WEIGHT_TOTAL = "weight_total"
    # Point-wise on states, weighted sums and weight totals.
    RESULT = "result"

    # A sum of products of operands, which are read along it.
    PRODUCT = "product"
    # A product of matrices that a library computes inside the kernel, for a block of rows at a time.
    LIBRARY_PRODUCT = "library_product"
    # A sum or maximum over a fixed number of taps: each is one place of windows that slide along the results.
    POOLING = "pooling"
    # A pooling that is a product.
    CONVOLUTION = "convolution"
    # For each tap a sum along which the windows slide.
    TAP_SUM = "tap_sum"
    # A tap sum that is a product.
    FILTER_GRADIENT = "filter_gradient"

    @property
    def is_of_attention(self) -> bool:
        return self not in _OF_SUMS

    @property
    def has_operands(self) -> bool:
        """Whether it sums products of operands."""
        return self in _PRODUCTS

    @property
    def has_windows(self) -> bool:
        """Whether it combines taps of windows that slide along its results."""
        return self in (Role.POOLING, Role.CONVOLUTION)

    @property
    def has_taps(self) -> bool:
        """Whether it has a sum for each tap of windows that slide along what is summed."""
        return self in (Role.TAP_SUM, Role.FILTER_GRADIENT)


_OF_SUMS = (Role.PRODUCT, Role.LIBRARY_PRODUCT, Role.POOLING, Role.CONVOLUTION, Role.TAP_SUM, Role.FILTER_GRADIENT)
_PRODUCTS = (
    Role.SCORE, Role.WEIGHTED_SUM, Role.PRODUCT, Role.LIBRARY_PRODUCT, Role.CONVOLUTION, Role.FILTER_GRADIENT,
)  # fmt: skip
