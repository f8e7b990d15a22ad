"""Checks of Triton kernels without a GPU: interpreted against the oracle, and compiled."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch

from torch_mlc.codegen.kernel import KernelSource, wide_source
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import Buffer, LoopNest, blocks
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.runtime.gpu.launch import GpuKernel

pytest.importorskip("triton")
SM90 = gpu_target("cuda:sm_90")
_TOLERANCE = {
    DType.FLOAT32: 2e-6,
    DType.FLOAT64: 1e-12,
    DType.BFLOAT16: 8e-3,
    DType.FLOAT16: 1e-3,
    DType.FLOAT8_E4M3FN: 0,
    DType.FLOAT8_E5M2: 0,
}


class Interpreter:
    """Runs kernel sources in a process of their own."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "interpreter.py"
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def run(
        self, source: KernelSource, outputs: tuple[str, ...], inputs: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> dict[str, np.ndarray]:
        names = [b.name for b in source.params]
        job = {
            "source": source,
            "grid": [number(g, sizes) for g in source.grid],
            "sizes": [sizes[s] for s in source.symbols],
            "params": [_parameter(b, inputs, sizes) for b in source.params],
            "outputs": [names.index(o) for o in outputs],
        }
        return dict(zip(outputs, self.ask(job), strict=True))

    def run_table(
        self,
        source: KernelSource,
        outputs: tuple[str, ...],
        rows: list[dict[str, np.ndarray]],
        sizes: list[dict[str, int]],
    ) -> list[dict[str, np.ndarray]]:
        """A kernel over a table: the outputs of each row."""
        names = [b.name for b in source.params]
        job = {
            "source": source,
            "target": SM90,
            "rows": [[_parameter(b, given, n) for b in source.params] for given, n in zip(rows, sizes, strict=True)],
            "sizes": [n[s] for n in sizes for s in source.symbols],
            "outputs": [names.index(o) for o in outputs],
        }
        return [dict(zip(outputs, answer, strict=True)) for answer in self.ask(job)]

    def ask(self, job: dict) -> list:
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()
        kind, answer = pickle.load(self.process.stdout)
        assert kind == "ok", answer
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def number(expr: sympy.Expr, sizes: dict[str, int]) -> int:
    return int(sympy.sympify(expr).xreplace({s: sympy.Integer(sizes[s.name]) for s in expr.free_symbols}))


def _parameter(buffer: Buffer, inputs: dict[str, np.ndarray], sizes: dict[str, int]) -> tuple:
    shape = tuple(number(e, sizes) for e in buffer.shape)
    array = inputs.get(buffer.name)
    if array is None:
        array = np.zeros(shape, buffer.dtype.numpy)
    return array.view(buffer.dtype.numpy), tuple(number(e, sizes) for e in buffer.strides), buffer.dtype.value


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Values of a type, a NaN or infinity nowhere."""
    if dtype is DType.BOOL:
        return rng.random(shape) < 0.5
    if dtype.is_int:
        return rng.integers(0 if not dtype.is_signed else -20, 20, shape).astype(dtype.numpy)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype.numpy)


def random_input(rng: np.random.Generator, buffer: Buffer, sizes: dict[str, int]) -> np.ndarray:
    """Content of a buffer: along an expanded dimension it is the same."""
    shape = tuple(number(e, sizes) for e in buffer.shape)
    own = tuple(1 if stride == 0 else n for n, stride in zip(shape, buffer.strides, strict=True))
    return np.broadcast_to(random_array(rng, own, buffer.dtype), shape)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    running = Interpreter()
    yield running
    running.close()


@pytest.fixture
def agrees(interpreter: Interpreter) -> Callable[..., KernelSource]:
    """`agrees(nest, sizes, inputs=, tolerance=, target=)`: the kernel for a target, interpreted, gives what the oracle
    gives; returns the source."""

    def check(
        nest: LoopNest,
        sizes: dict[str, int] | None = None,
        inputs: dict[str, np.ndarray] | None = None,
        tolerance: float | None = None,
        target: Target = SM90,
    ) -> KernelSource:
        sizes = sizes or {}
        rng = np.random.default_rng(0)
        given = dict(inputs or {})
        for b in nest.params:
            if b.name not in {*nest.outputs} - _read(nest) and b.name not in given:
                given[b.name] = random_input(rng, b, sizes)
        source = emit_triton(nest, target)
        wanted = run_nest(nest, given, sizes)
        for form in forms(source):
            found = interpreter.run(form, nest.outputs, given, sizes)
            for name in nest.outputs:
                dtype = nest.buffer(name).dtype
                compare(name, found[name].view(dtype.numpy), wanted[name], dtype, tolerance, form.text)
        return source

    return check


def _read(nest: LoopNest) -> set[str]:
    """The buffers that blocks read."""
    return {load.buffer for block, _ in blocks(nest) for load in block.reads}


def forms(source: KernelSource) -> tuple[KernelSource, ...]:
    """A kernel with indices of 32 bits and of 64, where it has both."""
    return (source,) if source.reach is None else (source, wide_source(source))


def compare(
    name: str, found: np.ndarray, wanted: np.ndarray, dtype: DType, tolerance: float | None, text: str = ""
) -> None:
    assert found.shape == wanted.shape, f"{name}: {found.shape} for {wanted.shape}"
    if not dtype.is_float:
        np.testing.assert_array_equal(found, wanted, err_msg=f"{name}\n{text}")
        return
    bound = _TOLERANCE[dtype] if tolerance is None else tolerance
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_allclose(a, b, rtol=bound, atol=bound, err_msg=f"{name}\n{text}")


def present_gpu() -> Target:
    """The target of this machine's first GPU."""
    if torch.version.hip:
        return gpu_target(f"hip:{torch.cuda.get_device_properties(0).gcnArchName.partition(':')[0]}")
    major, minor = torch.cuda.get_device_capability()
    return gpu_target(f"cuda:sm_{major}{minor}")


def to_gpu(array: np.ndarray, strides: tuple[int, ...], dtype: DType) -> torch.Tensor:
    """A tensor of an array's content in memory of the given strides."""
    if dtype is DType.BFLOAT16:
        content = torch.from_numpy(array.view(np.int16).reshape(array.shape)).view(torch.bfloat16)
    else:
        content = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    return torch.empty_strided(array.shape, strides, dtype=dtype.torch, device="cuda").copy_(content)


def from_gpu(tensor: torch.Tensor, dtype: DType) -> np.ndarray:
    host = tensor.cpu()
    if dtype is DType.BFLOAT16:
        return host.contiguous().view(torch.int16).numpy().view(dtype.numpy)
    return host.numpy()


@pytest.fixture
def agrees_on_gpu() -> Callable[..., None]:
    """`agrees_on_gpu(schedule, inputs=, sizes=, tolerance=)`: the kernel of `schedule(target)`, launched on the GPU of
    this machine, gives what the oracle gives."""

    def check(
        schedule: Callable[[Target], LoopNest],
        inputs: dict[str, np.ndarray] | None = None,
        sizes: dict[str, int] | None = None,
        tolerance: float | None = None,
    ) -> None:
        sizes, rng, target = sizes or {}, np.random.default_rng(0), present_gpu()
        nest = schedule(target)
        given = dict(inputs or {})
        for b in nest.params:
            if b.name not in {*nest.outputs} - _read(nest) and b.name not in given:
                given[b.name] = random_input(rng, b, sizes)
        source = emit_triton(nest, target)
        tensors = {b.name: to_gpu(*_parameter(b, given, sizes)[:2], b.dtype) for b in source.params}
        GpuKernel(source, target)(list(tensors.values()), [sizes[s] for s in source.symbols])
        wanted = run_nest(nest, given, sizes)
        for name in nest.outputs:
            dtype = nest.buffer(name).dtype
            compare(name, from_gpu(tensors[name], dtype), wanted[name], dtype, tolerance, source.text)

    return check
