"""What a library is made for: processors, of the machine at hand or by names that others agree on, or NVIDIA's GPUs."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.target import Target, TargetError
from ...runtime.settings.options import Options
from ...runtime.targets import CPU_NAMES, named_target, target_for
from .errors import ExportError

HOST = "host"
_ARM = "aarch64"


@dataclass(frozen=True, slots=True)
class ExportTargets:
    """``machine`` is the instruction set of the library, "x86-64" or "aarch64". ``kernels`` are what its kernels are
    made for, the least capable first, all of them GPUs or none; ``host`` is the processor that runs the rest."""

    machine: str
    kernels: tuple[Target, ...]
    host: Target

    @property
    def on_gpu(self) -> bool:
        return self.kernels[0].is_gpu

    @property
    def deciding(self) -> str | None:
        """The target by whose figures it is decided what shares a kernel, as ``Options.target`` has it: the least
        capable one. None is the machine at hand."""
        least = self.kernels[0]
        if least.is_gpu:
            return str(least)
        return f"cpu:{least.arch}" if least.arch in CPU_NAMES else f"cpu:{_ARM}" if self._is_foreign else None

    @property
    def _is_foreign(self) -> bool:
        return self.machine != this_machine()


def this_machine() -> str:
    """The instruction set of the machine at hand, as libraries call it."""
    return _ARM if platform.machine() in ("aarch64", "arm64") else "x86-64"


def targets_of(names: Sequence[str], options: Options) -> ExportTargets:
    """The targets of names. Raises ExportError for what is none, and what no library has together."""
    cpus = [n for n in names if n == HOST or n in CPU_NAMES]
    gpus = [n for n in names if n.startswith(("cuda:", "hip:"))]
    wrong = [n for n in names if n not in cpus and n not in gpus]
    if wrong or not names or len(set(names)) < len(names):
        what = f"and {', '.join(map(repr, wrong))} is none" if wrong else f"each once, and not {tuple(names)!r}"
        known = ", ".join(map(repr, (HOST, *CPU_NAMES)))
        raise ExportError(f"targets= takes processors, of {known}, or GPUs, such as 'cuda:sm_90', {what}")
    machines = {_ARM if n == _ARM else this_machine() if n == HOST else "x86-64" for n in cpus} or {this_machine()}
    if len(machines) > 1:
        raise ExportError(
            f"a library is for one instruction set, and targets={tuple(names)!r} are of "
            f"{' and '.join(sorted(machines))}: export the model once for each"
        )
    (machine,) = machines
    if machine == "x86-64" != this_machine():
        raise ExportError(
            f"this machine's processor is {this_machine()}, and libraries for x86-64 are made on x86-64 alone"
        )
    host = _cpu(HOST if machine == this_machine() else machine, options)
    if not gpus:
        kernels = tuple(_cpu(n, options) for n in sorted(cpus, key=(*CPU_NAMES, HOST).index))
        return ExportTargets(machine, kernels, kernels[0])
    if len(cpus) > 1:
        raise ExportError(f"of a library for GPUs one processor launches, and {', '.join(map(repr, cpus))} are several")
    launching = cpus[0] if cpus else "x86-64" if machine == "x86-64" else _ARM
    return ExportTargets(machine, _gpus(gpus), host if launching == HOST else _cpu(launching, options))


def _cpu(name: str, options: Options) -> Target:
    override = None if name == HOST else f"cpu:{name}"
    return target_for("cpu", override, options.threads, options.cpu_products, options.libraries)


def _gpus(names: Sequence[str]) -> tuple[Target, ...]:
    """The GPUs of names, the least capable first; libraries are never called on them."""
    found = []
    for asked in names:
        if asked.startswith("hip:"):
            raise ExportError(
                f"targets= has {asked!r}: libraries launch through NVIDIA's driver, and there are none for AMD's GPUs"
            )
        try:
            found.append(named_target(asked, libraries="none"))
        except TargetError as error:
            raise ExportError(f"targets= has {asked!r}: {error}") from error
    if len({t.arch for t in found}) < len(found):
        raise ExportError(f"targets={tuple(names)!r} name a GPU twice")
    return tuple(sorted(found, key=lambda t: t.capability))


__all__ = ["HOST", "ExportTargets", "targets_of", "this_machine"]
