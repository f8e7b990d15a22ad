"""Write a model as a folder that any program can open: shared object, object, header, weights, texts of kernels.

No compiler, assembler or linker is called: LLVM emits objects, and ``codegen/elf`` links them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...codegen.elf.format import ObjectFile
from ...codegen.elf.link import link_shared
from ...codegen.elf.merge import merge_objects
from ...codegen.elf.read import read_object, renamed
from ...codegen.export.header import header_text
from ...codegen.export.library import ExportedFunction, ExportedModel
from ...codegen.export.platform import platform_of
from ...codegen.export.processor import compiled_for
from ...codegen.export.runtime import IMPORTS, PlacedWeights, needed_by, runtime_text, shown_by, variant_symbol
from ...codegen.export.tables import host_symbol
from ...codegen.export.weights import HASH_DATA
from ...codegen.kernel import KernelSource
from ...ir.target import Target
from ..cpu import compile_object, load_text
from .safetensors import plan_weights


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """The objects of a library, before they are linked, and what it shows and needs."""

    exported: Sequence[str]
    needed: Sequence[str]
    objects: tuple[ObjectFile, ...]

    def shared(self) -> bytes:
        """``model.so``. Raises: ElfError for what no library has that it may use."""
        return link_shared(self.objects, self.exported, IMPORTS, self.needed)

    def relocatable(self) -> bytes:
        """``model.o``, of which the rest of a program sees the same names."""
        return merge_objects(self.objects, self.exported, IMPORTS)


def write_library(model: ExportedModel, weights: Mapping[str, np.ndarray[Any, Any]], folder: Path) -> None:
    """Write ``model.so``, ``model.o``, ``model.h``, ``model.safetensors`` and ``kernels/`` to a folder.

    ``weights`` has an array for each weight of the model, of its shape and type and with any strides. Equal models give
    equal bytes. Raises: EmitError, ElfError, WeightError or CpuCompileError where the model cannot be a library; the
    text says what of it.
    """
    plan = plan_weights(model.weights)
    with _folder(folder), _replaced(folder / "model.safetensors") as path:
        plan.write(path, weights)
        compiled = compile_library(model, plan.placed, data_hash(path, plan.placed))
        files = {
            "model.so": compiled.shared(),
            "model.o": compiled.relocatable(),
            "model.h": header_text(model).encode(),
            **{f"kernels/{name}": text.encode() for name, text in _texts(model).items()},
        }
    texts = folder / "kernels"
    texts.mkdir(exist_ok=True)
    for old in (*texts.glob("*.ll"), *texts.glob("*.py")):
        old.unlink()
    for name, data in files.items():
        with _replaced(folder / name) as path:
            path.write_bytes(data)


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """A folder, which is made where it is not there, and taken away again where that was for nothing."""
    there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not there and not any(folder.iterdir()):
            folder.rmdir()
        raise


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A file that takes the place of ``path`` when it is whole: processes that have mapped the old one keep that."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _texts(model: ExportedModel) -> dict[str, str]:
    """The texts of kernels, by the names of their files."""
    texts = {f"{k.name}.ll": k.text for k in model.kernels}
    return texts | {f"{k.name}.{v.target.arch}.py": k.source.text for v in model.gpus for k in v.kernels}


def data_hash(path: Path, placed: PlacedWeights) -> int:
    """The hash by which a library knows the data of its weights, of a file of them: 64 bits."""
    if not placed.data_bytes:
        return _hash_data()(0, 0) & _ALL
    mapped = np.memmap(path, np.uint8, mode="r", offset=placed.first, shape=(placed.data_bytes,))
    return _hash_data()(mapped.ctypes.data, placed.data_bytes) & _ALL


_ALL = (1 << 64) - 1


@lru_cache(maxsize=1)
def _hash_data() -> Callable[[int, int], int]:
    """The library's own code for it."""
    code = load_text(HASH_DATA, ["hash_data"])
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(code.addresses["hash_data"])
    function.code = code  # type: ignore[attr-defined]
    return function


def compile_library(model: ExportedModel, placed: PlacedWeights, data_hash: int | None = None) -> CompiledLibrary:
    """Compile all that the library is made of. With a ``data_hash`` it can tell other data of weights."""
    triple = platform_of(model.machine).triple
    text = runtime_text(model, placed, data_hash)
    least = _compiled(model.target, model.machine)
    # Before anything else this code looks whether the processor has what the rest needs: it runs on all.
    any_processor = replace(least, arch="x86-64" if model.machine == "x86-64" else "generic", features="")
    objects = [read_object(compile_object([text], any_processor, triple=triple), "the library's own code")]
    objects += [_host(model, f, least, triple) for f in model.functions]
    sets = [(v.target, v.kernels) for v in model.variants] + [(model.target, model.kernels)]
    for number, (target, kernels) in enumerate(sets):
        if kernels:
            objects.append(_kernels(kernels, _compiled(target, model.machine), triple, number, bool(model.variants)))
    return CompiledLibrary(shown_by(model), needed_by(model), tuple(objects))


def _host(model: ExportedModel, f: ExportedFunction, target: Target, triple: str) -> ObjectFile:
    """The host program of a function: long code that calls other code, compiled as it stands."""
    data = compile_object([f.text], target, quick=True, triple=triple)
    return renamed(read_object(data, f"the host program of {f.name}"), {f.entry: host_symbol(model, f)})


def _kernels(kernels: Sequence[KernelSource], target: Target, triple: str, number: int, several: bool) -> ObjectFile:
    data = compile_object([k.text for k in kernels], target, triple=triple)
    name = f"the kernels for {target.arch} ({', '.join(k.name for k in kernels)})"
    names = {k.name: variant_symbol(k.name, number) if several else k.name for k in kernels}
    return renamed(read_object(data, name), names)


def _compiled(target: Target, machine: str) -> Target:
    """The target as LLVM is given it: with nothing that the library does not ask the processor for."""
    arch, features = compiled_for(target, machine)
    return replace(target, arch=arch, features=features)
