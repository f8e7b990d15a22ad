"""Short rows that each program of their readers makes again: norms in front of products with a vector, on GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

Function = Callable[..., Any]
# Rows enough for a GPU of 132 multiprocessors to read a matrix; a vector of no power of two.
N, K = 304, 24
SM90 = gpu_target("cuda:sm_90")


def rms(x: Tensor, w: Tensor) -> Tensor:
    """As models write it: in float32 at least, rounded, and then the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, w, 1e-5)


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    """A variance that is written out."""
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + 1e-5) * w


def one(norm: Function) -> Function:
    return lambda x, w, a: F.linear(norm(x, w), a)


def biased(norm: Function) -> Function:
    return lambda x, w, a, c: F.linear(norm(x, w), a, c)


def several(norm: Function) -> Function:
    """Queries, keys and values."""
    return lambda x, w, a, b: (F.linear(norm(x, w), a), F.linear(norm(x, w), b), F.linear(norm(x, w), a[:280]))


def gated(norm: Function) -> Function:
    def fn(x: Tensor, w: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = norm(x, w)
        return F.silu(F.linear(y, a)) * F.linear(y, b) + c

    return fn


def given(
    fn: Function, rows: tuple[int, ...] = (1, 1), n: int = N, k: int = K, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """What a function takes: a row, a norm's weight, matrices and a bias."""
    torch.manual_seed(0)
    made = {"x": torch.randn(*rows, k), "w": torch.rand(k) + 0.5, "a": torch.randn(n, k) / 8,
            "b": torch.randn(n, k) / 8, "c": torch.randn(n)}  # fmt: skip
    return [made[name].to(dtype) for name in inspect.signature(fn).parameters]


def fused(fn: Function, inputs: list[Tensor], device: str = "cuda:0", dynamic: bool = False) -> Fusion:
    def in_order(*args: Tensor) -> Any:
        # Dynamo numbers inputs in the order in which they are first looked at.
        assert all(x.dim() >= 0 for x in args)
        return fn(*args)

    (gm,) = found = capture(in_order, inputs, dynamic=dynamic)
    if device != "cpu":
        retarget(found, device)
    return fuse(run_passes(GRAPH_PASSES, import_graph(gm), USUAL))


def kernels(fusion: Fusion) -> list[TensorFunction]:
    return [fusion.functions[n.function] for n in fusion.graph.nodes if isinstance(n, CallTensor)]


def rows_again(fusion: Fusion) -> int:
    """Kernels that make a row for each of their rows, and multiply with it."""
    return sum(len([s for s in f.stages if s.monoid is not None]) > 1 and bool(f.rows) for f in kernels(fusion))


@pytest.fixture
def check(reference: Function) -> Callable[..., Fusion]:
    """``check(fn, inputs, tolerance=)``: the functions for a GPU, by the oracle, against float64."""
    kind = type(reference(lambda x: x + 1, [torch.ones(1)]))

    def run(fn: Function, inputs: list[Tensor], tolerance: float = 2e-5) -> Fusion:
        fusion = fused(fn, inputs)
        nests = {name: lower_to_loops(f) for name, f in fusion.functions.items()}
        for nest in nests.values():
            verify(nest)
        wanted = fn(*(t.double() for t in inputs))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for a, b in zip(kind(fusion, nests).run(inputs), wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance, equal_nan=True)
        return fusion

    return run


@pytest.mark.parametrize("norm", [rms, layer, by_hand])
@pytest.mark.parametrize(
    ("program", "launches"), [(one, 1), (biased, 1), (several, 3), (gated, 1)], ids=lambda x: getattr(x, "__name__", "")
)
def test_norms_have_no_kernel(check: Callable[..., Fusion], norm: Function, program: Function, launches: int) -> None:
    fusion = check(program(norm), given(program(norm)))
    assert len(kernels(fusion)) == launches == rows_again(fusion)


@pytest.mark.parametrize("norm", [rms, layer])
@pytest.mark.parametrize(("n", "k"), [(265, 16), (321, 40)])
def test_sizes(check: Callable[..., Fusion], norm: Function, n: int, k: int) -> None:
    assert rows_again(check(gated(norm), given(gated(norm), n=n, k=k))) == 1


@pytest.mark.parametrize("norm", [rms, layer])
def test_half_types(check: Callable[..., Fusion], norm: Function) -> None:
    assert rows_again(check(gated(norm), given(gated(norm), dtype=torch.bfloat16), tolerance=3e-2)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-30, 0.0])
def test_special_values(check: Callable[..., Fusion], value: float) -> None:
    inputs = given(one(rms))
    inputs[0][..., 3] = value
    if value == 0.0:
        inputs[0].zero_()
    assert rows_again(check(one(rms), inputs)) == 1


def stream(x: Tensor, w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """A product that a residual is added to, and one of the sum's norm."""
    h = x + F.linear(x, a)
    return h, F.linear(rms(h, w), a)


def test_a_residual_is_stored_once(check: Callable[..., Fusion]) -> None:
    """By the product that it is added to; what follows reads it and nothing that was made for its norm alone."""
    fusion = check(stream, given(stream, n=272, k=272), tolerance=2e-4)
    first, second = kernels(fusion)
    assert len(first.outputs) == 1 and len(second.outputs) == 1 and rows_again(fusion) == 1


def test_half_residual_is_read_as_it_was_stored() -> None:
    """And not its squares in float32, which the product would have to write for the norm."""
    first, second = kernels(fused(stream, given(stream, n=N, k=N, dtype=torch.bfloat16)))
    assert [o.buffer.dtype.torch for o in first.outputs] == [torch.bfloat16]
    assert len(second.inputs) == 3


def kept(x: Tensor, w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    y = rms(x, w)
    return y, F.linear(y, a)


def ordered_too(x: Tensor, w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    y = rms(x, w)
    return y.sort(-1).values, F.linear(y, a)


def added(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
    y = rms(x, w)
    return y + F.linear(y, a)


@pytest.mark.parametrize("fn", [kept, ordered_too, added])
def test_rows_that_others_need(fn: Function) -> None:
    """A norm that is a result itself, that a library reads, or an epilogue."""
    assert not rows_again(fused(fn, given(fn, n=N, k=N)))


def test_rows_that_stay() -> None:
    """Several rows, sizes that are not known, and CPUs."""
    fn = one(rms)
    assert not rows_again(fused(fn, given(fn, (1, 64))))
    assert not rows_again(fused(fn, given(fn), dynamic=True))
    assert not rows_again(fused(fn, given(fn), device="cpu"))


def test_rows_that_cost_more_than_a_launch() -> None:
    """Where products wait for instructions, and not for memory, they do not make rows as well."""

    def expensive(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
        y = rms(x, w)
        for _ in range(6):
            y = torch.sin(torch.exp(torch.tanh(y)))
        return F.linear(y, a)

    assert rows_again(fused(one(rms), given(one(rms), n=8192, k=4096))) == 1
    assert not rows_again(fused(expensive, given(expensive, n=8192, k=4096)))


def test_programs_have_several_rows() -> None:
    """The row is made once for them, and matrices are asked for before it is there."""
    fn = gated(rms)
    (function,) = kernels(fused(fn, given(fn, n=8192, k=2048, dtype=torch.bfloat16)))
    nest = default_schedule(lower_to_loops(function), SM90).nest
    assert {k for k, _ in nest.annotations if k.startswith("early:")} == {f"early:{b.name}" for b in nest.params[:4]}
