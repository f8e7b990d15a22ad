"""The texts that one compilation makes, taken where they would go to an assembler."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import torch_mlc
from torch_mlc.codegen.host.native.native import NativeHost
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.target import Target
from torch_mlc.runtime.compile.kernels import KernelCode, KernelStore, compile_source
from torch_mlc.runtime.host.native import program_code, support_code

from ..run_models import TRAINING
from .corpus import Case

# Threads that CPU kernels are split over, wherever this runs.
THREADS = 8
# The name of the text of what could not be compiled: its error.
FAILED = "failed"
_ERROR = 300
_SUFFIX = {"llvm": ("ll", ";"), "triton": ("py", "#")}
# What differs from run to run, or says where a step comes from and not what it does: numbers of graphs (Dynamo's and
# AOTAutograd's), places in files and among a graph's nodes, addresses.
_NUMBERED = re.compile(r"\bmodel__\d+_(\w+?)_\d+\b")
_PLACE = re.compile(r"(?:[^\s\"'()]*/)?([^\s\"'()/]+\.py):\d+")
_NODES = re.compile(r"@mlc(\[[\d,]+\]|\([\d,]+\))")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_FOLDER = re.compile(r"[^\w.,=+-]+")


class TextsError(RuntimeError):
    """What is compiled no longer passes where texts are taken."""


@dataclass(slots=True)
class Taken:
    """The texts of one case by their names, in the order in which they were made; equal ones once."""

    texts: dict[str, str] = field(default_factory=dict)
    # The kernels among them, as they were emitted.
    emitted: set[str] = field(default_factory=set)

    def add(self, name: str, suffix: str, text: str) -> None:
        """Others of the same name are numbered."""
        number = 1
        while (place := f"{name}{f'-{number}' if number > 1 else ''}.{suffix}") in self.texts:
            if self.texts[place] == text:
                return
            number += 1
        self.texts[place] = text

    # --- in place of what makes machine code ---

    def kernel(self, source: KernelSource, target: Target, key: str, *_: Any) -> KernelCode:
        suffix, comment = _SUFFIX[source.language]
        head = "".join(f"{comment} {line}\n" for line in _facts(source))
        self.add(source.name, suffix, head + source.text)
        self.emitted.add(source.text)
        # Nothing asks code of this language what it takes of a GPU.
        return KernelCode(key, source.name, "llvm", source.symbols, b"")

    def host(self, store: KernelStore, native: NativeHost, target: Target) -> KernelCode:
        told = (native.parts.text, native.rescues.text, "\n".join(native.launches), "\n".join(map(str, native.own)))
        self.add("host native", "ll", normal("\n".join([native.text, *told]) + "\n"))
        return KernelCode("", "host", "host", (), b"")

    def support(self, store: KernelStore, target: Target) -> KernelCode:
        return KernelCode("", "support", "host", (), b"")


def _facts(source: KernelSource) -> list[str]:
    """What a kernel is compiled and launched with beside its text."""
    arrays = [
        f"{b.name}: {b.dtype.value} ({', '.join(map(str, b.shape))}), strides ({', '.join(map(str, b.strides))}), "
        f"aligned to {b.align}"
        for b in source.params
    ]
    launch = f"symbols ({', '.join(source.symbols)}), grid ({', '.join(map(str, source.grid))}), reach {source.reach}"
    return [*arrays, launch, ", ".join(f"{k}={v}" for k, v in source.meta)]


def normal(text: str) -> str:
    """A host program without what differs from run to run and from checkout to checkout."""
    for found, instead in ((_NUMBERED, r"\1"), (_PLACE, r"\1"), (_NODES, "@mlc"), (_ADDRESS, "at an address")):
        text = found.sub(instead, text)
    return text


def _told(error: str) -> str:
    return normal(" ".join(error.split()))[:_ERROR] + "\n"


def folder_of(case: Case, mode: str) -> str:
    """Where the texts of a case lie: suite, workload, target and mode."""
    suite, _, name = case.name.partition("/")
    return "/".join(_FOLDER.sub("_", part) for part in (suite, name, case.target, mode))


def texts_of(case: Case, mode: str) -> dict[str, str]:
    """The texts of a case by place. What cannot be compiled has its error as a text.

    Raises: TextsError where a kernel was compiled whose text did not pass here.
    """
    taken = Taken()
    try:
        _take(case, mode, taken)
    except TextsError:
        raise
    except Exception as error:  # one workload must not hide the others
        taken.add(FAILED, "txt", _told(f"{type(error).__name__}: {error}"))
    folder = folder_of(case, mode)
    return {f"{folder}/{name}": text for name, text in taken.texts.items()}


def _take(case: Case, mode: str, taken: Taken) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = case.make(mode)
    with tempfile.TemporaryDirectory() as cache, _by_settings_of_none(), _in_place_of_assemblers(taken):
        report = torch_mlc.explain(
            made.function,
            *made.inputs,
            training=mode == TRAINING,
            target=None if case.target == "cpu" else case.target,
            options={
                "cache": False,
                "cache_dir": cache,
                "compile_workers": 0,
                "threads": THREADS,
                "host_program": "native" if case.target == "cpu" else "auto",
            },
        )
    for graph in report.graphs:
        # Which kernel is k0_, k1_, … of the program is nowhere in its text.
        kernels = "".join(f"# {k.name}\n" for k in graph.kernels)
        taken.add(f"host {graph.name}", "py", kernels + normal(graph.program))
        for kernel in graph.kernels:
            if kernel.error:
                taken.add(f"{kernel.name} {FAILED}", "txt", _told(kernel.error))
            elif kernel.source not in taken.emitted:
                raise TextsError(
                    f"{case.name}: {kernel.name} was compiled, but not by {compile_source.__name__}, in whose place "
                    "texts are taken (benchmarks/kernel_texts/taking.py)"
                )


@contextlib.contextmanager
def _by_settings_of_none() -> Iterator[None]:
    """Whoever runs this may have settings of their own, which are not the code's."""
    with mock.patch.dict(os.environ):
        for name in [n for n in os.environ if n.startswith(("MLC_", "TORCH_MLC_"))]:
            del os.environ[name]
        yield


@contextlib.contextmanager
def _in_place_of_assemblers(taken: Taken) -> Iterator[None]:
    """What makes machine code is replaced in all modules that import it, wherever those are."""
    assert torch_mlc.explain  # which loads them
    replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (compile_source, taken.kernel),
        (program_code, taken.host),
        (support_code, taken.support),
    ]
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("torch_mlc."):
                continue
            for made, instead in replaced:
                if module.__name__ != made.__module__ and getattr(module, made.__name__, None) is made:
                    stack.enter_context(mock.patch.object(module, made.__name__, instead))
        yield
