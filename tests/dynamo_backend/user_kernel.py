"""Run by test_custom_ops.py in a process of its own: a user's Triton kernel, interpreted, in a compiled graph."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch.fx.experimental.proxy_tensor import make_fx

from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.runtime.settings.options import Options


@triton.jit
def accumulate(x, y, total, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < n
    product = tl.load(x + i, mask=inside) * tl.load(y + i, mask=inside)
    tl.store(total + i, tl.load(total + i, mask=inside) + product, mask=inside)


KERNEL = kernel_side_table.add_kernel(accumulate)
CONSTANTS = kernel_side_table.add_constant_args({"block": 64})


def fn(x, y):
    start = x.cos()
    (total,) = triton_kernel_wrapper_functional(
        kernel_idx=KERNEL, constant_args_idx=CONSTANTS, grid=[((x.shape[0] + 63) // 64, 1, 1)],
        tma_descriptor_metadata={}, kwargs={"x": x * 2, "y": y, "total": start, "n": x.shape[0]},
        tensors_to_clone=["total"],
    ).values()  # fmt: skip
    return total.sin() + start


for mode, lengths in (("fake", (200,)), ("symbolic", (200, 77))):
    gm = make_fx(fn, tracing_mode=mode)(torch.randn(200), torch.randn(200))
    compiled = compile_graph(gm, (), options=Options.resolve(None, {"strict": True, "cache": False}, {}))
    for n in lengths:
        x, y = torch.randn(n), torch.randn(n)
        (got,) = compiled.call([x.clone(), y.clone()])
        torch.testing.assert_close(got, (x.cos() + x * 2 * y).sin() + x.cos())
print("equal")
