"""Programs whose tensors are blocks of the pool: results that somebody holds stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import torch_mlc
from benchmarks.memory import peak_of
from torch_mlc.codegen.host.memory import blocks
from torch_mlc.codegen.host.memory.blocks import LEAST_BLOCK
from torch_mlc.runtime.pool import ops
from torch_mlc.runtime.pool.pool import POOL

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, COLUMNS = 2304, 1024  # 9 MiB of float32


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    POOL.release()
    yield
    POOL.spare = None
    POOL.release()


def chain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x @ w) * 2
    return y, y.softmax(-1) - 1


@pytest.mark.parametrize("host", ["python", "native"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_that_are_held_stay_as_they_are(host: str, dynamic: bool) -> None:
    compiled = torch.compile(chain, backend="mlc", dynamic=dynamic, options={"host_program": host})
    w = torch.randn(COLUMNS, COLUMNS)
    held = []
    for k in range(6):
        x = torch.randn(ROWS + (k if dynamic else 0), COLUMNS)
        results = compiled(x, w)
        if k % 2:
            held.append((chain(x, w), results))
        del results
    for wanted, found in held:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    stats = torch_mlc.memory_stats()
    assert stats.misses and stats.held == stats.idle + 2 * sum(f[0].nbytes for _, f in held)
    assert dynamic or stats.hits


def libraries(x: Tensor, w: Tensor, image: Tensor, filters: Tensor) -> tuple[Tensor, ...]:
    product = torch.addmm(x[:, :1], x, w)
    values, places = torch.topk(product.cumsum(1), 900, 1)
    return product, values, places, torch.nn.functional.conv2d(image, filters)


@pytest.mark.parametrize("host", ["python", "native"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_of_libraries_are_blocks(host: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the values, strides and storages of eager, however large a call's tensors are. In the first call of a
    program torch looks at its ops, which are then called as they are."""
    monkeypatch.setattr(blocks, "LEAST_WATCHED", LEAST_BLOCK)
    monkeypatch.setattr(ops, "LEAST_WATCHED", LEAST_BLOCK)
    compiled = torch.compile(libraries, backend="mlc", dynamic=dynamic, options={"host_program": host})
    w, filters = torch.randn(COLUMNS, COLUMNS), torch.randn(8, 8, 3, 3)
    for call_number, rows in enumerate((ROWS, ROWS, ROWS, *((5, 700) if dynamic else ()))):
        x, image = torch.randn(rows, COLUMNS), torch.randn(4, 8, rows, 130).to(memory_format=torch.channels_last)
        wanted, found = (call(x, w, image, filters) for call in (libraries, compiled))
        places = POOL.places()
        for a, b in zip(wanted, found, strict=True):
            assert a.stride() == b.stride() and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
            assert a.dtype == b.dtype and not b._is_view()
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-3)
            assert b.nbytes < LEAST_BLOCK or b.data_ptr() in places or not call_number
    assert torch_mlc.memory_stats().hits


def test_sizes_that_change_find_blocks_of_near_sizes() -> None:
    """Intermediates and what is saved for the backward do; what the caller gets has a storage of its own size."""

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh((x @ a).softmax(-1) @ b).sum(-1)

    a, b = (torch.randn(COLUMNS, COLUMNS, requires_grad=True) for _ in range(2))
    compiled = torch.compile(f, backend="mlc", dynamic=True, options={"cpu_pool": "64MiB"})
    for _ in range(3):
        compiled(torch.randn(ROWS, COLUMNS), a, b).sum().backward()
    before = torch_mlc.memory_stats()
    for rows in (ROWS - 3, ROWS - 20, ROWS - 7):
        x = torch.randn(rows, COLUMNS)
        result = compiled(x, a, b)
        held = torch_mlc.memory_stats()
        assert held.held - held.idle >= 2 * x.nbytes  # saved
        result.sum().backward()
        assert result.untyped_storage().nbytes() == result.nbytes
        assert a.grad.untyped_storage().nbytes() == a.grad.nbytes
    after = torch_mlc.memory_stats()
    assert after.misses == before.misses and after.hits > before.hits


def test_training_uses_the_memory_of_the_step_before() -> None:
    model = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), nn.GELU(), nn.LayerNorm(COLUMNS), nn.Linear(COLUMNS, COLUMNS))
    x = torch.randn(ROWS, COLUMNS)
    model(x).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    compiled = torch.compile(model, backend="mlc")
    for k in range(4):
        model.zero_grad(set_to_none=True)
        compiled(x).square().mean().backward()
        for p, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
        if k == 1:
            before = torch_mlc.memory_stats()
    after = torch_mlc.memory_stats()
    assert after.hits > before.hits and after.held <= before.peak * 1.04


def test_threads_share_the_pool() -> None:
    compiled = torch.compile(chain, backend="mlc", options={"host_program": "native"})
    w = torch.randn(COLUMNS, COLUMNS)
    compiled(torch.randn(ROWS, COLUMNS), w)

    def run(seed: int) -> None:
        x = torch.full((ROWS, COLUMNS), float(seed)) / COLUMNS
        wanted = chain(x, w)
        for _ in range(8):
            torch.testing.assert_close(compiled(x, w), wanted, rtol=1e-5, atol=1e-5)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))


def test_an_exception_loses_no_block() -> None:
    def raising(x: Tensor, i: Tensor) -> Tensor:
        return (torch.relu(x) @ x.T)[i].softmax(-1)

    compiled = torch.compile(raising, backend="mlc")
    x = torch.randn(ROWS, COLUMNS)
    compiled(x, torch.arange(ROWS))
    for _ in range(3):
        with pytest.raises(IndexError):
            compiled(x, torch.full((ROWS,), ROWS + 5))
    stats = torch_mlc.memory_stats()
    assert stats.held == stats.idle


def test_no_pool_where_none_is_asked_for() -> None:
    compiled = torch.compile(chain, backend="mlc", options={"cpu_pool": 0})
    for _ in range(3):
        compiled(torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS, COLUMNS))
    assert torch_mlc.memory_stats().blocks == 0


@pytest.mark.parametrize("rows", [64, 256, 500])
def test_models_that_the_c_library_serves_hold_no_more_than_without_a_pool(rows: int) -> None:
    """What autograd, other ops and the program itself hold beside blocks is most at other times of a step than they
    are: kept blocks would be added to it."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(COLUMNS, COLUMNS), nn.GELU(), nn.LayerNorm(COLUMNS))]
    model, x = nn.Sequential(*layers), torch.randn(rows, COLUMNS)
    compiled = torch.compile(model, backend="mlc")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(x).square().mean().backward()

    peaks = []
    for POOL.spare in (None, 0):
        POOL.release()
        for _ in range(3):
            step()
        model.zero_grad(set_to_none=True)
        peaks.append(peak_of(step, "cpu"))
    assert peaks[0] == peaks[1] > 3 * COLUMNS * COLUMNS * 4
