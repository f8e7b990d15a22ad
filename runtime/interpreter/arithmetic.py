"""Triton's interpreter, made to compute as a GPU does.

Triton decides when it is imported whether it interprets, by ``TRITON_INTERPRET``: this is for processes in which it
does, and raises ImportError in others. libdevice does not exist there; its functions are computed in float64 and
rounded once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("TRITON_INTERPRET=1 has to be set in a process before Triton is imported to interpret kernels")

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

from .assembly import run_assembly
from .memory import check_access


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


def _wrap(name: str) -> Callable[..., Any]:
    fn = getattr(torch, name)

    def call(*args: Any) -> Any:
        data = [torch.from_numpy(np.array(a.handle.data, dtype=np.float64)) for a in args]
        out = np.asarray(fn(*data).numpy()).astype(args[0].handle.data.dtype)
        scalar = args[0].dtype
        block = any(a.type.is_block() for a in args)
        kind = tl.block_type(scalar, list(out.shape)) if block else scalar
        return tl.core.tensor(TensorHandle(out, scalar), kind)

    return call


def _nextafter(a: Any, b: Any) -> Any:
    out = np.nextafter(a.handle.data, b.handle.data)
    return tl.core.tensor(TensorHandle(out, a.dtype), a.type)


LIBDEVICE = SimpleNamespace(
    nextafter=_nextafter,
    fast_dividef=lambda a, b: a / b,
    **{ours: _wrap(theirs) for ours, theirs in _TORCH.items()},
)
# What kernels write in assembly, by its first word: the elements as they are, of which a compiler is not told so, and
# functions with an error, which are exact here.
_ASSEMBLY: dict[str, Callable[..., Any]] = {
    "xor.b32": lambda a, zero: a,
    "rcp.approx.ftz.f32": _wrap("reciprocal"),
    "tanh.approx.f32": _wrap("tanh"),
}


def _assembly(asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    if asm.startswith("{"):
        return _block(asm, constraints, args, dtype, pack)
    known = _ASSEMBLY.get(asm.partition(" ")[0])
    if known is None or args[0].dtype != dtype:
        raise NotImplementedError(f"assembly that the interpreter does not know: {asm}")
    return known(*args)


def _block(asm: str, constraints: str, args: Sequence[Any], dtype: Any, pack: int) -> Any:
    """Several instructions, of tiles that are brought to one shape."""
    shape = np.broadcast_shapes(*(np.shape(a.handle.data) for a in args))
    tiles = [np.broadcast_to(np.asarray(a.handle.data), shape) for a in args]
    made = run_assembly(asm, tiles, constraints.count("="), dtype.primitive_bitwidth // 8, pack)
    if dtype != tl.bfloat16:  # of which the interpreter keeps the bits
        made = made.view(f"f{made.itemsize}")
    return tl.core.tensor(TensorHandle(made, dtype), tl.block_type(dtype, list(shape)))


def _dot_of_bfloat16(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter keeps bfloat16 as its bits and multiplies those; products are of the numbers."""

    def widened(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        bits = np.asarray(handle.data, dtype=np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    return lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest)


def _rounded_to_nearest(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter cuts bits off where float32 becomes bfloat16, and has no NaN and other ties in eight bits."""

    eight_bits = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}
    kinds = {tl.bfloat16: ml_dtypes.bfloat16, **eight_bits}

    def cast(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target in kinds:
            rounded = np.asarray(src.data, dtype=np.float32).astype(kinds[target])
            return TensorHandle(rounded.view(f"u{rounded.itemsize}"), target)
        if source in eight_bits and target == tl.float32:
            return TensorHandle(np.asarray(src.data, dtype=np.uint8).view(kinds[source]).astype(np.float32), target)
        return plain(self, src, dst_type, *rounding)

    return cast


def _splat_of_its_type(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar for all lanes. The interpreter's makes integers of a truth value, which no mask may be."""

    def splat(self: Any, shape: Any, value: Any) -> Any:
        made = plain(self, shape, value)
        return TensorHandle(made.data.astype(value.data.dtype), made.dtype)

    return splat


def _numbers_of_one_element(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Bounds of loops are arrays of one element, of which NumPy 2.4 makes no number for Triton before 3.9."""

    def patched(tensor: Any, *scope: Any) -> None:
        plain(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    return patched


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _reduced_as_a_tree(self: Any, inputs: Any) -> list[Any]:
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


def _scanned_as_a_tree(self: Any, inputs: Any) -> list[Any]:
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


def _within_memory(plain: Callable[..., Any], what: str, pointers_at: int, mask_at: int) -> Callable[..., Any]:
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        check_access(args[pointers_at], args[mask_at], what)
        return plain(self, *args, **options)

    return checked


@cache
def correct_interpreter() -> None:
    """Put what is right into the place of what Triton's interpreter does otherwise than a GPU, for this process.
    A kernel that then reads or writes beside its arguments raises IndexError."""
    tl.inline_asm_elementwise = _assembly
    interpreter.ReduceOps.generic_reduce = _reduced_as_a_tree
    interpreter.ScanOps.generic_scan = _scanned_as_a_tree
    builder = InterpreterBuilder
    builder.create_masked_load = _within_memory(builder.create_masked_load, "load", 0, 1)
    builder.create_masked_store = _within_memory(builder.create_masked_store, "store", 0, 2)
    builder.create_atomic_rmw = _within_memory(builder.create_atomic_rmw, "atomic", 1, 3)
    # Sums and products of indices wrap where the machine's do, which kernels allow for; to look costs half the time.
    object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)
    interpreter._patch_lang_tensor = _numbers_of_one_element(interpreter._patch_lang_tensor)
    builder.create_splat = _splat_of_its_type(builder.create_splat)
    builder.cast_impl = _rounded_to_nearest(builder.cast_impl)
    builder.create_fp_to_fp = _rounded_to_nearest(builder.create_fp_to_fp)
    builder.create_dot = _dot_of_bfloat16(builder.create_dot)
