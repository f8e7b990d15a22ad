"""``torch_mlc.export``: programs of ``torch.export`` as a folder that runs without Python and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...ir.errors import MlcError
from ...runtime.export.write import write_library
from .assemble import Programs, assemble
from .describe import DESCRIPTION, description
from .errors import ExportError


def export(
    program: Programs,
    folder: str | Path,
    *,
    targets: Sequence[str] = ("host",),
    libraries: Sequence[str] = (),
    name: str = "model",
    options: Mapping[str, object] | None = None,
) -> Path:
    """Write a model as a folder that runs without Python and torch (docs/export.md); returns the folder.

    ``program`` is what ``torch.export.export`` gives, or several by name, which share weights and state. ``targets``
    are processors, "host" the one at hand, or NVIDIA's GPUs ("cuda:sm_90"), which need not be here. ``libraries`` are
    those that the library may call: "cblas", for products, or none, which is the default. ``name`` is what its
    functions in C begin with, ``options`` are those of ``torch.compile``. The folder is made where it is missing, and
    files of the same names in it are replaced.

    Raises ExportError with every operation that no kernel can do, its line in the model, and why.
    """
    assembled = assemble(program, targets=targets, libraries=libraries, name=name, options=options)
    path = Path(folder)
    try:
        write_library(assembled.model, assembled.weights, path)
    except MlcError as error:
        raise ExportError(f"{name} cannot be written as a library: {error}") from error
    (path / DESCRIPTION).write_text(description(assembled), encoding="utf-8")
    return path


__all__ = ["export"]
