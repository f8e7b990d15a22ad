"""Kernels as bytes: compiled for a target, kept by key in memory and on disk, loaded on the machine that runs them."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import sympy

from ...codegen.host.steps.kernel_use import Grid, KernelUse
from ...codegen.kernel import KernelSource
from ...ir.expr.dtypes import DType
from ...ir.nest.loops import Buffer
from ...ir.target import Target
from ...ir.text.parser_expr import index as parse_index
from ...ir.text.printer_expr import index_text
from ..cache.cache import DEFAULT_LIMIT, DiskCache
from ..cache.entry import Entry, decode_entry, encode_entry
from ..cache.remote_cache import CacheLevels, RemoteCache
from ..cpu import compile_kernels, load_kernels
from ..gpu.launch import GpuKernel, takes_addresses
from ..gpu.table import GpuTableKernel
from ..settings.options import Options
from ..triton.compile import GpuBinary, GpuCompileError, RunTriton, SharedMemoryError, compile_triton
from ..triton.triton_stages import run_stages
from .artifacts import note_artifact

KIND_KERNEL, KIND_GRAPH = "kernel", "graph"


@dataclass(frozen=True, slots=True)
class KernelCode:
    """Machine code of one kernel. ``meta`` is plain JSON: what loading and launching need besides the bytes.

    ``symbols`` are the sizes that it takes, by their names in the tensor function.
    """

    key: str
    name: str
    language: str
    symbols: tuple[str, ...]
    payload: bytes = field(repr=False)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """Code that can be called: ``call(pointer, …, size, …)``, on a GPU ``call(tensors, sizes)``; code over a table
    takes the number of rows first. ``owner`` keeps it in memory."""

    call: Callable[..., Any]
    owner: Any = field(repr=False)
    name: str = ""

    @property
    def host_call(self) -> Callable[..., Any]:
        """What host programs call (``KernelUse``): on a GPU ``(device, pointer, …, size, …)``, where code can do with
        addresses."""
        if isinstance(self.owner, GpuTableKernel) or (isinstance(self.owner, GpuKernel) and self.owner.by_address):
            return self.owner.at
        return self.call


def compile_source(
    source: KernelSource, target: Target, key: str, library: str | None = None, run: RunTriton = run_stages
) -> KernelCode:
    """Machine code of an emitted kernel. ``library`` and ``run`` are as for ``compile_triton``.

    Raises CpuCompileError or GpuCompileError; SharedMemoryError where the target has too little of it.
    """
    if source.language == "llvm":
        return KernelCode(key, source.name, "llvm", source.symbols, compile_kernels([source], target))
    try:
        binary = compile_triton(source, target, library=library, run=run)
    except SharedMemoryError:
        raise
    except GpuCompileError:
        if library is None:
            raise
        binary = compile_triton(source, target, run=run)  # Triton's own functions may call what ours has not got
    described = {k: v for k, v in asdict(binary).items() if k not in ("code", "assembly")}
    meta = {
        "binary": described,
        "code": len(binary.code),
        "source": source_to_json(source),
        "target": asdict(target),
    }
    payload = binary.code + binary.assembly.encode()
    return KernelCode(key, source.name, "triton", source.symbols, payload, json.loads(json.dumps(meta)))


def gpu_binary(code: KernelCode) -> GpuBinary:
    """The binary of a kernel in language "triton"."""
    split = code.meta["code"]
    known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in code.meta["binary"].items()}
    return GpuBinary(**known, code=code.payload[:split], assembly=code.payload[split:].decode())


def load_code(code: KernelCode, *, checked: bool = False, early: bool = True) -> LoadedKernel:
    """The kernel, ready to be called on this machine; on a GPU, ``checked`` waits for each launch, and unless ``early``
    none begins before the kernel ahead has ended."""
    if code.language == "llvm":
        kernel = load_kernels(code.payload, [code.name])[code.name]
        return LoadedKernel(kernel.call, kernel, code.name)
    first, target = gpu_binary(code), Target(**code.meta["target"])
    source = source_of_json(code.meta["source"])

    def variant(wanted: KernelSource, target: Target, aligned: tuple[bool, ...]) -> GpuBinary:
        known = aligned == first.aligned and wanted is source
        binary = first if known else compile_triton(wanted, target, aligned)
        return binary if early else replace(binary, dependent=False)

    loaded = (GpuTableKernel if source.option("table") else GpuKernel)(source, target, variant, checked=checked)
    return LoadedKernel(loaded, loaded, code.name)


def kernel_use(code: KernelCode, variable: str, sizes: tuple[int, ...], *, table: bool = False) -> KernelUse:
    """How host programs call a kernel by a variable; ``sizes`` are those of a call that it takes."""
    if code.language == "llvm":
        return KernelUse(variable, sizes, table=table)
    return source_use(source_of_json(code.meta["source"]), variable, sizes, table=table)


def source_use(source: KernelSource, variable: str, sizes: tuple[int, ...], *, table: bool = False) -> KernelUse:
    """How host programs call a kernel whose code is still being made."""
    if source.language == "llvm":
        return KernelUse(variable, sizes, table=table)
    return KernelUse(variable, sizes, takes_addresses(source), table, Grid(source.grid, source.symbols, source.reach))


def source_to_json(source: KernelSource) -> dict[str, Any]:
    """What ``KernelCode.meta`` holds of the source of a GPU kernel."""
    shapes = ";".join(f"[{', '.join(map(index_text, b.shape))}]" for b in source.params)
    return {
        "name": source.name, "text": source.text, "symbols": source.symbols,
        "meta": (*source.meta, ("shapes", shapes)),
        "params": [[b.name, b.dtype.value, b.align] for b in source.params], "grid": [index_text(g) for g in
        source.grid], "reach": None if source.reach is None else index_text(source.reach),
    }  # fmt: skip


def is_made_of(code: KernelCode, source: KernelSource) -> bool:
    """Whether a GPU's code was compiled from a source: its text, and options such as the number of warps."""
    return bool(code.meta["source"] == json.loads(json.dumps(source_to_json(source))))


