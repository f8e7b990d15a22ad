"""Elementwise chains, with broadcasts, casts and an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import HEADS, ROWS, KernelCase, Shape, last, normal, same


def relu(x: Tensor) -> Tensor:
    return F.relu(x)


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def swiglu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def residual_chain(x: Tensor, residual: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return residual + torch.tanh((x + bias) * scale) * 0.5


def clamp_where(x: Tensor, y: Tensor) -> Tensor:
    clipped = torch.clamp(x, -1.0, 1.0)
    return torch.where(y > 0, clipped * y, torch.minimum(x, y) - 0.5)


def int_to_float(levels: Tensor, scale: Tensor) -> Tensor:
    """Dequantises int8 with a scale for each column."""
    return levels.to(scale.dtype) * scale


def adamw_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Step 10 of AdamW with the usual constants, out of place so that it can be repeated (arXiv 1711.05101)."""
    m = 0.9 * m + 0.1 * grad
    v = 0.999 * v + 0.001 * grad * grad
    update = (m / (1 - 0.9**10)) / ((v / (1 - 0.999**10)).sqrt() + 1e-8)
    return p * (1 - 1e-3 * 0.01) - 1e-3 * update, m, v


def adamw_list(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same step over many tensors of several shapes at once, as optimizers write it."""
    p, grad, m, v = ([*tensors[k::4]] for k in range(4))
    m = torch._foreach_lerp(m, grad, 0.1)
    v = torch._foreach_addcmul(torch._foreach_mul(v, 0.999), grad, grad, 0.001)
    scale = torch._foreach_add(torch._foreach_sqrt(torch._foreach_div(v, 1 - 0.999**10)), 1e-8)
    p = torch._foreach_addcdiv(torch._foreach_mul(p, 1 - 1e-3 * 0.01), m, scale, -1e-3 / (1 - 0.9**10))
    return (*p, *m, *v)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x [batch, seq, heads, d]`` by ``cos, sin [seq, d/2]``."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def make_levels(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    levels = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return levels, torch.rand(shape[-1], generator=generator)


def make_adamw(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    p, grad, m, v = (torch.randn(shape, generator=generator) for _ in range(4))
    return p, grad, m, v.square()


def make_adamw_list(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    """``shape`` is how many parameters, and the elements of each: matrices and vectors in turn."""
    count, width = shape
    forms: tuple[Shape, ...] = ((width,), (width // 8, 8), (width // 4, 2, 2))
    return tuple(t for k in range(count) for t in make_adamw(forms[k % len(forms)], generator))


def make_rope(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    angle = torch.rand((shape[1], shape[3] // 2), generator=generator)
    return torch.randn(shape, generator=generator), angle.cos(), angle.sin()


LISTS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (160, 4096), "odd": (148, 3989)},
    "cuda": {"aligned": (160, 4096), "odd": (148, 3989)},
}

CASES = (
    KernelCase("relu", relu, normal(same), ROWS),
    KernelCase("tanh", tanh, normal(same), ROWS),
    KernelCase("bias_gelu", bias_gelu, normal(same, last), ROWS),
    KernelCase("gelu_tanh", gelu_tanh, normal(same), ROWS),
    KernelCase("gelu_backward", gelu_backward, normal(same, same), ROWS),
    KernelCase("swiglu_gate", swiglu_gate, normal(same, same), ROWS),
    KernelCase("residual_chain", residual_chain, normal(same, same, last, last), ROWS),
    KernelCase("clamp_where", clamp_where, normal(same, same), ROWS),
    KernelCase("int_to_float", int_to_float, make_levels, ROWS),
    KernelCase("adamw_step", adamw_step, make_adamw, ROWS),
    KernelCase("adamw_list", adamw_list, make_adamw_list, LISTS),
    KernelCase("rope", rope, make_rope, HEADS),
)
