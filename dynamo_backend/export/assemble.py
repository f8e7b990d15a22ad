"""The path of a model from programs of ``torch.export`` to what a library is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export import ExportedProgram

from ...codegen.export.library import ExportedModel, KernelVariant
from ...codegen.host.export.emit import ExportedHost
from ...ir.target import Target
from ...runtime.settings.options import Options
from .errors import ExportError
from .function import Built, KernelPool, build_function
from .names import identifier
from .program import ModelProgram, read_program
from .signature import signature_of
from .targets import targets_of
from .weights import WeightTable

# Programs by the names of their functions; one alone is "forward".
Programs: TypeAlias = ExportedProgram | Mapping[str, ExportedProgram]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model that is ready to be written: ``weights`` are elements by name, ``signatures`` what
    Python's callers know of each function, ``hosts`` what was printed of it."""

    model: ExportedModel
    weights: Mapping[str, np.ndarray[Any, Any]] = field(repr=False)
    signatures: Mapping[str, Any]
    hosts: Mapping[str, ExportedHost] = field(repr=False)


def assemble(
    program: Programs,
    *,
    targets: Sequence[str] = ("host",),
    libraries: Sequence[str] = (),
    name: str = "model",
    options: Mapping[str, object] | None = None,
) -> Assembled:
    """A model as ``export`` writes it, with the same arguments and errors."""
    if not name.isidentifier() or not name.isascii():
        raise ExportError(f"a library is called by an identifier of C, and {name!r} is none")
    if libraries:
        raise ExportError(f"libraries= names none that exported models can call yet, so {libraries!r} cannot be used")
    functions: dict[str, ExportedProgram] = dict(program) if isinstance(program, Mapping) else {"forward": program}
    for function in functions:
        if identifier(function) != function or not function or function[0].isdigit():
            raise ExportError(f"a function of a library is called by an identifier of C, and {function!r} is none")
    settings = Options.resolve(None, {"libraries": "none", **(options or {})}, os.environ)
    with torch.no_grad():
        return _assembled(functions, name, settings, targets_of(targets, settings))


def _assembled(
    functions: Mapping[str, ExportedProgram], name: str, settings: Options, targets: tuple[Target, ...]
) -> Assembled:
    programs = [read_program(function, given) for function, given in functions.items()]
    table, pool = WeightTable(), KernelPool(targets)
    for program in programs:
        table.enter(program)
    built = [build_function(p, settings, table.frozen(p), pool) for p in programs]
    for program in programs:
        table.enter(program)  # what was folded
    weights = table.used(programs)
    numbers = {w.name: k for k, w in enumerate(weights)}
    made = [_printed(b, table, numbers, name) for b in built]
    called = {k for _, host in made for k in host.kernels}
    rows = [sources for kernel, sources in pool.sources.items() if kernel in called]
    least, *others = (KernelVariant(t, tuple(row[k] for row in rows)) for k, t in enumerate(targets))
    model = ExportedModel(
        name, tuple(f for f, _ in made), weights, least.kernels, least.target, tuple(reversed(others))
    )  # fmt: skip
    signatures = {p.name: signature_of(p) for p in programs}
    return Assembled(model, table.arrays(weights), signatures, {f.name: host for f, host in made})


def _printed(built: Built, table: WeightTable, numbers: Mapping[str, int], name: str) -> Any:
    program: ModelProgram = built.program
    places = {n: numbers[table.names[program.name, n]] for n in program.weights.values()}
    return built.exported(places, f"{name}_{program.name}_host")
