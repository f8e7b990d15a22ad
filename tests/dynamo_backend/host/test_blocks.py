"""Programs whose tensors are blocks of the pool: results that somebody holds stay what they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_mlc
from torch_mlc.runtime.pool.pool import POOL

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, COLUMNS = 512, 1024  # 2 MiB of float32


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
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            x = torch.full((ROWS, COLUMNS), float(seed)) / COLUMNS
            wanted = chain(x, w)
            for _ in range(8):
                torch.testing.assert_close(compiled(x, w), wanted, rtol=1e-5, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


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
