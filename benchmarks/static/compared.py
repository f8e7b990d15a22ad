"""What the suites ``predicted`` and ``defaults`` compile: the workloads of ``static``, and others beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device

from ..kernels.attention import causal_where
from ..models import llama_decode
from ..models.gpt import GPT
from ..models.spec import Size
from .made import HALF, Made, Workload, fake
from .workloads import FEW_LAYERS, SPEC, WORKLOADS

DECODE = llama_decode.SPECS[0]


def _inference(size: Size) -> Made:
    """A few layers: more of them bring no other kernels."""
    dims = SPEC.dims[size]
    with torch.device("meta"):
        model = GPT(SPEC.config(size, layers=FEW_LAYERS)).to(HALF).eval()
        ids = torch.empty(dims["batch"], dims["seq"], dtype=torch.int64)
    model, inputs = on_fake_device(model, [ids], "cpu")
    return Made(lambda ids: model(ids), inputs)


def _decode(size: Size) -> Made:
    config, dims = DECODE.config(size, layers=FEW_LAYERS), DECODE.dims[size]
    shape = (dims["batch"], config.kv_heads, dims["length"], config.dim // config.heads)
    with torch.device("meta"):
        model = llama_decode.LlamaStep(config).to(HALF).eval()
        ids, position = torch.empty(dims["batch"], 1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        caches = [torch.empty(shape, dtype=HALF) for _ in range(2 * config.layers)]
    model, inputs = on_fake_device(model, [ids, position, *caches], "cpu")
    return Made(lambda ids, position, *caches: model(ids, position, *caches), inputs)


def _attention(function: Callable[..., Tensor], gradients: bool) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        shape = (8, 16, 2048, 64) if size == "full" else (2, 2, 128, 64)
        return Made(lambda q, k, v: function(q, k, v), fake(shape, shape, shape, gradients=gradients))

    return make


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _pointwise(function: Callable[..., Tensor]) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        shape = (16384, 4096) if size == "full" else (64, 64)
        return Made(lambda x: function(x), fake(shape, gradients=True))

    return make


def _softmax(columns: int) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        m, n = (8192, columns) if size == "full" else (64, max(columns // 64, 8))
        return Made(lambda x: torch.softmax(x, -1), fake((m, n), gradients=True))

    return make


def _cross_entropy(size: Size) -> Made:
    m, n = (8192, 50257) if size == "full" else (64, 509)
    with FakeTensorMode():
        x, target = torch.empty(m, n, dtype=HALF, requires_grad=True), torch.empty(m, dtype=torch.int64)
    return Made(F.cross_entropy, [x, target])


def _linear(function: Callable[..., Any], *, residual: bool, gradients: bool) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        m, n, k = (8192, 4096, 4096) if size == "full" else (128, 256, 64)
        shapes = [(m, k), (n, k), (n,), *([(m, n)] if residual else [])]
        return Made(lambda *tensors: function(*tensors), fake(*shapes, gradients=gradients))

    return make


def _residual(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return y + F.linear(x, w, b)


def _gelu_of_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


_MORE = (
    Workload(f"GPT-2 inference, {FEW_LAYERS} layers", _inference, aligned=False),
    Workload(f"Llama decoding, {FEW_LAYERS} layers", _decode),
    Workload("causal attention, a library's op", _attention(_causal, False)),
    Workload("causal attention, plain operations", _attention(causal_where, False)),
    Workload("causal attention, plain operations, both ways", _attention(causal_where, True), True),
    Workload("GELU, both ways", _pointwise(F.gelu), True),
    Workload("dropout, both ways", _pointwise(lambda x: F.dropout(x, 0.1)), True),
    *(Workload(f"softmax, N={n}, both ways", _softmax(n), True) for n in (4096, 32768)),
    Workload("cross entropy, N=50257, both ways", _cross_entropy, True, aligned=False),
    Workload("linear + bias + residual", _linear(_residual, residual=True, gradients=False)),
    Workload("linear + bias + GELU, both ways", _linear(_gelu_of_linear, residual=False, gradients=True), True),
)
COMPARED: Mapping[str, Workload] = MappingProxyType({**WORKLOADS, **{w.name: w for w in _MORE}})
