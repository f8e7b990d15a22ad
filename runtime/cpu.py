"""LLVM IR to machine code in this process: compile to an object, load it, call it.

Nothing here needs a C compiler or a file. An object is bytes that any process with the same processor may load;
symbols are found in the libraries that torch itself has loaded, so that there is one OpenMP runtime and one set of
threads.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import torch

from ..codegen.host.native.objects import NUMBERS, OUTSIDE
from ..codegen.kernel import KernelSource
from ..ir.errors import DivisionByZeroError, MlcError, OutOfRangeError
from ..ir.target import Target

_LOG = logging.getLogger(__name__)
# Called with one integer for each pointer and size.
NativeCall = Callable[..., None]


class CpuCompileError(MlcError):
    """LLVM refused a kernel, or a symbol that it calls is nowhere."""


def object_fingerprint(target: Target) -> str:
    """What an object depends on besides its source: processor, features and the version of LLVM."""
    version = ".".join(map(str, llvm.llvm_version_info))
    return f"{target.arch};{_flags(target)};llvm {version};llvmlite {llvmlite.__version__};pipeline {_PIPELINE}"


def _flags(target: Target) -> str:
    """The features that code may use, and how LLVM is to use them."""
    return f"{target.features}{_LANES_ALONE if target.machine.lanes_alone else ''}"


_LANES_ALONE = ",+prefer-no-gather,+prefer-no-scatter"
# Changes when the passes below do.
_PIPELINE = 1


class _Machines(threading.local):
    """Target machines of one thread: they are not for two threads at once."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str, int, str], Any] = {}

    def of(self, target: Target, level: int, triple: str = "") -> Any:
        flags = _flags(target)
        key = (target.arch, flags, level, triple)
        if key not in self.known:
            if triple:
                llvm.initialize_all_targets()
                llvm.initialize_all_asmprinters()
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            llvm.initialize_native_asmparser()
            kind = llvm.Target.from_triple(triple or llvm.get_process_triple())
            self.known[key] = kind.create_target_machine(
                cpu=target.arch, features=flags, opt=level, reloc="pic", codemodel="small"
            )
        return self.known[key]


_MACHINES = _Machines()


def compile_object(texts: Sequence[str], target: Target, *, quick: bool = False, triple: str = "") -> bytes:
    """One relocatable object of modules of LLVM IR; threads may compile at the same time.

    ``quick`` is for long code that only calls other code: it is compiled as it stands, in a tenth of the time.
    ``triple`` names another system than this process's. Raises: CpuCompileError with LLVM's own words.
    """
    machine = _MACHINES.of(target, 0 if quick else 2, triple)
    context = llvm.create_context()
    try:
        module = llvm.parse_assembly(texts[0], context)
        for text in texts[1:]:
            module.link_in(llvm.parse_assembly(text, context))
    except RuntimeError as error:
        raise CpuCompileError(f"LLVM cannot parse a kernel: {error}") from error
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    if not quick:
        _optimise(module, machine)
    data: bytes = machine.emit_object(module)
    return data


def _optimise(module: Any, machine: Any) -> None:
    """Slots to registers and a cleaning: the emitter itself shares subexpressions and hoists invariants."""
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)


@dataclass(frozen=True, slots=True)
class LoadedObject:
    """Code in memory; it stays as long as this object lives."""

    addresses: dict[str, int]
    tracker: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """A kernel that is ready to run: ``kernel(pointer, …, size, …)``, with the GIL released while it runs.

    ``address`` is its native entry, ``void (int64_t *arguments)``; where indices that data give are checked, or
    divisors, four numbers behind the arguments, the first of them zero, tell of a wrong one. The call then raises
    OutOfRangeError or DivisionByZeroError, and what the kernel has written is worth nothing.
    """

    name: str
    address: int
    call: NativeCall = field(repr=False)
    owner: LoadedObject = field(repr=False)

    def __call__(self, *arguments: int) -> None:
        self.call(*arguments)


_COUNTER = itertools.count()
_LOAD_LOCK = threading.Lock()


