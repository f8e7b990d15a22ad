"""Compiled graphs as data that another process runs with none of our caches: what ``aot_compile`` and
``save_compiled_function`` write.

A program is saved as the entries that our cache would hold, each with its hash, with the tensors and the bodies of
control flow that its calls name. torch pickles what is around it, so that who loads one trusts it as code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...ir.errors import MlcError
from ...ir.target import Target, TargetError
from ...runtime.cache.entry import DamagedEntry
from ...runtime.cache.fingerprint import environment_fingerprint, key_of
from ...runtime.compile.kernels import KernelStore
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...runtime.timing import PhaseTimer
from ..compiling.compiled import CompiledGraph, dispatching, stored_graph

# What of the settings tells how a program is loaded; the rest is that of the process that loads it.
_KEPT = ("target", "threads", "host_program", "cuda_graphs", "cuda_graph_shapes", "cuda_graph_copies")
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class SavedProgramError(MlcError, RuntimeError):
    """A program cannot be saved, or what was saved cannot be loaded here; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """One graph. ``entries`` are its record and its codes as bytes, ``constants`` what it names of the model's,
    ``targets`` the machines by device that it was compiled for, ``versions`` a digest of what made it; ``lines`` are of
    the model, by their places in its graph. A program in front of ``variants`` has each of them with it."""

    name: str
    key: str
    entries: tuple[bytes, ...] = field(repr=False)
    constants: Mapping[str, torch.Tensor | SavedProgram] = field(repr=False)
    settings: Mapping[str, Any]
    targets: Mapping[str, Mapping[str, Any]] = field(repr=False)
    versions: str
    lines: Mapping[int, str] = field(repr=False)
    region: bool = False
    variants: tuple[SavedProgram, ...] = field(default=(), repr=False)

    def load(self) -> CompiledGraph:
        """The program, ready to be called. Raises SavedProgramError where this process or machine cannot run it."""
        if self.versions != environment_fingerprint():
            raise SavedProgramError(
                f"{self.name} was saved under other versions of torch-mlc, torch, Triton, llvmlite, sympy or Python "
                "than those here; compile and save it again"
            )
        options = replace(Options.resolve(None, None, os.environ), **self.settings)
        for device, target in self.targets.items():
            _check_target(self.name, device, Target(**target), options)
        try:
            store = KernelStore.unpacked(self.key, self.entries)
        except DamagedEntry as error:
            raise SavedProgramError(f"{self.name}: a part of what was saved {error}; save it again") from None
        if self.variants:
            loaded, record = tuple(v.load() for v in self.variants), store.graph(self.key)
            assert record is not None, "an entry that was unpacked is there"
            return dispatching(self.name, record, loaded, key=self.key, load=True, timer=PhaseTimer())
        given = {n: x.load().call if isinstance(x, SavedProgram) else x for n, x in self.constants.items()}
        found = stored_graph(
            self.key, options=options, name=self.name, constants=given, region=self.region, store=store,
            lines=lambda place: self.lines.get(place, ""),
        )  # fmt: skip
        if found is None:
            raise SavedProgramError(f"{self.name}: a part of what was saved is missing; save it again")
        return found


def save_program(compiled: CompiledGraph, options: Options, *, region: bool = False) -> SavedProgram:
    """The program of a compiled graph with all that it needs. Raises SavedProgramError where that is no data."""
    if compiled.kept is None:
        raise SavedProgramError(
            f"{compiled.name} cannot be saved: a kernel of it did not compile and ATen ops run in its place, which "
            "only this process has; MLC_STRICT=1 tells why it did not"
        )
    variants = tuple(save_program(v, options) for v in compiled.variants)
    kept = compiled.kept.finished()
    record = kept.record
    named = _named(record)
    constants: dict[str, torch.Tensor | SavedProgram] = {}
    for name, value in compiled.constants.items():
        if name not in named:
            continue
        if isinstance(value, CompiledGraph):
            constants[name] = save_program(value, options, region=True)
        elif type(value) in _TENSORS:
            with _disable_current_modes():  # AOTAutograd compiles among fake tensors
                constants[name] = value.detach()
        else:
            raise SavedProgramError(
                f"{compiled.name} cannot be saved: it calls an op with {name}, an object of type "
                f"{type(value).__module__}.{type(value).__qualname__}, and only tensors and compiled bodies of control "
                "flow can be written down; give it as an argument, or keep that part of the model out of what is saved"
            )
    key = key_of([compiled.name, repr(sorted(record.items(), key=lambda i: i[0]))])
    return SavedProgram(
        compiled.name,
        key,
        KernelStore.packed(key, record, kept.codes),
        constants,
        {name: getattr(options, name) for name in _KEPT},
        {
            d: asdict(target_for(d, options.target, options.threads, options.cpu_products, options.libraries))
            for d in record["devices"]
        },
        environment_fingerprint(),
        {place: line for place in kept.places if (line := kept.host.lines(place))},
        region,
        variants,
    )


def _named(record: Mapping[str, Any]) -> set[str]:
    """The names of objects and bodies that a program's texts use."""
    native = record.get("native") or {}
    texts = (record, *(native[k] for k in ("parts", "rescues") if k in native))
    return {name for text in texts for name in (*text["constants"].values(), *text["ops"].values())}


def _check_target(name: str, device: str, wanted: Target, options: Options) -> None:
    """Raises SavedProgramError where machine code for a target cannot run on a device of this machine."""
    try:
        here = target_for(device, options.target, options.threads, options.cpu_products, options.libraries)
    except TargetError as error:
        raise SavedProgramError(f"{name} was compiled for {wanted} ({device}): {error}") from None
    if wanted.is_gpu:
        lacking = (
            "" if (here.kind, here.arch) == (wanted.kind, wanted.arch) else f"{wanted}, and {device} here is {here}"
        )
    else:
        flags = {f for f in wanted.features.split(",") if f.startswith("+")} - {*here.features.split(",")}
        lacking = f"a processor with {', '.join(sorted(flags))}, which this one has not got" if flags else ""
    if lacking:
        raise SavedProgramError(f"{name} was compiled for {lacking}; compile and save it on a machine like this one")


Saver = Callable[[CompiledGraph], SavedProgram]