def source_of_json(data: Mapping[str, Any]) -> KernelSource:
    """What launching and compiling again need; shapes of the parameters are an option, for errors to tell."""
    params = tuple(Buffer(name, (), (), DType(dtype), align=align) for name, dtype, align in data["params"])
    grid = tuple(map(_index_of, data["grid"]))
    meta = tuple((k, v) for k, v in data["meta"])
    reach = None if data["reach"] is None else _index_of(data["reach"])
    return KernelSource(data["name"], "triton", data["text"], params, tuple(data["symbols"]), grid, meta, reach)


def _index_of(text: str) -> sympy.Expr:
    return parse_index(ast.parse(text, mode="eval").body)


class KernelStore:
    """What was compiled before, by key: in this process, and in the ``levels`` of a cache where they are given."""

    def __init__(self, levels: CacheLevels | None) -> None:
        self.levels = levels
        self._codes: dict[str, KernelCode] = {}
        self._loaded: dict[tuple[str, bool, bool], LoadedKernel] = {}
        self._graphs: dict[str, Mapping[str, Any]] = {}
        self._making: dict[tuple[int, str], Future[KernelCode]] = {}
        # By digest of a kernel's text: the key under which it was compiled first.
        self._keys: dict[str, str] = {}

    # --- kernels ----------------------------------------------------------------------------------------------------

    def code(self, key: str) -> KernelCode | None:
        """The code of a kernel compiled before."""
        known = self._codes.get(key)
        if known is None:
            entry = self._read(KIND_KERNEL, key)
            if entry is not None:
                known = self._codes[key] = _code_of(entry)
        return known

    def keep(self, code: KernelCode, description: str) -> None:
        """Remember a kernel, in the cache too."""
        self._codes[code.key] = code
        self._write(_entry_of(code, description))

    def key_of_text(self, digest: str, key: str) -> str:
        """The key under which a text was compiled first in this process; from now on ``key`` where it is new."""
        return self._keys.setdefault(digest, key)

    def load(self, code: KernelCode, *, checked: bool = False, early: bool = True) -> LoadedKernel:
        """The kernel ready to be called; loaded once a process, and once more where launches are ``checked`` or not
        ``early``."""
        gpu = code.language == "triton"
        place = code.key, checked and gpu, early or not gpu
        known = self._loaded.get(place)
        if known is None:
            known = self._loaded[place] = load_code(code, checked=checked, early=early)
        return known

    def shared(self, key: str, begin: Callable[[], Future[KernelCode]]) -> Future[KernelCode]:
        """What another graph, or thread, of this process is making under a key; else what ``begin`` starts.

        It is cancelled, or raises StoppedError, where whoever began it gave up.
        """
        # A fork has no threads that would go on with what its parent had begun.
        place = os.getpid(), key
        ours: Future[KernelCode] = Future()
        found = self._making.setdefault(place, ours)
        if found is not ours:
            return found
        try:
            begun = begin()
        except BaseException:
            ours.cancel()
            del self._making[place]
            raise

        def done(begun: Future[KernelCode]) -> None:
            del self._making[place]
            if begun.cancelled():
                ours.cancel()
            elif (error := begun.exception()) is not None:
                ours.set_exception(error)
            else:
                ours.set_result(begun.result())

        begun.add_done_callback(done)
        return ours

    def replaced(self, key: str) -> None:
        """Forget what is loaded of a kernel that was compiled anew."""
        for checked, early in product((False, True), repeat=2):
            self._loaded.pop((key, checked, early), None)

    # --- graphs -----------------------------------------------------------------------------------------------------

    def graph(self, key: str) -> Mapping[str, Any] | None:
        """The record of a graph compiled before."""
        known = self._graphs.get(key)
        if known is None:
            entry = self._read(KIND_GRAPH, key)
            if entry is not None:
                known = self._graphs[key] = entry.meta
        return known

    def keep_graph(self, key: str, record: Mapping[str, Any], description: str) -> None:
        """Remember a graph, in the cache too."""
        self._graphs[key] = record
        self._write(Entry(KIND_GRAPH, key, record, description=description))

    def graphs(self) -> Iterator[Mapping[str, Any]]:
        """The records of the graphs on disk, the last used first."""
        if self.levels is not None and self.levels.disk is not None:
            for entry in self.levels.disk.read_all(KIND_GRAPH):
                yield entry.meta

    @staticmethod
    def packed(key: str, record: Mapping[str, Any], codes: Iterable[KernelCode]) -> tuple[bytes, ...]:
        """A graph and all code that it needs as entries, each with its hash; ``unpacked`` reads them."""
        graph = Entry(KIND_GRAPH, key, json.loads(json.dumps(record)))
        return tuple(encode_entry(e) for e in (graph, *(_entry_of(code, code.name) for code in codes)))

    @classmethod
    def unpacked(cls, key: str, entries: Sequence[bytes]) -> KernelStore:
        """A store in memory with nothing but what ``packed`` made. Raises DamagedEntry."""
        store = cls(None)
        for k, data in enumerate(entries):
            entry = decode_entry(data, KIND_KERNEL) if k else decode_entry(data, KIND_GRAPH, key)
            if k:
                store._codes[entry.key] = _code_of(entry)
            else:
                store._graphs[key] = entry.meta
        return store

    def amend_graph(self, key: str, changes: Mapping[str, Any], description: str) -> None:
        """Put something else into parts of the record of a graph, where there is one."""
        record = self.graph(key)
        if record is not None:
            self.keep_graph(key, {**record, **changes}, description)

    def lock(self, kind: str, key: str) -> AbstractContextManager[None]:
        """Hold a key against other processes."""
        return nullcontext() if self.levels is None else self.levels.lock(kind, key)

    def forget(self) -> None:
        """Drop what this process remembers; the disk keeps its own."""
        self._codes.clear()
        self._keys.clear()
        self._graphs.clear()
        self._loaded.clear()

    # --- the cache --------------------------------------------------------------------------------------------------

    def _read(self, kind: str, key: str) -> Entry | None:
        entry = self.levels.read(kind, key) if self.levels is not None else None
        if entry is not None:
            note_artifact(entry)
        return entry

    def _write(self, entry: Entry) -> None:
        if self.levels is not None:
            self.levels.write(entry)
            note_artifact(entry)


def _entry_of(code: KernelCode, description: str) -> Entry:
    meta = {"name": code.name, "language": code.language, "symbols": code.symbols, "meta": code.meta}
    return Entry(KIND_KERNEL, code.key, meta, code.payload, description)


def _code_of(entry: Entry) -> KernelCode:
    m = entry.meta
    return KernelCode(entry.key, m["name"], m["language"], tuple(m["symbols"]), entry.payload, m["meta"])


def kernel_store_of(options: Options, *, fresh: bool = False) -> KernelStore:
    """The store that settings ask for; ``fresh`` reads and writes no cache."""
    if fresh or not options.cache:
        return kernel_store(None)
    return kernel_store(options.cache_dir, options.cache_size, options.cache_remote)


@lru_cache(maxsize=8)
def kernel_store(folder: Path | None, limit: int = DEFAULT_LIMIT, remote: str | None = None) -> KernelStore:
    """The store over a cache folder, one a process; without a folder it lives in memory alone."""
    if folder is None:
        return KernelStore(None)
    return KernelStore(CacheLevels(DiskCache(folder, limit), RemoteCache(remote) if remote else None))
