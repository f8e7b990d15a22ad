"""MLC_VERIFY=1: kernels are compared with their definitions when they are built; wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from torch_mlc.codegen.host.steps.program import HostProgram
from torch_mlc.codegen.llvm.functions import functions
from torch_mlc.dynamo_backend.compiling import host_passes, kernels
from torch_mlc.dynamo_backend.compiling.host_passes import HOST, HOST_PASSES
from torch_mlc.dynamo_backend.converters.index import scatter
from torch_mlc.dynamo_backend.verify import verify_kernel as verify_kernel_module
from torch_mlc.dynamo_backend.verify.verify_kernel import passed, sizes_to_try, tiles_of, verify_kernel
from torch_mlc.ir.nest.loops import Buffer, Loop, LoopNest
from torch_mlc.ir.passes import Pass, Plain
from torch_mlc.runtime.targets import cpu_target

CHECKED = {"verify": 1, "cache": False}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs of each kernel were compared."""
    counts: list[int] = []

    def counted(*args: Any) -> int:
        counts.append(verify_kernel(*args))
        return counts[-1]

    monkeypatch.setattr(kernels, "verify_kernel", counted)
    return counts


def program(x: Tensor) -> Tensor:
    return torch.tanh(x).softmax(-1)


def test_a_wrong_kernel_is_named_with_index_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functions.HANDLERS, "tanh", functions.HANDLERS["sin"])
    run = torch.compile(program, backend="mlc", options=CHECKED, dynamic=True)
    with pytest.raises(BackendCompilerFailed, match="differs from its definition") as e:
        run(torch.randn(7, 33) * 3)
    for words in ("kernel ", "aten.tanh.default", "test_verify_kernel.py", " at [", "compiled ", "s"):
        assert words in str(e.value)


def test_a_kernel_that_writes_beside_its_elements_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(function: Any, nest: LoopNest, *rest: Any) -> int:
        """The definition is of one element less than the kernel makes."""
        out = nest.buffer(nest.outputs[0])
        smaller = replace(out, shape=(out.shape[0] - 1,))
        params = tuple(smaller if b.name == out.name else b for b in nest.params)
        (loop,) = nest.body
        assert isinstance(loop, Loop)
        return verify_kernel(
            function, replace(nest, params=params, body=(replace(loop, extent=loop.extent - 1),)), *rest
        )

    monkeypatch.setattr(kernels, "verify_kernel", shorter)
    with pytest.raises(BackendCompilerFailed, match="which is none of its elements"):
        torch.compile(lambda x: x + 1, backend="mlc", options=CHECKED)(torch.ones(9))


def cross(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t)