@lru_cache(maxsize=1)
def _jit() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # The older of the two linkers gives each section memory of its own, wherever there is room, and ends the process
    # where code does not reach from one to the other. On Windows it is the only one.
    return llvm.create_lljit_compiler(use_jit_link=sys.platform != "win32")


def load_object(data: bytes, names: Iterable[str]) -> LoadedObject:
    """Load an object and find the functions ``names`` in it.

    Raises: CpuCompileError where it calls something that no library of this process has.
    """
    wanted = list(names)
    library = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
    for symbol in sorted({m.decode() for m in _OUTSIDE.findall(data)}):
        library.import_symbol(symbol, symbol_address(symbol))
    return _link(library, wanted)


def _link(library: Any, wanted: Sequence[str]) -> LoadedObject:
    for name in wanted:
        library.export_symbol(name)
    with _LOAD_LOCK:
        try:
            tracker = library.link(_jit(), f"mlc{next(_COUNTER)}")
        except RuntimeError as error:
            raise CpuCompileError(f"cannot load the kernels {', '.join(wanted)}: {error}") from error
    return LoadedObject({name: tracker[name] for name in wanted}, tracker)


def compile_kernels(sources: Sequence[KernelSource], target: Target) -> bytes:
    """One object with all the kernels; their names must differ."""
    return compile_object([s.text for s in sources], target)


def load_kernels(data: bytes, names: Sequence[str]) -> dict[str, CpuKernel]:
    """The kernels of an object, ready to call."""
    loaded = load_object(data, names)
    return {n: CpuKernel(n, a, native_call(a, loaded), loaded) for n, a in loaded.addresses.items()}


def load_kernel(source: KernelSource, target: Target) -> CpuKernel:
    """Compile and load one kernel."""
    return load_kernels(compile_kernels([source], target), [source.name])[source.name]


# --- symbols ----------------------------------------------------------------------------------------------------------

# What the code calls that lies in torch's libraries; the C library's functions are found by the loader itself.
_OUTSIDE = re.compile(rb"(?<=\x00)_?((?:Sleef_|GOMP_|omp_|PyLong_|sgemm_)[A-Za-z0-9_]*)(?=\x00)")


