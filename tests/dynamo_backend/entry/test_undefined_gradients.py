"""Gradients that autograd does not define, and tokens that order effects: both reach a program as None."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.verify.verify_graph import verified
from torch_mlc.runtime.settings.options import Options

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Halved(torch.autograd.Function):
    """Two results of two arguments; what has no gradient is None, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 0.5, y.sin()

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, None]:
        return (None if first is None else first * 0.5), None


class Ranked(torch.autograd.Function):
    """A result that has no gradient beside one that has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        order = x.abs().argsort(-1).to(x.dtype)
        ctx.mark_non_differentiable(order)
        return x.exp(), order

    @staticmethod
    def backward(ctx: Any, values: Tensor, order: Tensor) -> Tensor:
        return values * 2


def well(x: Tensor) -> Tensor:
    """A matrix that is far from singular, with distinct eigenvalues."""
    return x + torch.diag(torch.arange(1.0, len(x) + 1) * 4).to(x.dtype)


def magnitudes(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Vectors of a decomposition are known but for a factor."""
    return tuple(r.abs() for r in results)


REAL_OR_COMPLEX: dict[str, Callable[[Tensor], Any]] = {
    "eig": lambda x: torch.linalg.eig(well(x)),
    "eigvals": lambda x: (torch.linalg.eigvals(well(x)),),
    "eigh": lambda x: torch.linalg.eigh(well(x) + well(x).mH),
    "svd": lambda x: magnitudes(torch.linalg.svd(well(x), full_matrices=False)),
    "qr": lambda x: magnitudes(torch.linalg.qr(well(x))),
    "inv": lambda x: (torch.linalg.inv(well(x)), x * 2),
    "solve": lambda x: (torch.linalg.solve(well(x), x), x.sin()),
    "slogdet": lambda x: torch.linalg.slogdet(well(x)),
    "lu_factor": lambda x: torch.linalg.lu_factor_ex(well(x)),
    "cholesky": lambda x: torch.linalg.cholesky_ex(x @ x.mH + 9 * torch.eye(len(x)).to(x.dtype)),
    "unbind": lambda x: (x * 2).unbind(1),
    "function": lambda x: Halved.apply(x, x * 3),
    "not differentiable": lambda x: Ranked.apply(x),
    "detached": lambda x: (x.sin(), x.detach() * 2, (x * 3).detach()),
    "negated": lambda x: ((x + 1j).conj().imag, torch._neg_view(x * 2), x * x),
}
ONLY_REAL: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: (x * 2).topk(2),
    "cummax": lambda x: (x * 2).cummax(-1),
    "median": lambda x: (x * 2).median(-1),
    "lstsq": lambda x: torch.linalg.lstsq(well(x), x)[:2],
}
# What is given None, or has None among its gradients, in every form of a host program; the others in one.
BOTH = ("eig", "eigvals", "inv", "function", "negated")
DTYPES = (torch.float64, torch.complex128)
CASES = [
    *((name, dtype, host) for name in BOTH for dtype in DTYPES for host in ("python", "native")),
    *((name, torch.complex128, "native") for name in REAL_OR_COMPLEX if name not in BOTH),
    *((name, torch.float64, "native") for name in ONLY_REAL),
]


def gradients(fn: Callable[[Tensor], Any], call: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """The gradient of the argument for each result alone, and for all at once; zero where there is none."""
    flowing = [k for k, r in enumerate(fn(x)) if r.requires_grad]
    found: list[Tensor] = []
    for chosen in (*([k] for k in flowing), flowing):
        results = call(x)
        loss = sum(results[k].abs().square().sum() for k in chosen)
        (grad,) = torch.autograd.grad(loss, x, allow_unused=True)
        found.append(torch.zeros_like(x) if grad is None else grad)
    return found


@pytest.mark.parametrize(("name", "dtype", "host"), CASES, ids=str)
def test_each_result_alone(name: str, dtype: torch.dtype, host: str, tmp_path: Path) -> None:
    """Compiled, and then found in the cache."""
    fn = {**REAL_OR_COMPLEX, **ONLY_REAL}[name]
    x = torch.randn(4, 4, dtype=dtype, requires_grad=True)
    wanted = gradients(fn, fn, x)
    for _ in range(2):
        torch._dynamo.reset()
        call = torch.compile(fn, backend="mlc", options={"host_program": host, "cache_dir": str(tmp_path)})
        torch.testing.assert_close(gradients(fn, call, x), wanted)


@pytest.mark.parametrize("name", ["eig", "function", "negated"])
def test_verified(name: str) -> None:
    """Every run is compared with ATen's."""
    fn, x = REAL_OR_COMPLEX[name], torch.randn(4, 4, dtype=torch.complex128, requires_grad=True)
    call = torch.compile(fn, backend="mlc", options={"verify": 2})
    torch.testing.assert_close(gradients(fn, call, x), gradients(fn, fn, x))


@pytest.mark.parametrize("host", ["python", "native"])
def test_an_argument_that_nothing_reads_may_be_none(host: str, trace: Callable[..., Any]) -> None:
    gm, x = trace(lambda x, y: (x.sin() * 2,), [torch.ones(3), torch.ones(3)]), torch.randn(3)
    call = compile_graph(gm, [x, x], options=Options(host_program=host, cache=False)).call
    assert call is not None
    for run in (call, verified(gm, call, lambda part: pytest.fail("nothing differs"), "main")):
        for other in (None, x, None):
            torch.testing.assert_close(run([x, other])[0], x.sin() * 2)
