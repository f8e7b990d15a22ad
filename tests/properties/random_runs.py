"""Runs of scheduled nests: by the oracle in every order, as machine code many at a time, as interpreted Triton."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from random_programs import Program, arguments, compare

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.nest.loops import AxisKind, Loop, LoopKind, LoopNest, Node, blocks, map_nodes
from torch_mlc.ir.oracle.oracle import poison, run_nest, size
from torch_mlc.runtime.cpu import CpuKernel

Array: TypeAlias = "np.ndarray[Any, Any]"
INTERPRETER = Path(__file__).parents[1] / "codegen" / "triton" / "interpreter.py"
# What Triton's interpreter (3.x) says of scalars of type int1 that compiled Triton takes.
INTERPRETER_FAULTS = (
    "mask has unsupported dtype",
    "ufunc 'bitwise_and' not supported",
    "ufunc 'bitwise_or' not supported",
)
# Elements around and between what a kernel may write: they have to keep their poison.
MARGIN = 16


def expected(program: Program) -> list[dict[str, Array]]:
    """What the program computes, at each of its sizes."""
    return [run_nest(program.nest, arguments(program, sizes), sizes) for sizes in program.sizes]


def shuffled(nest: LoopNest) -> LoopNest:
    """Lanes and tile axes that carry no reduction as loops that the oracle may run backwards."""
    carried = {
        s
        for b, _ in blocks(nest)
        for a, e in zip(b.axes, b.bindings, strict=True)
        if a.kind is not AxisKind.SPATIAL
        for s in e.free_symbols
    }

    def visit(node: Node) -> Node | None:
        together = (LoopKind.VECTORIZED, LoopKind.THREAD_X)
        if isinstance(node, Loop) and node.kind in together and node.var not in carried:
            return replace(node, kind=LoopKind.PARALLEL)
        return None

    return replace(nest, body=map_nodes(nest.body, visit))


def check_oracle(program: Program, nest: LoopNest, wanted: Sequence[Mapping[str, Array]]) -> None:
    """The nest computes what the program does, whichever way what runs side by side is run."""
    for sizes, want in zip(program.sizes, wanted, strict=True):
        inputs = arguments(program, sizes)
        compare(nest, run_nest(nest, inputs, sizes), want)
        compare(nest, run_nest(shuffled(nest), inputs, sizes, backward=True), want)


# --- machine code -----------------------------------------------------------------------------------------------------


def check_compiled(program: Program, kernel: CpuKernel, wanted: Sequence[Mapping[str, Array]]) -> None:
    """Compiled code computes what the program does, and writes nothing but its outputs."""
    nest = program.nest
    for sizes, want in zip(program.sizes, wanted, strict=True):
        inputs = arguments(program, sizes)
        storage: dict[str, Array] = {}
        views: dict[str, Array] = {}
        for b in nest.params:
            shape = tuple(size(e, sizes) for e in b.shape)
            strides = tuple(size(e, sizes) for e in b.strides)
            flat, view = _laid_out(shape, strides, b.dtype)
            if b.name in inputs:
                view[...] = inputs[b.name].view(view.dtype) if inputs[b.name].dtype != np.bool_ else inputs[b.name]
            storage[b.name], views[b.name] = flat, view
        before = {name: flat.copy() for name, flat in storage.items()}
        arguments_ = [storage[b.name][MARGIN:].ctypes.data for b in nest.params]
        kernel(*arguments_, *(sizes[s.name] for s in nest.symbols.symbols))
        found = {o: views[o].copy().view(nest.buffer(o).dtype.numpy) for o in nest.outputs}
        for name, flat in storage.items():
            if name in nest.outputs:
                views[name][...] = _laid_out(views[name].shape, (0,) * views[name].ndim, nest.buffer(name).dtype)[1]
            assert np.array_equal(flat, before[name]), f"{name}: something beside its elements was written"
        compare(nest, found, want)


def _laid_out(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    """Poisoned storage of raw words with a margin on both sides, and the elements in it."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    filled = poison((span + 2 * MARGIN,), dtype)
    # NumPy strides no types but its own, and bytes compare where NaNs do not.
    flat = filled if filled.dtype == np.bool_ else filled.view(f"u{filled.itemsize}")
    steps = tuple(s * flat.itemsize for s in strides)
    return flat, np.lib.stride_tricks.as_strided(flat[MARGIN:], shape, steps)


# --- Triton -----------------------------------------------------------------------------------------------------------


class InterpreterFault(Exception):
    """Triton's interpreter cannot run a kernel that its compiler takes."""


class Interpreter:
    """Runs Triton sources in a process of their own, in which Triton interprets."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(INTERPRETER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def check(self, program: Program, source: KernelSource, wanted: Sequence[Mapping[str, Array]]) -> None:
        """The source computes what the program does."""
        for sizes, want in zip(program.sizes, wanted, strict=True):
            compare(program.nest, self.run(program, source, sizes), want)

    def run(self, program: Program, source: KernelSource, sizes: Mapping[str, int]) -> dict[str, Array]:
        nest, inputs = program.nest, arguments(program, sizes)
        names = [b.name for b in source.params]
        params = []
        for b in source.params:
            shape, strides = (tuple(size(e, sizes) for e in x) for x in (b.shape, b.strides))
            array = inputs[b.name] if b.name in inputs else poison(shape, b.dtype)
            params.append((array, strides, b.dtype.value))
        job = {
            "source": source, "grid": [size(g, sizes) for g in source.grid],
            "sizes": [sizes[s] for s in source.symbols], "params": params,
            "outputs": [names.index(o) for o in nest.outputs],
        }  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()
        kind, answer = pickle.load(self.process.stdout)
        if kind == "error" and any(text in answer for text in INTERPRETER_FAULTS):
            raise InterpreterFault(answer)
        assert kind == "ok", answer
        return dict(zip(nest.outputs, answer, strict=True))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
