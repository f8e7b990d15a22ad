"""A process that runs kernels under Triton's interpreter: jobs come on stdin, answers go to stdout, both pickled.

The interpreter has to be chosen before Triton is imported, hence the process. libdevice does not exist there; its
functions are computed in float64 and rounded once. A kernel that reads or writes beside its arguments is an error.
"""

import os
import pickle
import sys
from functools import lru_cache
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.runtime.gpu.table import GpuTableKernel
from torch_mlc.runtime.triton.compile import load_source


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


# Types that NumPy has of ``ml_dtypes``, which torch takes as bits.
FOREIGN = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
LIBDEVICE = SimpleNamespace(nextafter=_nextafter, fast_dividef=lambda a, b: a / b, **{ours: _wrap(theirs) for ours, theirs in _TORCH.items()})


# What kernels write in assembly, by its first word: the elements as they are, of which a compiler is not told so, and
# functions with an error, which are exact here.
ASSEMBLY = {
    "xor.b32": lambda a, zero: a,
    "rcp.approx.ftz.f32": _wrap("reciprocal"),
    "tanh.approx.f32": _wrap("tanh"),
}


def _assembly(asm, constraints, args, dtype, is_pure, pack):
    assert args[0].dtype == dtype
    return ASSEMBLY[asm.partition(" ")[0]](*args)


tl.inline_asm_elementwise = _assembly


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

    eight_bits = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}
    kinds = {tl.bfloat16: ml_dtypes.bfloat16, **eight_bits}

    def cast(self, src, dst_type, *rounding):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target in kinds:
            rounded = np.asarray(src.data, dtype=np.float32).astype(kinds[target])
            return TensorHandle(rounded.view(f"u{rounded.itemsize}"), target)
        if source in eight_bits and target == tl.float32:
            return TensorHandle(np.asarray(src.data, dtype=np.uint8).view(kinds[source]).astype(np.float32), target)
        return plain(self, src, dst_type, *rounding)

    return cast


def _splat_of_its_type(plain):
    """A scalar for all lanes. The interpreter's makes integers of a truth value, which no mask may be."""

    def splat(self, shape, value):
        made = plain(self, shape, value)
        return TensorHandle(made.data.astype(value.data.dtype), made.dtype)

    return splat


def _numbers_of_one_element(plain):
    """Bounds of loops are arrays of one element, of which NumPy 2.4 makes no number for Triton before 3.9."""

    def patched(tensor, *scope):
        plain(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    return patched


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def _reduced_as_a_tree(self, inputs):
    """Neighbours are combined, then those sums, as lanes of a GPU do it.

    The interpreter's own loop adds one element after another, whose rounding in float32 grows with their number, and
    takes a call of the function for each.
    """
    shape = inputs[0].handle.data.shape
    states = [np.asarray(x.handle.data) for x in inputs]
    states = [x.reshape(-1) for x in states] if self.axis is None else [np.moveaxis(x, self.axis, -1) for x in states]
    while states[0].shape[-1] > 1:
        pairs = [self.to_tensor(x[..., k::2], t.dtype) for k in (0, 1) for x, t in zip(states, inputs)]
        states = [np.asarray(x.handle.data) for x in _tuple(self.combine_fn.fn(*pairs))]
    results = [x[..., 0] for x in states]
    if self.keep_dims:
        results = [x.reshape([1] * len(shape)) if self.axis is None else np.expand_dims(x, self.axis) for x in results]
    return [self.to_tensor(x if x.shape else x.item(), t.dtype) for x, t in zip(results, inputs)]


def _scanned_as_a_tree(self, inputs):
    """Each element with what stands 1, 2, 4, ... places before it, which is associative as a scan has to be."""
    states = [np.moveaxis(np.asarray(x.handle.data), self.axis, -1) for x in inputs]
    places, step = np.arange(states[0].shape[-1]), 1
    while step < places.size:
        before = [self.to_tensor(np.roll(x, step, -1), t.dtype) for x, t in zip(states, inputs)]
        here = [self.to_tensor(x, t.dtype) for x, t in zip(states, inputs)]
        joined = [np.asarray(x.handle.data) for x in _tuple(self.combine_fn.fn(*before, *here))]
        states = [np.where(places < step, s, x) for x, s in zip(joined, states)]
        step *= 2
    return [self.to_tensor(np.moveaxis(x, -1, self.axis), t.dtype) for x, t in zip(states, inputs)]


class Memory:
    """What a kernel may touch: the elements of its arguments from the first to the last."""

    starts = ends = np.empty(0, np.uint64)

    @classmethod
    def allow(cls, tensors):
        spans = []
        for t in tensors:
            if t.numel():
                last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
                spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
        joined = []
        for start, end in sorted(spans):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        cls.starts, cls.ends = np.array(joined, np.uint64).reshape(-1, 2).T

    @classmethod
    def check(cls, pointers, mask, what):
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        at = np.asarray(pointers.data, np.uint64)
        at = at[np.broadcast_to(np.asarray(mask.data, bool), at.shape)]
        place = np.searchsorted(cls.starts, at, "right")  # how many begin before
        inside = place > 0
        inside[inside] = at[inside] + np.uint64(size) <= cls.ends[place[inside] - 1]
        if not inside.all():
            raise IndexError(f"{what} beside the arguments in {np.sum(~inside)} of {at.size} lanes")


def _within_memory(plain, what, mask_at):
    def checked(self, *args, **options):
        Memory.check(args[1 if what == "atomic" else 0], args[mask_at], what)
        return plain(self, *args, **options)

    return checked


interpreter.ReduceOps.generic_reduce = _reduced_as_a_tree
interpreter.ScanOps.generic_scan = _scanned_as_a_tree
InterpreterBuilder.create_masked_load = _within_memory(InterpreterBuilder.create_masked_load, "load", 1)
InterpreterBuilder.create_masked_store = _within_memory(InterpreterBuilder.create_masked_store, "store", 2)
InterpreterBuilder.create_atomic_rmw = _within_memory(InterpreterBuilder.create_atomic_rmw, "atomic", 3)
# Sums and products of indices wrap where the machine's do, which kernels allow for; to look costs half the time.
object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)
interpreter._patch_lang_tensor = _numbers_of_one_element(interpreter._patch_lang_tensor)
InterpreterBuilder.create_splat = _splat_of_its_type(InterpreterBuilder.create_splat)
InterpreterBuilder.cast_impl = _rounded_to_nearest(InterpreterBuilder.cast_impl)
InterpreterBuilder.create_fp_to_fp = _rounded_to_nearest(InterpreterBuilder.create_fp_to_fp)
InterpreterBuilder.create_dot = _dot_of_bfloat16(InterpreterBuilder.create_dot)


