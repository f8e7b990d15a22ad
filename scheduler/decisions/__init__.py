"""Decisions: what is chosen between two or more ways by their costs, recorded, and open to be chosen otherwise."""

from .decide import (
    LAUNCH,
    ORDER,
    SUBSTITUTE,
    UNSEARCHED,
    Alternative,
    ChosenFor,
    Decider,
    DecisionError,
    DecisionOverrides,
    DecisionRecord,
    LockedWays,
    parse_overrides,
)
from .keys import place_key, text_key

__all__ = [
    "LAUNCH",
    "ORDER",
    "SUBSTITUTE",
    "UNSEARCHED",
    "Alternative",
    "ChosenFor",
    "Decider",
    "DecisionError",
    "DecisionOverrides",
    "DecisionRecord",
    "LockedWays",
    "parse_overrides",
    "place_key",
    "text_key",
]  # fmt: skip
