"""What a stage of a tensor function, and the block that it becomes, does for the whole: said by the pass that made it,
proved by the verifier, read by the rules that schedule it."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """A part of attention, forward or backward, over rows, keys and features.

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