def _tensor(array, strides, dtype):
    """A torch tensor of an array's content in memory of the given strides; an expanded dimension has one element."""
    shape = array.shape
    array = array[tuple(slice(0, 1) if n and not stride else slice(None) for n, stride in zip(shape, strides))]
    kind, array = getattr(torch, dtype), np.ascontiguousarray(array).reshape(array.shape)
    content = (
        torch.from_numpy(array.view(f"u{array.itemsize}")).view(kind) if dtype in FOREIGN else torch.from_numpy(array)
    )
    return torch.empty_strided(array.shape, strides, dtype=kind).copy_(content).expand(shape)


def _array(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in FOREIGN:
        return tensor.numpy().copy()
    bits = getattr(torch, f"uint{8 * tensor.element_size()}")
    return tensor.contiguous().view(bits).numpy().view(getattr(ml_dtypes, name))


@lru_cache(maxsize=256)
def _function(name, text):
    fn = load_source(KernelSource(name, "triton", text, (), ()))
    fn.fn.__globals__["libdevice"] = LIBDEVICE
    return fn


def launch(name, text, grid, tensors, sizes=()):
    """Run a kernel over tensors and sizes, where they are."""
    fn = _function(name, text)
    Memory.allow(tensors)
    with np.errstate(all="ignore"):
        fn[tuple(grid)](*tensors, *sizes)


class HostMemory:
    """Memory for tables where there is one stream, and all of it is the host's."""

    def stream(self, device):
        return 0

    def capturing(self):
        return False

    def upload(self, array, device):
        return torch.from_numpy(array.copy())

    def mark(self, device):
        return None


def launch_table(source, target, rows, sizes):
    """Run a kernel over a table, as a launch on a GPU would run it: the same rows and programs."""
    launched = []
    kernel = GpuTableKernel(source, target, driver=object(), memory=HostMemory())
    kernel._kernel.launch = lambda device, aligned, grid, arguments, far: launched.append((aligned, grid))
    tensors = [t for row in rows for t in row]
    kernel(len(rows), tensors, sizes)
    if launched:
        ((_, grid),) = launched
        record = kernel.record(-1)
        fn = _function(source.name, source.text)
        Memory.allow([*tensors, *record.memory])
        with np.errstate(all="ignore"):
            fn[grid](*record.memory)
    return [aligned for aligned, _ in launched]


def _run_table(job):
    source = job["source"]
    rows = [[_tensor(*p) for p in params] for params in job["rows"]]
    for aligned in launch_table(source, job["target"], rows, job["sizes"]):
        assert aligned == tuple(True for _ in source.params), "memory of torch is aligned"
    return [[_array(row[k]) for k in job["outputs"]] for row in rows]


def _run(job):
    if "rows" in job:
        return _run_table(job)
    tensors = [_tensor(*p) for p in job["params"]]
    launch(job["name"], job["text"], job["grid"], tensors, job["sizes"])
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
