"""Ops whose results lie in blocks: the same results, in memory that is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from torch_mlc.codegen.host.steps.ops import MAKERS, out_overload
from torch_mlc.ir.graph.effects import resolve_op
from torch_mlc.runtime.pool import ops
from torch_mlc.runtime.pool.ops import in_blocks
from torch_mlc.runtime.pool.pool import POOL

SMALL = 1 << 20  # bytes of the smallest block here


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ops, "LEAST_WATCHED", SMALL)
    monkeypatch.setattr(POOL, "least", SMALL)
    POOL.release()
    yield
    POOL.release()


def last(*size: int) -> Tensor:
    return torch.randn(size).to(memory_format=torch.channels_last)


def conv(x: Tensor, w: Tensor, groups: int = 1) -> tuple[Any, ...]:
    n = x.dim() - 2
    return x, w, None, [1] * n, [1] * n, [1] * n, False, [0] * n, groups


def gradient(x: Tensor, w: Tensor) -> tuple[Any, ...]:
    return x, x, w, [w.shape[0]], *conv(x, w)[3:], [True, True, False]


A, B = torch.randn(520, 512), torch.randn(512, 530)
T, U = torch.randn(3, 300, 310), torch.randn(3, 310, 320)
IMAGE, FILTERS, Q = torch.randn(2, 16, 100, 101), torch.randn(16, 16, 3, 3), torch.randn(2, 4, 600, 64)
CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "mm": ("mm.default", (A, B)),
    "mm transposed": ("mm.default", (B.t(), A.t())),
    "addmm": ("addmm.default", (torch.randn(530), A, B)),
    "bmm": ("bmm.default", (T, U)),
    "baddbmm": ("baddbmm.default", (torch.randn(320), T, U)),
    "cumsum": ("cumsum.default", (last(2, 16, 100, 101), 1)),
    "cat": ("cat.default", ([last(2, 16, 100, 101), IMAGE], 1)),
    "topk": ("topk.default", (torch.randn(600, 600), 500, 1)),
    "index": ("index.Tensor", (A, [torch.randint(0, 520, (600,))])),
    "avg_pool2d": ("avg_pool2d.default", (last(2, 16, 100, 101), [2, 2], [1, 1])),
    "max_pool2d": ("max_pool2d_with_indices.default", (last(2, 16, 100, 101), [2, 2], [1, 1])),
    "conv1d": ("convolution.default", conv(torch.randn(2, 32, 5000), torch.randn(32, 1, 3), 32)),
    "conv2d": ("convolution.default", conv(IMAGE, FILTERS)),
    "conv2d channels last": ("convolution.default", conv(last(2, 16, 100, 101), FILTERS)),
    "conv2d gradient": ("convolution_backward.default", gradient(last(2, 16, 100, 101), FILTERS)),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu.default", (Q, Q, Q)),
    "fft": ("_fft_r2c.default", (torch.randn(600, 1000), [1], 0, True)),
}


def layouts(results: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple((t.shape, t.stride(), t.dtype, False) for t in results if t is not None)


def row(results: Any) -> tuple[Tensor | None, ...]:
    return results if isinstance(results, tuple) else (results,)


def made(call: Callable[[], Any]) -> int:
    """Bytes that torch asks its allocator for."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_op_in_memory_that_is_there(name: str) -> None:
    target, args = f"aten::{CASES[name][0]}", CASES[name][1]
    op = resolve_op(target)._op
    call, wanted = in_blocks(target, op), row(op(*args))
    for _ in range(2):
        found = row(call(*args, blocks=layouts(wanted)))
        for a, b in zip(wanted, found, strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
            assert not b._is_view() and not b.requires_grad
            assert b.nbytes < SMALL or b.untyped_storage().data_ptr() in POOL.places()
        del found, b
    assert POOL.stats().hits
    large = sum(t.nbytes for t in wanted if t is not None and t.nbytes >= SMALL)
    plain = made(lambda: op(*args))
    assert made(lambda: call(*args, blocks=layouts(wanted))) <= plain - large


@pytest.mark.parametrize("target", [*sorted(MAKERS), "aten::embedding_dense_backward.default", "mlc::x.y"])
def test_what_only_copies_is_not_used(target: str) -> None:
    assert out_overload(target) is None


def test_more_than_memory_is_left_to_the_op() -> None:
    """Fakes, subclasses, what autograd notes, and what modes or transforms see."""

    class Sub(torch.Tensor):
        pass

    call = in_blocks("aten::mm.default", torch.mm)
    blocks = layouts((A @ B,))
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(A), mode.from_tensor(B)
    assert call(*fakes, blocks=blocks).shape == (520, 530)
    assert type(call(A.as_subclass(Sub), B, blocks=blocks)) is Sub
    assert call(A.clone().requires_grad_(), B, blocks=blocks).grad_fn is not None
    stacked = torch.stack((A, -A))
    assert torch.equal(torch.func.vmap(lambda a: call(a, B, blocks=blocks))(stacked), stacked @ B)
    assert POOL.stats().blocks == 0


def test_inference_and_errors() -> None:
    for target, op, args in (
        ("aten::mm.default", torch.mm, (A, B)),
        ("aten::convolution.default", torch.ops.aten.convolution.default._op, conv(last(2, 16, 100, 101), FILTERS)),
    ):
        call = in_blocks(target, op)
        with torch.inference_mode():
            assert call(*args, blocks=layouts((op(*args),))).is_inference()
        with pytest.raises(RuntimeError):
            call(args[0], torch.randn(7), *args[2:], blocks=layouts((op(*args),)))
        assert torch._C._len_torch_dispatch_stack() == 0 and POOL.stats().idle == POOL.stats().held
