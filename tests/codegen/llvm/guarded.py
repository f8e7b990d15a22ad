"""Programs whose memory ends where a page begins that may not be touched: kernels' own, and what they are given."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.ir.target import Target
from torch_mlc.runtime import cpu

PAGE = mmap.PAGESIZE
# Anonymous private memory that may be read and written, on Linux.
_MEMORY = f"""
declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @mprotect(ptr, i64, i32)
define internal ptr @guarded_malloc(i64 %bytes) {{
  %more = add i64 %bytes, 15
  %size = and i64 %more, -16
  %above = add i64 %size, {PAGE - 1}
  %pages = and i64 %above, {-PAGE}
  %all = add i64 %pages, {PAGE}
  %begin = call ptr @mmap(ptr null, i64 %all, i32 3, i32 34, i32 -1, i64 0)
  %guard = getelementptr i8, ptr %begin, i64 %pages
  %kept = call i32 @mprotect(ptr %guard, i64 {PAGE}, i32 0)
  %back = sub i64 0, %size
  %memory = getelementptr i8, ptr %guard, i64 %back
  ret ptr %memory
}}
"""


def guarded_text(text: str) -> str:
    """A module of LLVM IR whose kernels get guarded memory for their own arrays, and keep it."""
    lines = [n for n in text.split("\n") if not n.startswith(("declare ptr @malloc(", "declare void @free("))]
    lines = [n.replace("@malloc(", "@guarded_malloc(") for n in lines if "call void @free(" not in n]
    return "\n".join(lines) + (_MEMORY if "call ptr @malloc(" in text else "")


def guarded_tensor(like: Tensor) -> Tensor:
    """A copy of a contiguous tensor that ends, up to its alignment of 16 bytes, where memory does."""
    size = -(-like.nbytes // 16) * 16
    pages = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), PAGE, 0) == 0
    copy = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=pages - size)
    return copy.view(like.shape).copy_(like)


def rms_norm_backward(g: Tensor, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    normed, scaled = x * r, g * w
    inner = (scaled * normed).mean(-1, keepdim=True)
    return (scaled - normed * inner) * r, (g * normed).sum(0)


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (20 * torch.tanh(q @ k.transpose(-1, -2) / 20)).softmax(-1) @ v


def joined(*parts: Tensor) -> Tensor:
    return torch.cat([p * 2 for p in parts], 1)


def gathered(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows].sum(1)


def dequantised(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return x @ (w.to(x.dtype) * scale)


def f32(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s) for s in shapes]


# Programs, and inputs for each of several sizes.
CASES: dict[str, tuple[Callable[..., Any], Callable[[int, int], Sequence[Tensor]]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), lambda r, c: f32((r, c))),
    "layer norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), lambda r, c: f32((r, c), (c,), (c,))),
    "norm backward": (rms_norm_backward, lambda r, c: f32((r, c), (r, c), (r, 1), (c,))),
    "sums of columns": (lambda x, b: (F.gelu(x + b).sum(0), (x * x).sum(1)), lambda r, c: f32((r, c), (c,))),
    "extremes": (lambda x: (x.argmax(-1), x.amin(0), x.var(-1)), lambda r, c: f32((r, c))),
    "scans": (lambda x: (x.cumsum(-1), x.cumsum(0), x.logcumsumexp(-1)), lambda r, c: f32((r, c))),
    "transposed": (lambda x: (x.t() * 2).contiguous(), lambda r, c: f32((r, c))),
    "strided": (
        lambda x: [x.reshape(-1)[k::n] * 2 for n in (2, 3, 4) for k in (0, (x.numel() - 1) % n)],
        lambda r, c: f32((r, c)),
    ),
    "joined": (joined, lambda r, c: f32((r, c), (r, 3), (r, c + 1))),
    "padded": (lambda x: F.pad(x, (3, 2, 1, 4)) + 1, lambda r, c: f32((r, c))),
    "pooled": (lambda x: F.max_pool2d(x[None], 3, 2, 1), lambda r, c: f32((2, r, c))),
    "attention": (softcap, lambda r, c: f32((2, r, 16), (2, c, 16), (2, c, 16))),
    "gathered": (gathered, lambda r, c: [torch.randn(r, c), torch.randint(r, (c, 3))]),
    "scattered": (
        lambda x, at, v: x.index_add(0, at, v),
        lambda r, c: [torch.randn(r, c), torch.randint(r, (7,)), torch.randn(7, c)],
    ),
    "dequantised": (
        dequantised,
        lambda r, c: [torch.randn(2, r), torch.randint(-128, 127, (r, c), dtype=torch.int8), torch.rand(c)],
    ),
    "halves": (lambda x: torch.softmax(x, -1).bfloat16(), lambda r, c: [torch.randn(r, c).bfloat16()]),
}
SIZES = ((37, 41), (5, 1031), (130, 7))


def check(name: str) -> None:
    """Compile and run a program, for static and for symbolic sizes, in guarded memory; compare with eager."""
    compile_object = cpu.compile_object

    def guarded(texts: Sequence[str], target: Target) -> bytes:
        return compile_object([guarded_text(t) for t in texts], target)

    cpu.compile_object = guarded
    fn, inputs = CASES[name]
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="mlc", dynamic=dynamic)
        for size in SIZES:
            torch.manual_seed(0)
            given = inputs(*size)
            wanted = fn(*given)
            got = compiled(*map(guarded_tensor, given))
            for a, b in zip(*(r if isinstance(r, (tuple, list)) else (r,) for r in (got, wanted)), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2 if b.dtype is torch.bfloat16 else 1e-4, atol=1e-3)
