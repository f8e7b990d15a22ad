"""Native host programs in this process: what they are given of Python and torch, and how they become functions.

Whether a process can run them is found out once: where torch's C interface is, and where in a Python tensor its
``at::Tensor`` lies, which is looked for and not assumed.
"""

from __future__ import annotations

import ctypes
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from ...codegen.host.native.native import DROP_GUARD, ENTRY, GET_STREAM, MAKE_GUARD, NativeHost
from ...codegen.host.native.shims import Shims
from ...codegen.host.native.support import support_text
from ...codegen.host.native.table import FUNCTIONS, SUPPORT_FUNCTIONS, WORDS
from ...codegen.host.python.text import HostText
from ...ir.errors import DivisionByZeroError, MlcError, OutOfRangeError
from ...ir.expr.dtypes import DType
from ...ir.target import Target
from ..cache.fingerprint import environment_fingerprint, key_of
from ..compile.kernels import KernelCode, KernelStore
from ..counters import counters
from ..cpu import (
    CpuCompileError,
    LoadedObject,
    compile_object,
    function_of_list,
    load_object,
    object_fingerprint,
    symbol_address,
)
from ..model_lines import add_line
from .begun_copies import waited_for
from .executable import Boxed, load_functions


class NoNativeHost(MlcError):
    """This Python or this torch has not what native host programs need."""


@lru_cache(maxsize=2)
def shims(kinds: tuple[str, ...] = ("cpu",)) -> Shims:
    """torch's C interface for some types of devices, as its own headers declare it, as far as the library has it.

    Raises NoNativeHost.
    """
    known = {name: types for kind in kinds for name, types in prototypes(kind).items()}
    for name in (MAKE_GUARD, DROP_GUARD, GET_STREAM) if "cuda" in kinds else ():
        if not _has(name):
            raise NoNativeHost(f"torch {torch.__version__} has no {name}, as where it was built without GPUs")
    return Shims(
        {name: types for name, types in known.items() if _has(name)},
        {d.value: _number(f"aoti_torch_dtype_{d.value}") for d in DType if _has(f"aoti_torch_dtype_{d.value}")},
        {kind: _number(f"aoti_torch_device_type_{kind}") for kind in kinds},
        {kind: f"aoti_torch_{kind}_" for kind in kinds},
    )


def prototypes(kind: str) -> dict[str, tuple[str, ...]]:
    """The C types of the parameters of each function for a type of devices, as torch's header has them.

    Raises NoNativeHost.
    """
    header = Path(torch.__file__).parent / f"include/torch/csrc/inductor/aoti_torch/generated/c_shim_{kind}.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise NoNativeHost(f"torch {torch.__version__} comes without {header.name} ({error})") from error
    found = re.findall(rf"AOTITorchError (aoti_torch_{kind}_\w+)\(([^)]*)\);", text)
    return {
        name: tuple(p.strip().rpartition(" ")[0] for p in parameters.split(",") if p.strip())
        for name, parameters in found
    }


def _has(name: str) -> bool:
    try:
        return bool(symbol_address(name))
    except CpuCompileError:
        return False


def _number(function: str) -> int:
    """What a function of the interface without arguments returns: a constant of torch's."""
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(symbol_address(function))())


