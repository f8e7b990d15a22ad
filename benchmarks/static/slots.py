"""Workloads of the suite ``static`` whose kernels ought to be bound by memory, for their instruction slots a byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..kernels.quantized import int4_linear
from ..models.spec import Size
from .made import HALF, Made, Workload, fake

# Slots of the vector units that an H200 issues in the time in which it copies a byte: 132 multiprocessors of 128 lanes
# at 1.98 GHz over 4.3 TB/s. More than that and instructions take longer than the memory.
SLOTS_A_BYTE = 7.8


def _pointwise(function: Callable[..., Tensor], *, gradients: bool = False) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        shape = (16384, 4096) if size == "full" else (64, 64)
        return Made(function, fake(shape, gradients=gradients))

    return make


def _dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0)


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _with_bias(size: Size) -> Made:
    m, n = (16384, 4096) if size == "full" else (64, 64)
    return Made(_bias_gelu, fake((m, n), (n,), gradients=True))


def _softmax(columns: int) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        m, n = (2048, columns) if size == "full" else (16, columns // 64)
        return Made(lambda x: torch.softmax(x, -1), fake((m, n)))

    return make


def _cross_entropy(size: Size) -> Made:
    m, n = (8192, 131072) if size == "full" else (64, 512)
    with FakeTensorMode():
        x, target = torch.empty(m, n, dtype=HALF, requires_grad=True), torch.empty(m, dtype=torch.int64)
    return Made(F.cross_entropy, [x, target])


def _int8(rows: int) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        k, n = (4096, 14336) if size == "full" else (256, 384)
        with FakeTensorMode():
            x, scale = torch.empty(rows, k, dtype=HALF), torch.empty(n, 1, dtype=HALF)
            w = torch.empty(n, k, dtype=torch.int8)
        return Made(lambda x, w, scale: F.linear(x, w.to(x.dtype) * scale), [x, w, scale])

    return make


def _int4(rows: int) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        n, groups, each = (14336, 32, 128) if size == "full" else (384, 2, 128)
        with FakeTensorMode():
            x = torch.empty(rows, groups * each, dtype=HALF)
            scale, zero = (torch.empty(n, groups, dtype=HALF) for _ in range(2))
            w = torch.empty(n, groups * each // 2, dtype=torch.uint8)
        return Made(int4_linear, [x, w, scale, zero])

    return make


def _words_along_rows(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    q = ((w[:, :, None] >> torch.arange(0, 32, 4, dtype=w.dtype, device=w.device)) & 15).reshape(
        w.shape[0], scale.shape[1], -1
    )
    return F.linear(x, ((q.to(x.dtype) - zero[:, :, None]) * scale[:, :, None]).reshape(w.shape[0], -1))


def _gptq_linear(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Words lie along the sum, zero points along the columns."""
    (groups, n), shifts = scale.shape, torch.arange(0, 32, 4, dtype=torch.int32, device=w.device)
    q = ((w[:, None, :] >> shifts[None, :, None]) & 15).reshape(groups, -1, n)
    zeros = ((zero[:, :, None] >> shifts) & 15).reshape(groups, 1, n)
    return x @ ((q - zeros).to(x.dtype) * scale[:, None, :]).reshape(-1, n)


def _words(rows: int, *, gptq: bool) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        n, groups, each = (14336, 32, 128) if size == "full" else (384, 2, 128)
        words = groups * each // 8
        with FakeTensorMode():
            x = torch.empty(rows, groups * each, dtype=HALF)
            w = torch.empty(*((words, n) if gptq else (n, words)), dtype=torch.int32)
            scale = torch.empty(*((groups, n) if gptq else (n, groups)), dtype=HALF)
            zero = torch.empty(groups, n // 8, dtype=torch.int32) if gptq else torch.empty(n, groups, dtype=HALF)
        return Made(_gptq_linear if gptq else _words_along_rows, [x, w, scale, zero])

    return make


def _e4m3(size: Size) -> Made:
    k, n = (4096, 14336) if size == "full" else (256, 384)
    with FakeTensorMode():
        x, scale = torch.empty(1, k, dtype=HALF), torch.empty((), dtype=HALF)
        w = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    return Made(lambda x, w, scale: F.linear(x, w.to(x.dtype)) * scale, [x, w, scale])


_WORKLOADS = (
    Workload("GELU", _pointwise(F.gelu)),
    Workload("dropout", _pointwise(_dropout)),
    Workload("column sums", _pointwise(_column_sums)),
    Workload("GELU of a sum with a bias, both ways", _with_bias, True),
    Workload("softmax rows, N=131072", _softmax(131072)),
    Workload("cross entropy, N=131072, both ways", _cross_entropy, True),
    *(Workload(f"int8 linear of {rows} rows", _int8(rows)) for rows in (1, 16)),
    *(Workload(f"int4 linear of {rows} rows", _int4(rows)) for rows in (1, 16)),
    *(Workload(f"int4 linear of {rows} rows, int32 words", _words(rows, gptq=False)) for rows in (1, 16)),
    *(Workload(f"int4 linear of {rows} rows, GPTQ", _words(rows, gptq=True)) for rows in (1, 16)),
    Workload("float8_e4m3fn linear of 1 rows", _e4m3),
)
SLOT_WORKLOADS: Mapping[str, Workload] = MappingProxyType({w.name: w for w in _WORKLOADS})
HELD = (
    *SLOT_WORKLOADS, "layer norm backward, N=4096", "layer norm backward, N=16384", "RMS norm backward, N=4096",
    "RMS norm backward, N=16384", "batch norm + ReLU backward", "softmax rows, N=32768, bfloat16",
)  # fmt: skip
