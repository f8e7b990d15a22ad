"""Proofs of the roles that stages of tensor functions have."""

from __future__ import annotations

from collections.abc import Iterator

from ..function.function import TensorFunction
from .expr import Fault


def roles_hold(function: TensorFunction) -> Iterator[Fault]:
    """What a pass has said of a stage is so."""
    yield from ()