@lru_cache(maxsize=1)
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """torch's libraries, found again by the names under which they are loaded."""
    folder = Path(torch.__file__).parent / "lib"
    patterns = ("libtorch_cpu.*", "libtorch_cuda.*", "libtorch_hip.*", "libtorch_python.*", "libgomp*", "libomp*",
                "libiomp5*")  # fmt: skip
    names = [str(path) for pattern in patterns for path in sorted(folder.glob(pattern))]
    found = []
    for name in names:
        try:
            found.append(ctypes.CDLL(name, mode=getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_LAZY", 0)))
        except OSError:
            continue  # not one that torch has loaded
    return tuple(found)


@cache
def symbol_address(name: str) -> int:
    """Where a function of torch's libraries is; ``GOMP_parallel`` has a stand-in that runs a team of one.

    Raises: CpuCompileError where no library has it.
    """
    for library in (*_libraries(), ctypes.CDLL(None)):
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError:
            continue
    if name in _TEAM_OF_ONE:
        _LOG.warning("torch's OpenMP runtime has no %s: kernels run on one thread", name)
        return _stand_ins().addresses[name]
    raise CpuCompileError(f"no library of this process has {name}; torch {torch.__version__} was expected to")


_TEAM_OF_ONE = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_SERIAL = """
define void @GOMP_parallel(ptr %f, ptr %data, i32 %threads, i32 %flags) {
  call void %f(ptr %data)
  ret void
}
define i32 @omp_get_thread_num() {
  ret i32 0
}
define i32 @omp_get_num_threads() {
  ret i32 1
}
"""


@lru_cache(maxsize=1)
def _stand_ins() -> LoadedObject:
    return _link(llvm.JITLibraryBuilder().add_ir(_SERIAL), _TEAM_OF_ONE)


# --- calls from Python ------------------------------------------------------------------------------------------------

# A C function for Python (METH_FASTCALL): its "self" is the address of a kernel, its arguments go into one array of
# int64. Behind them is room for what a kernel has to say of an index that is out of range
# (codegen/llvm/memory/scatter.py).
_TRAMPOLINE = """
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare ptr @PyErr_Format(ptr, ptr, ...)
@_Py_NoneStruct = external global i8
@mlc_out_of_range_error = external global i8
@mlc_division_error = external global i8

define ptr @mlc_call(ptr %self, ptr %arguments, i64 %count) {
entry:
  %kernel = call ptr @PyLong_AsVoidPtr(ptr %self)
  %size = add i64 %count, 4
  %array = alloca i64, i64 %size, align 16
  %status = getelementptr inbounds i64, ptr %array, i64 %count
  store i64 0, ptr %status
  %failed = call i1 @numbers_of(ptr %arguments, i64 %count, ptr %array)
  br i1 %failed, label %fail, label %run
run:
  %thread = call ptr @PyEval_SaveThread()
  call void %kernel(ptr %array)
  call void @PyEval_RestoreThread(ptr %thread)
  %flag = load i64, ptr %status
  %fine = icmp eq i64 %flag, 0
  br i1 %fine, label %done, label %outside
outside:
  call void @raise_outside(ptr @PyErr_Format, ptr @mlc_out_of_range_error, ptr @mlc_division_error, ptr %status)
  br label %fail
done:
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
fail:
  ret ptr null
}
"""
_METH_FASTCALL, _METH_O = 0x0080, 0x0008


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("method", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def load_text(text: str, names: Sequence[str], symbols: Mapping[str, int] | None = None) -> LoadedObject:
    """Compile and load LLVM IR that calls functions of Python's; ``symbols`` are addresses of others."""
    library = llvm.JITLibraryBuilder().add_ir(text)
    for name in re.findall(r"^(?:declare .*|)@(_?Py\w+)(?:\(| =)", text, re.MULTILINE):
        library.import_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0)
    for name, address in (symbols or {}).items():
        library.import_symbol(name, address)
    return _link(library, names)


@lru_cache(maxsize=1)
def _trampoline() -> tuple[_MethodDef, LoadedObject]:
    # An exception's class is where its object is, and lives as long as its module.
    errors = {"mlc_out_of_range_error": id(OutOfRangeError), "mlc_division_error": id(DivisionByZeroError)}
    loaded = load_text(_TRAMPOLINE + NUMBERS + OUTSIDE, ["mlc_call"], errors)
    return _MethodDef(b"mlc_kernel", loaded.addresses["mlc_call"], _METH_FASTCALL, None), loaded


def native_call(address: int, owner: object = None) -> NativeCall:
    """A Python function of integers that calls ``void (int64_t *arguments)`` with the GIL released.

    It is a C function made here, an order of magnitude cheaper to call than one of ctypes.
    """
    definition, _ = _trampoline()
    return _c_function(definition, address, owner)


def function_of_list(address: int, table: int, owner: object) -> Callable[[list[Any]], Any]:
    """A Python function of one argument that is ``PyObject *(PyObject *self, PyObject *argument)``; its self is the
    address ``table`` as an integer. ``owner`` lives as long as the function."""
    definition = _MethodDef(b"mlc_host", address, _METH_O, None)
    return _c_function(definition, table, (definition, owner))


def fast_function(address: int, first: int, owner: object) -> Callable[..., Any]:
    """A Python function of several arguments that is ``PyObject *(PyObject *self, PyObject **arguments, Py_ssize_t)``;
    its self is the integer ``first``. ``owner`` lives as long as the function."""
    definition = _MethodDef(b"mlc_fast", address, _METH_FASTCALL, None)
    return _c_function(definition, first, (definition, owner))


def _c_function(definition: _MethodDef, first: int, owner: object) -> Callable[..., Any]:
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    # What stands for the function's module lives as long as the function: here the code.
    function: Callable[..., Any] = make(ctypes.addressof(definition), first, owner)
    return function
