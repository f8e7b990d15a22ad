"""Inputs and results as NumPy has them, for runtimes without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = list["np.ndarray[Any, Any]"]


def inputs(folder: Path) -> Arrays:
    """The inputs of the program, in their order."""
    with np.load(folder / "inputs.npz") as found:
        return [found[name] for name in sorted(found.files)]


def keep(folder: Path, results: Sequence[Any]) -> None:
    """Write the results of a call."""
    np.savez(folder / "results.npz", **{f"{k:03}": np.asarray(r) for k, r in enumerate(results)})
