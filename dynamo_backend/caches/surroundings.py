"""What decides the code of a graph and lies outside it: settings, schedules by hand, targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ...runtime.options import Options
from ...runtime.targets import target_for


def settings_fingerprint(options: Options) -> str:
    """What code depends on. Tuning and strictness change which code is found, never what a key means."""
    fixed = torch.are_deterministic_algorithms_enabled()
    filled = " filled" * (fixed and torch.utils.deterministic.fill_uninitialized_memory)
    order = f"fixed{filled}" if fixed else "free"
    return f"{replace(options, tune=False, strict=False).fingerprint()} {order}"


def surroundings(options: Options, devices: Iterable[str]) -> dict[str, str]:
    """By name, what decides the code of a graph whose tensors are on some devices."""
    return {
        "settings": settings_fingerprint(options),
        "default type": str(torch.get_default_dtype()),  # in which a whole number is compared with a float
        "host program": options.host_program,
        "schedules by hand": str(options.schedules.content if options.schedules is not None else None),
        "targets": " ".join(repr(target_for(d, options.target, options.threads)) for d in devices),
    }
