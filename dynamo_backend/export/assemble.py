"""The path of a model from programs of ``torch.export`` to what a library is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch
from torch.export import ExportedProgram

from ...codegen.export.codes import DRAWS, product_symbol
from ...codegen.export.library import ExportedModel
from ...codegen.export.products import FUNCTIONS
from ...codegen.host.export.emit import ExportedHost
from ...codegen.host.export.pointers import PointersOf
from ...runtime.settings.options import Options
from .errors import ExportError
from .function import Built, build_function
from .kernels import KernelPool, compile_gpu_kernels, scratch_of
from .names import identifier
from .program import ModelProgram, read_program
from .signature import signature_of
from .targets import ExportTargets, targets_of
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
    calls = _libraries(libraries)
    functions: dict[str, ExportedProgram] = dict(program) if isinstance(program, Mapping) else {"forward": program}
    for function in functions:
        if identifier(function) != function or not function or function[0].isdigit():
            raise ExportError(f"a function of a library is called by an identifier of C, and {function!r} is none")
    settings = Options.resolve(None, {**(options or {}), "libraries": calls}, os.environ)
    made_for = targets_of(targets, settings)
    if made_for.on_gpu and calls != "none":
        raise ExportError(f"libraries={tuple(libraries)!r} multiplies on processors, and this library is for GPUs")
    settings = replace(settings, target=made_for.deciding)
    with torch.no_grad():
        return _assembled(functions, name, settings, made_for)


def _libraries(names: Sequence[str]) -> str:
    if isinstance(names, str):
        names = (names,)
    wrong = [n for n in names if n != "cblas"]
    if wrong:
        raise ExportError(
            f"libraries= names {', '.join(map(repr, wrong))}, and exported models can call 'cblas' alone, for products"
        )
    return "cblas" if names else "none"


def _assembled(
    functions: Mapping[str, ExportedProgram], name: str, settings: Options, targets: ExportTargets
) -> Assembled:
    programs = [read_program(function, given) for function, given in functions.items()]
    table, pool = WeightTable(), KernelPool(targets.kernels, targets.on_gpu)
    for program in programs:
        table.enter(program)
    built = [build_function(p, settings, table.frozen(p), pool, targets) for p in programs]
    for program in programs:
        table.enter(program)  # what was folded
    weights = table.used(programs)
    numbers = {w.name: k for k, w in enumerate(weights)}
    pointers = _pointers(built)
    gpus = compile_gpu_kernels(pool, pointers, settings) if targets.on_gpu else ()
    made = [_printed(b, table, numbers, name, scratch_of(gpus, b.pointers)) for b in built]
    called = {k for _, host in made for k in host.kernels}
    model = ExportedModel(
        name, tuple(f for f, _ in made), weights, (), targets.host, machine=targets.machine, gpus=gpus,
        products=tuple(f for f in FUNCTIONS if product_symbol(f) in called), draws=DRAWS in called,
    )  # fmt: skip
    if not targets.on_gpu:
        least, *others = pool.variants(called)
        model = replace(model, kernels=least.kernels, target=least.target, variants=tuple(reversed(others)))
    signatures = {p.name: signature_of(p) for p in programs}
    return Assembled(model, table.arrays(weights), signatures, {f.name: host for f, host in made})


def _pointers(built: Sequence[Built]) -> dict[str, PointersOf]:
    """What is known of the launches of each kernel, in all functions."""
    found: dict[str, PointersOf] = {}
    for b in built:
        for kernel, here in b.pointers.items():
            found[kernel] = found[kernel].and_(here) if kernel in found else here
    return found


def _printed(
    built: Built, table: WeightTable, numbers: Mapping[str, int], name: str, scratch: Mapping[str, sympy.Expr]
) -> Any:
    program: ModelProgram = built.program
    places = {n: numbers[table.names[program.name, n]] for n in program.weights.values()}
    return built.exported(places, f"{name}_{program.name}_host", scratch)
