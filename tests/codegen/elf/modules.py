"""LLVM IR as objects of x86-64 and AArch64, and shared objects as functions of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from torch_mlc.codegen.elf.format import ObjectFile
from torch_mlc.codegen.elf.read import read_object

TRIPLES = {"x86-64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


def emitted(text: str, machine: str = "x86-64", *, reloc: str = "pic", level: int = 2) -> bytes:
    """A relocatable object of a module of LLVM IR."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(text, llvm.create_context())
    kind = llvm.Target.from_triple(TRIPLES[machine])
    host = kind.create_target_machine(cpu="", opt=level, reloc=reloc, codemodel="small")
    module.triple, module.data_layout = TRIPLES[machine], str(host.target_data)
    data: bytes = host.emit_object(module)
    return data


def objects(texts: Sequence[str], machine: str = "x86-64", **options: Any) -> list[ObjectFile]:
    return [read_object(emitted(t, machine, **options), f"module {k}") for k, t in enumerate(texts)]


def loaded(data: bytes, folder: Path) -> ctypes.CDLL:
    # A file that is mapped must not be written to.
    path = folder / f"{len(list(folder.iterdir()))}.so"
    path.write_bytes(data)
    return ctypes.CDLL(str(path))
