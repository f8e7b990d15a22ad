"""The host program of a graph in the forms in which it runs: as Python, and where that is asked for as machine code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..codegen.host import HostProgram
from ..codegen.host_native import NativeHost, emit_native
from ..codegen.host_text import HostText, print_host
from ..codegen.kernel import EmitError
from ..runtime.cpu import CpuKernel
from ..runtime.executable import Boxed, load_program
from ..runtime.host_native import NoNativeHost, load_native, program_code, shims, support_code
from ..runtime.kernels import KernelCode, KernelStore, LoadedKernel
from ..runtime.options import Options
from ..runtime.targets import target_for


@dataclass(frozen=True, slots=True)
class HostCode:
    """A host program as Python, and where ``native`` is there, as machine code too."""

    text: HostText
    native: NativeHost | None = None
    code: KernelCode | None = None
    support: KernelCode | None = None

    def load(self, kernels: Mapping[str, LoadedKernel], constants: Mapping[str, Any], name: str) -> Boxed:
        """The function that runs it, over loaded kernels by variable."""
        calls: dict[str, Callable[..., Any]] = {variable: k.call for variable, k in kernels.items()}
        python = partial(load_program, self.text, calls, constants, name)
        if self.native is None or self.code is None or self.support is None:
            return python()
        addresses = {v: k.owner.address for v, k in kernels.items() if isinstance(k.owner, CpuKernel)}
        code, support = self.code.payload, self.support.payload
        return load_native(self.native, code, support, addresses, calls, constants, python, name)

    def record(self) -> dict[str, Any]:
        """What a cache keeps of it, as JSON; machine code is an entry of its own."""
        found = _text_record(self.text)
        if self.native is not None and self.code is not None and self.support is not None:
            found["native"] = {
                "code": self.code.key,
                "support": self.support.key,
                "own": self.native.own,
                "parts": _text_record(self.native.parts),
                "rescues": _text_record(self.native.rescues),
            }
        return found


def host_code(program: HostProgram, options: Options, store: KernelStore) -> HostCode:
    """A program's code as the settings ask for it. Warns where it should be native and cannot be."""
    text = print_host(program)
    if options.host_program == "python":
        return HostCode(text)
    try:
        native = emit_native(program, shims())
    except (EmitError, NoNativeHost) as error:
        if options.host_program == "native":
            warnings.warn(f"torch-mlc: the host program stays Python: {error}", stacklevel=2)
        return HostCode(text)
    target = target_for("cpu", options.target, options.threads)
    return HostCode(text, native, program_code(store, native, target), support_code(store, target))


def stored_host_code(record: Mapping[str, Any], store: KernelStore) -> HostCode | None:
    """The code of a record; None where the cache has lost a part of it."""
    text, native = _text_of(record), record.get("native")
    if native is None:
        return HostCode(text)
    code, support = store.code(native["code"]), store.code(native["support"])
    if code is None or support is None:
        return None
    own = tuple((kind, item) for kind, item in native["own"])
    return HostCode(text, NativeHost("", own, _text_of(native["parts"]), _text_of(native["rescues"])), code, support)


def _text_record(text: HostText) -> dict[str, Any]:
    return {"text": text.text, "ops": dict(text.ops), "constants": dict(text.constants)}


def _text_of(record: Mapping[str, Any]) -> HostText:
    return HostText(record["text"], record["ops"], record["constants"])