def test_an_arena_whose_tensors_share_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def heaped(program: HostProgram) -> HostProgram:
        """Everything at the begin of the arena."""
        arena = program.arena
        assert arena is not None
        return replace(program, arena=replace(arena, offsets=dict.fromkeys(arena.offsets, sympy.S.Zero)))

    def alternate(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.softmax(0).softmax(1)
        return x.sum(0)

    monkeypatch.setattr(host_passes, "HOST_PASSES", (*HOST_PASSES, Pass("heap", HOST, Plain(heaped))))
    with pytest.raises(BackendCompilerFailed, match="live at the same time"):
        torch.compile(alternate, backend="mlc", options=CHECKED)(torch.randn(6, 8))


RIGHT: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "softmax": (program, (torch.randn(6, 40),)),
    "norm of halves": (lambda x: F.layer_norm(x, (x.shape[-1],)), (torch.randn(5, 24).bfloat16(),)),
    "gather": (lambda x, i: x[i].sum(-1), (torch.randn(11, 8), torch.tensor([3, 0, 10, 3]))),
    "scatter": (lambda x, i, s: x.index_add(0, i, s), (torch.zeros(9, 4), torch.tensor([1, 1, 8]), torch.ones(3, 4))),
    "scan": (lambda x: x.cumsum(0).relu(), (torch.randn(17, 5),)),
    "loss": (cross, (torch.randn(10, 19), torch.randint(0, 19, (10,)))),
    "strides": (lambda x: x.t().exp() + 1, (torch.randn(6, 12)[:, ::2],)),
    "strides of one element": (lambda x, y: x.sum(-1) + y.exp(), (torch.randn(3, 1)[:, ::2], torch.randn(2)[::2])),
    "argmax": (lambda x: x.argmax(-1), (torch.randn(6, 12),)),
    "table": (lambda a, b: (a.mul_(0.5), b.mul_(0.5)), (torch.randn(40), torch.randn(56))),
    "poles": (lambda x: torch.logit(torch.sigmoid(x)), (torch.arange(-5, 6, dtype=torch.int8),)),
    "bools": (lambda x: (x > 0).any(-1), (torch.randn(6, 12),)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass(name: str, dynamic: bool, runs: list[int]) -> None:
    function, inputs = RIGHT[name]
    given = [x.clone() if x.is_contiguous() and x.numel() > 1 else x for x in inputs]
    wanted = function(*(x.clone() for x in given))
    got = torch.compile(function, backend="mlc", options=CHECKED, dynamic=dynamic)(*given)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    assert runs and min(runs) >= (6 if dynamic else 1)


def test_sizes_that_do_not_come_together_are_not_tried(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes are alike that no guard ties: drawn apart there is nothing to compare with, nor where the kernel is too
    large for the oracle, which would say so."""
    monkeypatch.setattr(scatter, "_fits", lambda shape, to: True)
    x, v, i = torch.randn(40, 13, 40), torch.randn(40, 13), torch.tensor([3, 0, 7])
    run = torch.compile(lambda x, i, v: torch.index_put(x, (i,), v), backend="mlc", options=CHECKED)
    for n in (5, 13):
        given = x[:, :, :n].clone(), i, v.t()[:n].t()[0].clone()
        torch.testing.assert_close(run(*given), torch.index_put(given[0], (i,), given[2]))
    assert runs


def test_inputs_with_gaps_keep_them_where_they_are_moved_by_a_rounding(runs: list[int]) -> None:
    """What ATen's ops are given in the place of a kernel has the strides that the kernel was made for."""

    def normed(x: Tensor, mean: Tensor, var: Tensor, w: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, w, training=True, eps=0.1).sum(0, dtype=torch.float64)

    x, stats, w = torch.randn(128, 128), torch.rand(2, 128), torch.randn(256)[::2]
    compiled = torch.compile(normed, backend="mlc", options={**CHECKED, "numerics": "eager"}, dynamic=True)
    torch.testing.assert_close(compiled(x, *stats.clone(), w), normed(x, *stats.clone(), w), rtol=1e-4, atol=1e-4)
    assert runs


def test_sizes_at_which_there_is_no_such_extent_are_not_tried(runs: list[int]) -> None:
    """An extent is a division by one that is zero there, or strides are wider than the extent that tracing found."""

    def blocks(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        a = x.unflatten(3, (-1, 3))
        return (a @ y).argmax(-1) * 0 + (a @ z).sum(-1)

    compiled = torch.compile(blocks, backend="mlc", options=CHECKED)
    y, z = torch.randn(3, 8), torch.randn(3, 9)[:, :8]
    for shape in ((3, 5, 6, 6), (3, 13, 3, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x, y, z), blocks(x, y, z))
    half = torch.compile(lambda x: x.chunk(2, 3)[1] + 1, backend="mlc", options=CHECKED, dynamic=True)
    x = torch.randn(2, 2, 2, 3)
    torch.testing.assert_close(half(x), x.chunk(2, 3)[1] + 1)
    assert runs


def test_results_are_as_exact_as_the_coarsest_type_that_they_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them: a result of float64 that was float32 on its way is compared as such, one beside it is not."""
    nests: list[LoopNest] = []

    def seen(function: Any, nest: LoopNest, *rest: Any) -> int:
        nests.append(nest)
        return verify_kernel(function, nest, *rest)

    monkeypatch.setattr(kernels, "verify_kernel", seen)
    x = torch.randn(5, 7, dtype=torch.float64)
    for fn in (
        lambda x: (torch.sigmoid(x.float()) * x, x * 2),
        lambda x: ((x.float().sum(-1).exp() + x.sum(-1)), x * 2),
    ):
        torch._dynamo.reset()
        nests.clear()
        torch.compile(fn, backend="mlc", options=CHECKED)(x)
        found = [passed(nest)[out] for nest in nests for out in nest.outputs]
        assert sorted(torch.float32 in kinds for kinds in found) == [False, True]
        assert all(torch.float64 in kinds for kinds in found)


def test_the_sizes_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, int]]] = []

    def keep(function: Any, nest: Any, scheduled: Any, *rest: Any) -> int:
        seen.append(list(sizes_to_try(nest, scheduled)))
        tiles = tiles_of(scheduled)
        assert any(t % cpu_target().lanes(4) == 0 for t in tiles)
        tried = {n for sizes in seen[-1] for n in sizes.values()}
        assert {t + d for t in tiles for d in (-1, 0, 1)} - {0, 1} <= tried | {0, 1}
        return verify_kernel(function, nest, scheduled, *rest)

    monkeypatch.setattr(kernels, "verify_kernel", keep)
    torch.compile(lambda x: x * 2 + 1, backend="mlc", options=CHECKED, dynamic=True)(torch.randn(50))
    assert len(seen[0]) >= 6


def test_what_cancels_whatever_the_inputs_are_is_right(runs: list[int]) -> None:
    """A mean of what has a mean of zero is all rounding, and no move of its inputs moves it."""
    x = torch.randn(4)[None].expand(3, 4).contiguous()
    compiled = torch.compile(
        lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1).mean(-1),
        backend="mlc", dynamic=True, options={"verify": 1, "cache": False},
    )  # fmt: skip
    torch.testing.assert_close(compiled(x), torch.zeros(3), atol=1e-6, rtol=0)
    assert runs


def test_memory_is_made_up_to_a_limit(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides are products of sizes, and few elements may lie far apart."""
    spans: list[int] = []
    make = verify_kernel_module._values

    def values(b: Buffer, count: int, *rest: Any) -> Tensor:
        spans.append(count)
        return make(b, count, *rest)

    monkeypatch.setattr(verify_kernel_module, "_values", values)
    monkeypatch.setattr(verify_kernel_module, "MOST_SPAN", 2000)
    x = torch.randn(6, 5, 16)[:, :, ::2]
    compiled = torch.compile(lambda x: x.exp() + 1, backend="mlc", dynamic=True, options=CHECKED)
    torch.testing.assert_close(compiled(x), x.exp() + 1)
    assert runs and runs[0] >= 6 and 500 < max(spans) <= 2000


def test_sums_of_symbolic_length_are_made_up_to_a_limit(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a long sum decides its digits. Lengths that are fixed are verified all the same."""
    terms: list[int] = []
    terms_of = verify_kernel_module._terms
    monkeypatch.setattr(verify_kernel_module, "_terms", lambda *a: terms.append(terms_of(*a)) or terms[-1])
    monkeypatch.setattr(verify_kernel_module, "MOST_TERMS", 12)
    x = torch.randn(6, 50)
    compiled = torch.compile(lambda x: x.exp().sum(1), backend="mlc", dynamic=True, options=CHECKED)
    torch.testing.assert_close(compiled(x), x.exp().sum(1))
    assert max(terms) > 12 and 0 < runs[0] < len(terms)
    torch._dynamo.reset()
    runs.clear()
    compiled = torch.compile(lambda x: x.exp().sum(1), backend="mlc", dynamic=False, options=CHECKED)
    torch.testing.assert_close(compiled(x), x.exp().sum(1))
    assert runs and runs[0] >= 1


def test_indices_that_nobody_can_judge_are_left(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the oracle's points ATen's ops are asked, and they read what lies beside: a refusal is right there."""
    monkeypatch.setattr(verify_kernel_module, "ORACLE_POINTS", 20)

    def f(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        return x.masked_scatter(mask, source).exp()

    x, mask, source = torch.randn(9, 7), torch.rand(9, 7) > 0.3, torch.randn(63)
    compiled = torch.compile(f, backend="mlc", dynamic=True, options=CHECKED)
    torch.testing.assert_close(compiled(x, mask, source), f(x, mask, source))
    assert runs and runs[0] >= 1
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(x, mask | True, source[:40])
