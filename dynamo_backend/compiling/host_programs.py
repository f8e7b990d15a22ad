"""The host program of a graph in the forms in which it runs: as Python, as machine code, and as Python with ranges for
profilers."""

from __future__ import annotations

import base64
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...codegen.host.native.native import NativeHost, emit_native, python_launches
from ...codegen.host.python.ranges import with_ranges
from ...codegen.host.python.text import HostText, print_host
from ...codegen.host.steps.lines import ALL, SHOWN, Lines, lines_in, program_with_lines, with_lines
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.resolved import RunKernel
from ...codegen.kernel import EmitError
from ...ir.errors import MlcError
from ...ir.passes import Level, run_passes
from ...ir.target import Target
from ...runtime.compile.kernels import KernelCode, KernelStore, LoadedKernel
from ...runtime.cpu import CpuCompileError, CpuKernel
from ...runtime.gpu.launch import GpuKernel
from ...runtime.host.executable import Boxed, load_program
from ...runtime.host.native import NoNativeHost, load_native, native_process, program_code, shims, support_code
from ...runtime.host.switch import switched
from ...runtime.log import logger
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from .host_passes import CODE_PASSES

_LOG = logger(__name__)
# Makes a program known in the form that it has now.
Keep = Callable[["HostCode"], None]