@lru_cache(maxsize=1)
def native_process() -> tuple[int, ...]:
    """The first words of every table. Raises NoNativeHost."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NoNativeHost("a Python without a global lock counts references otherwise")
    if sys.byteorder != "little":
        raise NoNativeHost("native host programs are for little-endian machines")
    objects = {
        "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "NotImplemented": NotImplemented, "None": None,
        "OutOfRangeError": OutOfRangeError, "DivisionByZeroError": DivisionByZeroError, "TypeError": TypeError,
    }  # fmt: skip
    offset = _offset()
    words = [offset if name == "offset" else id(objects[name]) for name in WORDS]
    try:
        words += [symbol_address(name) for name in FUNCTIONS]
    except CpuCompileError as error:
        raise NoNativeHost(str(error)) from error
    return tuple(words)


@lru_cache(maxsize=1)
def _support(code: bytes) -> LoadedObject:
    return load_object(code, SUPPORT_FUNCTIONS)


def support_code(store: KernelStore, target: Target) -> KernelCode:
    """Machine code of what every program calls; compiled where the store has none."""
    return _compiled(store, support_text(), target, "what native host programs call")


def program_code(store: KernelStore, native: NativeHost, target: Target) -> KernelCode:
    """Machine code of a program; compiled where the store has none. Raises CpuCompileError."""
    return _compiled(store, native.text, target, "a native host program", quick=True)


def _compiled(store: KernelStore, text: str, target: Target, description: str, *, quick: bool = False) -> KernelCode:
    key = key_of([environment_fingerprint(), object_fingerprint(target), text])
    code = store.code(key)
    if code is None:
        code = KernelCode(key, ENTRY, "host", (), compile_object([text], target, quick=quick))
        store.keep(code, description)
    return code


def _offset() -> int:
    """Where in the object of a tensor its ``at::Tensor`` lies, in bytes. Raises NoNativeHost."""
    examples = [torch.empty(2), torch.empty(3, 2).t(), torch.nn.Parameter(torch.empty(1))]
    for offset in range(16, min(type(e).__basicsize__ for e in examples), 8):
        if all(ctypes.c_uint64.from_address(id(e) + offset).value == e._cdata for e in examples):
            return offset
    raise NoNativeHost(f"torch {torch.__version__} keeps tensors elsewhere than it used to")


def load_native(
    native: NativeHost,
    code: bytes,
    support: bytes,
    addresses: Mapping[str, int],
    kernels: Mapping[str, Callable[..., Any]],
    constants: Mapping[str, Any],
    python: Callable[[], Boxed],
    name: str,
    find: Callable[[str], int] = symbol_address,
) -> Boxed:
    """The function of a program: takes the list of arguments, clears it, returns a tuple.

    ``addresses`` are those of the kernels, or of their records, by variable, ``kernels`` what Python calls where there
    is no address, or where launching fails, ``constants`` objects by name; ``python`` loads the same program as Python,
    for arguments that are no plain tensors; ``find`` gives the address of a function of torch's. Raises NoNativeHost,
    CpuCompileError and RuntimeFailure.
    """
    process, helpers = native_process(), _support(support)
    counters.add("native_programs")
    parts = load_functions(native.parts, constants, name, kernels)
    rescues = _Rescues(native.rescues, constants, name, kernels)
    failed = ctypes.c_int64(-1)
    kept: list[Any] = [helpers, failed]
    words = [*process, *(helpers.addresses[f] for f in SUPPORT_FUNCTIONS)]
    for kind, item in native.own:
        match kind:
            case "kernel" | "record":
                words.append(addresses[item])
            case "function":
                words.append(find(item))
            case "part":
                kept.append(parts[item])
                words.append(id(kept[-1]))
            case "launch":
                words.append(ctypes.addressof(failed))
            case "rescue":
                kept.append(rescues.function(item))
                words.append(id(kept[-1]))
    table = (ctypes.c_uint64 * len(words))(*words)
    loaded = load_object(code, [ENTRY])
    run = function_of_list(loaded.addresses[ENTRY], ctypes.addressof(table), (loaded, table, kept))
    run = waited_for(run, tuple(native.parts.ops.values()))
    whole = cache(python)

    def call(args: list[Any]) -> Any:
        try:
            results = run(args)
        except (OutOfRangeError, DivisionByZeroError) as error:
            number, failed.value = failed.value, -1
            if number >= 0:  # else it is Python that raised it
                add_line(error, native.launches[number])
            raise
        if results is NotImplemented:
            counters.add("native_refusals")
            return whole()(args)
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = f"mlc_{name}"
    return call


@dataclass(slots=True)
class _Rescues:
    """Functions that are compiled when the first of them is called, and stay."""

    text: HostText
    constants: Mapping[str, Any] = field(repr=False)
    name: str
    kernels: Mapping[str, Callable[..., Any]] = field(repr=False)
    functions: Mapping[str, Callable[..., Any]] | None = field(default=None, repr=False)

    def function(self, item: str) -> Callable[..., Any]:
        def rescue(*args: Any) -> Any:
            if self.functions is None:
                self.functions = load_functions(self.text, self.constants, self.name, self.kernels)
            return self.functions[item](*args)

        return rescue
