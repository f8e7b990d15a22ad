"""Arithmetic of complex numbers is that of their parts, in kernels; where layouts differ, a library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc import explain

pytestmark = pytest.mark.usefixtures("fresh_compiler")

C64, C128 = torch.complex64, torch.complex128
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: torch.add(x, y, alpha=2 - 1j) + 3,
    "sub": lambda x, y: 1j - torch.sub(x, y, alpha=0.5),
    "mul": lambda x, y: x * y * (2 + 1j),
    "div": lambda x, y: x / y + x / 2j + 3 / y,
    "fused": lambda x, y: torch.addcdiv(torch.addcmul(x, x, y, value=2), x, y),
    "conj": lambda x, y: x.conj() * y + (x * y).conj(),
    "parts": lambda x, y: (x * y).real + (x - y).imag,
    "size": lambda x, y: (x.abs(), (x * y).angle(), x == y, x != x),
    "exp": lambda x, y: (x.exp() - y.log()).sigmoid(),
    "waves": lambda x, y: x.sin() * y.cosh() + y.cos() / x.sinh(),
    "sums": lambda x, y: ((x * y).sum(0), (x + y).mean(-1, keepdim=True), x.sum()),
    "broadcast": lambda x, y: x[:, None, :1].contiguous() * y + y[0],
    "real operand": lambda x, y: x * y.real.contiguous() + torch.arange(x.shape[1]),
    "joined": lambda x, y: torch.cat([x * 2, y, x], 1)[:, 2:].contiguous() + 1,
    "chosen": lambda x, y: torch.where(x.real > 0, x, y * 1j)[torch.tensor([1, 0, 1])],
    "padded": lambda x, y: torch.nn.functional.pad(x * y, (1, 2)),
    "views": lambda x, y: (x.t() * y.t()).t().view(-1)[None].expand(2, -1).contiguous() * 1j,
    "spectrum": lambda x, y: torch.fft.ifft(torch.fft.fft(x) * y),
    "scalars": lambda x, y: x * y.sum() + x.sum() * 2.5,
    "odd layouts": lambda x, y: x.t() * y.t().contiguous() + x[:, ::2].sum(),
}


@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_types_and_strides(name: str, dtype: torch.dtype) -> None:
    fn = FUNCTIONS[name]
    run = torch.compile(fn, backend="mlc", dynamic=False)
    for shape in ((5, 7), (5, 7), (1, 1)) if name not in ("chosen", "joined") else ((5, 7),):
        x, y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        expected, found = fn(x, y), run(x, y)
        torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
def test_gradients_of_numbers(dtype: torch.dtype) -> None:
    """The factor of a gradient is the conjugate of a number, of whose bit fake tensors know nothing."""

    def fn(z: Tensor) -> tuple[Tensor, ...]:
        known = torch.tensor(1 + 2j, dtype=C128)
        return z * 2j, (1 + 1j) / z - 3j, z ** (1 + 1j), known.conj() * z, known * z.real, (z.sum() * known).exp() * 1j

    z, grads = torch.randn(4, 3, dtype=dtype), []
    for run in (fn, torch.compile(fn, backend="mlc")):
        x = z.clone().requires_grad_()
        torch.manual_seed(1)
        results = run(x)
        grads.append([*results, *torch.autograd.grad(results, x, [torch.randn_like(r) for r in results])])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_gradients() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = x * y.conj() / (y * y + 2) + (x * 0.3).exp()
        return z.abs().sum() + (z.real * z.imag).mean()

    made = [torch.randn(6, 5, dtype=C128) for _ in range(2)]
    grads = []
    for fn in (loss, torch.compile(loss, backend="mlc")):
        x, y = (t.clone().requires_grad_() for t in made)
        fn(x, y).backward()
        grads.append((x.grad, y.grad))
    torch.testing.assert_close(grads[1], grads[0])


def test_a_chain_is_one_kernel_and_takes_no_numbers_apart_on_the_way() -> None:
    def rotate(x: Tensor, turn: Tensor) -> Tensor:
        q = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(q * turn + q.conj() * 0.5).flatten(-2)

    report = explain(rotate, torch.randn(3, 4, 8), torch.randn(4, 4, dtype=C64))
    (graph,) = report.graphs
    assert sum(k.calls for k in graph.kernels) == 1, report
    assert {c.op.split("::")[1] for c in graph.libraries} <= {"view_as_real.default", "view_as_complex.default"}, report


def test_numbers_that_overflow_on_the_way() -> None:
    x = torch.tensor([3e19 + 4e19j, 1e-30 + 1e-30j, -2e38 + 1e38j], dtype=C64)
    for fn in (torch.abs, lambda z: z / z, lambda z: (1 + 1j) / z):
        torch.testing.assert_close(torch.compile(fn, backend="mlc")(x), fn(x))
        torch.compiler.reset()


def test_symbolic_sizes() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return ((x * y).t() - 2j * y.t()).sum(0)

    run = torch.compile(fn, backend="mlc", dynamic=True)
    for shape in ((4, 5), (7, 3), (0, 3), (1, 9)):
        x, y = torch.randn(shape, dtype=C64), torch.randn(shape, dtype=C64)
        torch.testing.assert_close(run(x, y), fn(x, y), check_stride=True)