def _nowhere(place: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class HostCode:
    """A host program as Python, and for machine code: compiled, as the text ``native`` that ``store`` compiles for
    ``target`` once it is called often, or as the ``program`` that this is written from when it is called again."""

    text: HostText
    native: NativeHost | None = None
    code: KernelCode | None = None
    support: KernelCode | None = None
    store: KernelStore | None = field(default=None, repr=False)
    target: Target | None = None
    # What stays with Python where machine code was asked for, and why.
    python: str = ""
    program: HostProgram | None = field(default=None, repr=False)
    # Of the model at hand; the texts name places in its graph.
    lines: Lines = field(default=_nowhere, repr=False)

    def of_model(self, lines: Lines) -> HostCode:
        """With the lines of a model, of which nothing else is held."""
        native = self.native
        texts = [self.text.text, *((native.parts.text, native.rescues.text, *native.launches) if native else ())]
        return replace(self, lines=lines_in(texts, lines))

    @property
    def told(self) -> HostText:
        """The text with the lines of the model at hand, for people: of a step at most some."""
        return self.with_lines(self.text)

    def with_lines(self, text: HostText, most: int = SHOWN) -> HostText:
        """A text of the program with the lines of the model at hand, at most so many of a step."""
        return replace(text, text=program_with_lines(text.text, self.lines, most))

    def told_native(self, native: NativeHost) -> NativeHost:
        """The native form with all lines of the model at hand in its texts."""
        parts, rescues = self.with_lines(native.parts, ALL), self.with_lines(native.rescues, ALL)
        launches = tuple(with_lines(line, self.lines, ALL) for line in native.launches)
        return replace(native, parts=parts, rescues=rescues, launches=launches)

    def load(
        self,
        kernels: Mapping[str, LoadedKernel],
        constants: Mapping[str, Any],
        name: str,
        keep: Keep | None = None,
    ) -> Boxed:
        """The function that runs it, over loaded kernels by variable. ``keep`` is told of machine code that is made
        later. Errors name all lines of a step, so its text has them all."""
        calls: dict[str, Callable[..., Any]] = {variable: k.host_call for variable, k in kernels.items()}
        told = self.with_lines(self.text, ALL)
        python = partial(load_program, told, calls, constants, name)

        def ranged() -> Boxed:
            text = with_ranges(told, {variable: k.name for variable, k in kernels.items()})
            return load_program(text, calls, constants, name)

        def native(code: HostCode) -> Boxed:
            assert code.native is not None and code.code is not None and code.support is not None
            payloads = code.code.payload, code.support.payload
            return load_native(
                self.told_native(code.native), *payloads, code.addresses(kernels), calls, constants, python, name
            )

        forms = [self]  # the last one is the furthest

        def again() -> None:
            try:
                forms.append(self.written())
            except (EmitError, NoNativeHost) as error:
                _LOG.debug("the host program of %s stays Python: %s", name, error)
                return
            if keep is not None:
                keep(forms[-1])

        def better() -> Boxed | None:
            if forms[-1].native is None:
                return None
            try:
                code = forms[-1].compiled()
                found = native(code)
            except (MlcError, RuntimeError) as error:
                _LOG.debug("the host program of %s stays Python: %s", name, error)
                return None
            finally:
                forms.clear()
            if keep is not None:
                keep(code)
            return found

        if self.program is not None:
            return switched(python(), ranged, better, name, again)
        if self.native is None:
            return switched(python(), ranged, None, name)
        if self.code is None:
            return switched(python(), ranged, better, name)
        return switched(native(self), ranged, None, name)

    def addresses(self, kernels: Mapping[str, LoadedKernel]) -> dict[str, int]:
        """What machine code knows of kernels by variable: on CPUs where they are, on a GPU where their records are."""
        found: dict[str, int] = {}
        gpu = self.native.gpu if self.native is not None else None
        for variable, kernel in kernels.items():
            match kernel.owner:
                case CpuKernel(address=address):
                    found[variable] = address
                case GpuKernel() as owner if gpu is not None:
                    found[variable] = owner.record(gpu).address
        return found

    def written(self) -> HostCode:
        """With the text that is compiled to machine code. Raises EmitError and NoNativeHost."""
        assert self.program is not None
        program = run_passes(CODE_PASSES, self.program, None)
        uses_gpu = any(d != "cpu" for d in program.devices)
        native = emit_native(program, shims(("cpu", "cuda") if uses_gpu else ("cpu",)))
        native_process()
        told = {
            step.use.kernel: f"Python launches {step.use.kernel} ({step.comment}), which {why}"
            for step in program.steps
            if isinstance(step, RunKernel) and (why := python_launches(step))
        }
        return replace(self, native=native, program=None, python="; ".join(told.values()))

    def compiled(self) -> HostCode:
        """With machine code. Raises CpuCompileError."""
        assert self.native is not None and self.store is not None and self.target is not None
        code, support = program_code(self.store, self.native, self.target), support_code(self.store, self.target)
        return replace(self, code=code, support=support)

    def finished(self) -> HostCode:
        """With machine code, where it was to be made once the program is called often and can be."""
        if self.code is not None or (self.program is None and self.native is None):
            return self
        try:
            return (self.written() if self.native is None else self).compiled()
        except (EmitError, NoNativeHost, CpuCompileError) as error:
            _LOG.debug("a host program stays Python: %s", error)
            return HostCode(self.text, lines=self.lines)

    def record(self) -> dict[str, Any]:
        """What a cache keeps of it, as JSON; machine code is an entry of its own."""
        found = _text_record(self.text)
        if self.native is not None:
            made = self.code is not None and self.support is not None
            found["native"] = {
                "code": self.code.key if self.code is not None else "",
                "support": self.support.key if self.support is not None else "",
                "text": "" if made else _packed(self.native.text),
                "own": self.native.own,
                "parts": _text_record(self.native.parts),
                "rescues": _text_record(self.native.rescues),
                "gpu": self.native.gpu,
                "launches": self.native.launches,
            }
        return found


def host_code(
    program: HostProgram, resolved: HostProgram, options: Options, store: KernelStore, lines: Lines = _nowhere
) -> HostCode:
    """A program's code as the settings ask for it, for a model with some ``lines``, from its steps and these resolved;
    on GPUs, native where that is asked for. Warns where it should be native and cannot be."""
    return _host_code(program, print_host(resolved), options, store).of_model(lines)


def _host_code(program: HostProgram, text: HostText, options: Options, store: KernelStore) -> HostCode:
    uses_gpu = any(d != "cpu" for d in program.devices)
    if options.host_program == "python" or (options.host_program == "auto" and uses_gpu):
        return HostCode(text)
    target = target_for("cpu", options.target, options.threads, options.cpu_products, options.libraries)
    found = HostCode(text, store=store, target=target, program=program)
    if options.host_program != "native":
        return found
    try:
        return found.written().compiled()
    except (EmitError, NoNativeHost) as error:
        warnings.warn(f"torch-mlc: the host program stays Python: {error}", stacklevel=2)
        return HostCode(text, python=f"Python, for {error}")


CODE: Level[HostCode] = Level("code", lambda c: c.told.text, lambda c: c.text.text.count("\n"), suffix="py")


def stored_host_code(
    record: Mapping[str, Any], options: Options, store: KernelStore, lines: Lines = _nowhere
) -> HostCode | None:
    """The code of a record, for a model with some ``lines``; None where the cache has lost a part of it."""
    found = _stored(record, options, store)
    return found.of_model(lines) if found is not None else None


def _stored(record: Mapping[str, Any], options: Options, store: KernelStore) -> HostCode | None:
    text, kept = _text_of(record), record.get("native")
    if kept is None:
        return HostCode(text)
    own = tuple((kind, item) for kind, item in kept["own"])
    parts, rescues = _text_of(kept["parts"]), _text_of(kept["rescues"])
    native = NativeHost(_unpacked(kept["text"]), own, parts, rescues, kept["gpu"], tuple(kept["launches"]))
    if kept["text"]:
        return HostCode(
            text,
            native,
            store=store,
            target=target_for("cpu", options.target, options.threads, options.cpu_products, options.libraries),
        )
    code, support = store.code(kept["code"]), store.code(kept["support"])
    return None if code is None or support is None else HostCode(text, native, code, support)


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def _unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode() if text else ""


def _text_record(text: HostText) -> dict[str, Any]:
    return {"text": text.text, "ops": dict(text.ops), "constants": dict(text.constants)}


def _text_of(record: Mapping[str, Any]) -> HostText:
    return HostText(record["text"], record["ops"], record["constants"])
