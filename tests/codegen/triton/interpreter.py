"""A process that runs kernels under Triton's interpreter: jobs come on stdin, answers go to stdout, both pickled.

The interpreter has to be chosen before Triton is imported, hence the process. libdevice does not exist there; its
functions are computed in float64 and rounded once.
"""

import os
import pickle
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.runtime.gpu import load_source
from torch_mlc.runtime.gpu_table import GpuTableKernel


def _names(text: str) -> list[str]:
    return text.split()


_TORCH = {
    **{
        n: n
        for n in _names("exp exp2 expm1 log log2 log10 log1p tanh sin cos tan asin acos atan sinh cosh asinh acosh")
    },
    **{n: n for n in _names("atanh erf erfc erfinv lgamma rsqrt floor ceil trunc pow atan2 hypot copysign fmod")},
    "nearbyint": "round",
}


def _wrap(name: str):
    fn = getattr(torch, name)

    def call(*args):
        data = [torch.from_numpy(np.array(a.handle.data, dtype=np.float64)) for a in args]
        out = np.asarray(fn(*data).numpy()).astype(args[0].handle.data.dtype)
        scalar = args[0].dtype
        block = any(a.type.is_block() for a in args)
        kind = tl.block_type(scalar, list(out.shape)) if block else scalar
        return tl.core.tensor(TensorHandle(out, scalar), kind)

    return call


def _nextafter(a, b):
    out = np.nextafter(a.handle.data, b.handle.data)
    return tl.core.tensor(TensorHandle(out, a.dtype), a.type)


LIBDEVICE = SimpleNamespace(nextafter=_nextafter, **{ours: _wrap(theirs) for ours, theirs in _TORCH.items()})


def _exclusive_or_of_zero(asm, constraints, args, dtype, is_pure, pack):
    """What kernels write in assembly: the elements as they are, of which a compiler is not told so."""
    assert asm.startswith("xor.b32 $0, $1, $2;") and args[0].dtype == dtype
    return args[0]


tl.inline_asm_elementwise = _exclusive_or_of_zero


def _dot_of_bfloat16(plain):
    """The interpreter keeps bfloat16 as its bits and multiplies those; products are of the numbers."""

    def widened(handle):
        if handle.dtype != tl.bfloat16:
            return handle
        bits = np.asarray(handle.data, dtype=np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    return lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest)


def _rounded_to_nearest(plain):
    """The interpreter cuts bits off where float32 becomes bfloat16, and has no NaN and other ties in eight bits."""

    kinds = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn}

    def cast(self, src, dst_type, *rounding):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target in kinds:
            rounded = np.asarray(src.data, dtype=np.float32).astype(kinds[target])
            return TensorHandle(rounded.view(f"u{rounded.itemsize}"), target)
        if source == tl.float8e4nv and target == tl.float32:
            return TensorHandle(np.asarray(src.data, dtype=np.uint8).view(kinds[source]).astype(np.float32), target)
        return plain(self, src, dst_type, *rounding)

    return cast


def _splat_of_its_type(plain):
    """A scalar for all lanes. The interpreter's makes integers of a truth value, which no mask may be."""

    def splat(self, shape, value):
        made = plain(self, shape, value)
        return TensorHandle(made.data.astype(value.data.dtype), made.dtype)

    return splat


InterpreterBuilder.create_splat = _splat_of_its_type(InterpreterBuilder.create_splat)
InterpreterBuilder.cast_impl = _rounded_to_nearest(InterpreterBuilder.cast_impl)
InterpreterBuilder.create_fp_to_fp = _rounded_to_nearest(InterpreterBuilder.create_fp_to_fp)
InterpreterBuilder.create_dot = _dot_of_bfloat16(InterpreterBuilder.create_dot)


def _tensor(array, strides, dtype):
    """A torch tensor of an array's content in memory of the given strides."""
    if dtype == "bfloat16":
        content = torch.from_numpy(np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)).view(
            torch.bfloat16
        )
    else:
        content = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    out = torch.empty_strided(array.shape, strides, dtype=getattr(torch, dtype))
    return out.copy_(content)


def _array(tensor):
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy().copy()


def _run_table(job):
    """A kernel over a table, as a launch on a GPU would run it: the same rows and programs."""
    source, launched = job["source"], []
    kernel = GpuTableKernel(
        source, job["target"], driver=object(), stream=lambda device: 0,
        upload=lambda array, device: torch.from_numpy(array),
    )  # fmt: skip
    kernel._kernel.launch = lambda device, aligned, grid, arguments: launched.append((aligned, grid))
    rows = [[_tensor(*p) for p in params] for params in job["rows"]]
    kernel(len(rows), [t for row in rows for t in row], job["sizes"])
    if launched:
        ((aligned, grid),) = launched
        assert aligned == tuple(True for _ in source.params), "memory of torch is aligned"
        state = kernel._state.by_device[-1]
        fn = load_source(source)
        fn.fn.__globals__["libdevice"] = LIBDEVICE
        with np.errstate(all="ignore"):
            fn[grid](state.table, state.programs)
    return [[_array(row[k]) for k in job["outputs"]] for row in rows]


def _run(job):
    if "rows" in job:
        return _run_table(job)
    source = KernelSource(job["name"], "triton", job["text"], (), ())
    fn = load_source(source)
    fn.fn.__globals__["libdevice"] = LIBDEVICE
    tensors = [_tensor(*p) for p in job["params"]]
    with np.errstate(all="ignore"):
        fn[tuple(job["grid"])](*tensors, *job["sizes"])
    return [_array(tensors[k]) for k in job["outputs"]]


def main() -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(source)
        except EOFError:
            return
        try:
            answer = ("ok", _run(job))
        except Exception as error:
            text = job["source"].text if "rows" in job else job["text"]
            answer = ("error", f"{type(error).__name__}: {error}\n{text}")
        pickle.dump(answer, sink)
        sink.flush()


if __name__ == "__main__":
    main()
