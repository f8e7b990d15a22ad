"""The table of all cases."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from .cases import (
    aliasing,
    autograd,
    caches,
    complex_numbers,
    containers,
    control_flow,
    custom_ops,
    failures,
    gradients,
    lifetimes,
    modules,
    mutation,
    numbers,
    options,
    random_numbers,
    settings,
    sizes,
    strides,
    subclasses,
    threads,
)
from .kit.case import Case

# In the order in which they run. What may start threads, or forks, comes last.
TOPICS = (
    mutation, aliasing, strides, sizes, numbers, complex_numbers, containers, gradients, autograd, random_numbers,
    lifetimes, caches, settings, subclasses, custom_ops, control_flow, modules, options, failures, threads,
)  # fmt: skip

CASES: tuple[Case, ...] = tuple(found for topic in TOPICS for found in vars(topic).values() if isinstance(found, Case))


class UnknownCaseError(ValueError):
    """A pattern that fits no case."""


def chosen(patterns: Sequence[str]) -> frozenset[str]:
    """Names of the cases that patterns fit: a name, a topic, or a glob ("threads::*"). Raises UnknownCaseError."""
    names: set[str] = set()
    for pattern in patterns:
        fits = {c.name for c in CASES if pattern == c.topic or fnmatch.fnmatchcase(c.name, pattern)}
        if not fits:
            topics = ", ".join(dict.fromkeys(c.topic for c in CASES))
            raise UnknownCaseError(
                f"no case is named {pattern!r}. Topics: {topics}; pytest --mlc-conformance-list names all"
            )
        names |= fits
    return frozenset(names)
