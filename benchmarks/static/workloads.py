"""What the suite ``static`` compiles: one workload for each property that can be told from machine code and loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device

from ..kernels.attention import softcap
from ..kernels.norms import rms_norm
from ..models.gpt import GPT, SPECS
from ..models.spec import Size
from .made import HALF, Made, Workload, fake
from .slots import SLOT_WORKLOADS

SPEC = next(spec for spec in SPECS if spec.name == "gpt2_d768")
# The depth that tells whether further layers bring kernels of their own: a first, a middle and a last one.
FEW_LAYERS = 3


def _gpt(layers: Callable[[Size], int]) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        config = SPEC.config(size, layers=layers(size))
        dims = SPEC.dims[size]
        with torch.device("meta"):
            model = GPT(config).to(HALF)
            ids, targets = (torch.empty(dims["batch"], dims["seq"], dtype=torch.int64) for _ in range(2))
        model, inputs = on_fake_device(model, [ids, targets], "cpu")

        def step(ids: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

        return Made(step, inputs)

    return make


def _norm(rows: int, columns: int, layer: bool) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        m, n = (rows, columns) if size == "full" else (rows // 64, columns // 64)
        if layer:
            x, w, b = fake((m, n), (n,), (n,), gradients=True)
            return Made(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), [x, w, b])
        x, w = fake((m, n), (n,), gradients=True)
        return Made(lambda x, w: rms_norm(x, w), [x, w])

    return make


def _image(size: Size) -> tuple[int, int, int, int]:
    return (64, 256, 56, 56) if size == "full" else (4, 16, 16, 16)


def _image_and_mask(size: Size) -> int:
    """x, the gradient and its result, and what Inductor saves of the ReLU: a byte an element."""
    return math.prod(_image(size)) * (3 * HALF.itemsize + 1)


def _batch_norm_relu(size: Size) -> Made:
    b, c, h, w = _image(size)
    with FakeTensorMode():
        x = torch.empty(b, c, h, w, dtype=HALF, requires_grad=True)
        weight, bias = (torch.empty(c, requires_grad=True) for _ in range(2))
        mean, var = torch.empty(c), torch.empty(c)

    def batch_norm_relu(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, mean, var, weight, bias, training=True))

    return Made(batch_norm_relu, [x, mean, var, weight, bias])


def _int8_linear(size: Size) -> Made:
    m, k, n = (16, 4096, 14336) if size == "full" else (16, 256, 384)
    with FakeTensorMode():
        x, scale = torch.empty(m, k, dtype=HALF), torch.empty(n, 1, dtype=HALF)
        w = torch.empty(n, k, dtype=torch.int8)
    return Made(lambda x, w, scale: F.linear(x, w.to(x.dtype) * scale), [x, w, scale])


def _softcap(size: Size) -> Made:
    shape = (8, 32, 2048, 128) if size == "full" else (2, 2, 128, 64)
    return Made(lambda q, k, v: softcap(q, k, v), fake(shape, shape, shape))


def _rows(function: Callable[..., Tensor], columns: int, dtype: torch.dtype) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        m, n = (8192, columns) if size == "full" else (64, max(columns // 64, 8))
        if function is rms_norm:
            return Made(lambda x, w: rms_norm(x, w), fake((m, n), (n,), dtype=dtype))
        return Made(lambda x: torch.softmax(x, -1), fake((m, n), dtype=dtype))

    return make


def _linear_gelu(size: Size) -> Made:
    m, n, k = (8192, 3072, 768) if size == "full" else (128, 256, 64)
    x, w, b = fake((m, k), (n, k), (n,))
    return Made(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), [x, w, b])


def _gated(size: Size) -> Made:
    m, n, k = (4096, 14336, 4096) if size == "full" else (128, 256, 64)
    x, gate, up = fake((m, k), (n, k), (n, k))
    return Made(lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up), [x, gate, up])


GPT_STEP, GPT_FEW = "GPT-2 training step", f"GPT-2 training step, {FEW_LAYERS} layers"
NORMS = ((16384, 4096), (4096, 16384))
COLUMNS = (1024, 4096, 8192, 16384, 32768)
_WORKLOADS = (
    # Its vocabulary is odd.
    Workload(GPT_STEP, _gpt(lambda size: 12 if size == "full" else FEW_LAYERS + 1), True, aligned=False),
    Workload(GPT_FEW, _gpt(lambda size: FEW_LAYERS), True, aligned=False),
    *(Workload(f"layer norm backward, N={n}", _norm(m, n, layer=True), True) for m, n in NORMS),
    *(Workload(f"RMS norm backward, N={n}", _norm(m, n, layer=False), True) for m, n in NORMS),
    Workload("batch norm + ReLU backward", _batch_norm_relu, True, compulsory=_image_and_mask),
    Workload("int8-weight linear", _int8_linear),
    Workload("softcap attention forward", _softcap),
    Workload("linear + GELU", _linear_gelu),
    Workload("gated MLP", _gated),
    *(
        Workload(f"{name} rows, N={n}, {str(dtype).removeprefix('torch.')}", _rows(function, n, dtype))
        for name, function in (("softmax", torch.softmax), ("RMS norm", rms_norm))
        for dtype in (HALF, torch.float32)
        for n in COLUMNS
    ),
    *SLOT_WORKLOADS.values(),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({w.name: w for w in _WORKLOADS})
