"""Native host programs do what the same programs do as Python: results, layouts, shared memory, errors, threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from tests import warm_processes
from tests.versions import torch_mends_it
from torch_mlc.codegen.host.native.native import MOST_STACK
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import Options

Tensor = torch.Tensor
Function = Callable[..., Any]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def compiled(f: Function, host: str, **settings: Any) -> Function:
    torch._dynamo.reset()
    return torch.compile(f, backend="mlc", options={"host_program": host}, **settings)


def shared(results: Any, args: Any) -> list[list[bool]]:
    """Which results and arguments lie in the same storage."""
    flat = [t for t in torch.utils._pytree.tree_leaves((results, args)) if isinstance(t, Tensor)]
    where = [t.untyped_storage().data_ptr() for t in flat]
    return [[a == b for b in where] for a in where]


def same(f: Function, make: Callable[[], tuple[Any, ...]], *, calls: int = 2, **settings: Any) -> None:
    """Run a function both ways, a few times; values, types, layouts and shared memory agree, and Python ran nothing."""
    seen: dict[str, list[Any]] = {"python": [], "native": []}
    for host, results in seen.items():
        run = compiled(f, host, **settings)
        before = counters.snapshot()
        for seed in range(calls):
            torch.manual_seed(seed)
            args = make()
            torch.manual_seed(seed + 100)
            out = run(*args)
            leaves = torch.utils._pytree.tree_leaves((out, args))
            results.append((leaves, shared(out, args)))
        found = counters.since(before)
        assert found.get("native_refusals", 0) == 0
        assert (found.get("native_programs", 0) > 0) == (host == "native")
    for (a, memory_a), (b, memory_b) in zip(seen["python"], seen["native"], strict=True):
        assert memory_a == memory_b
        for x, y in zip(a, b, strict=True):
            if isinstance(x, Tensor):
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
                torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)
            else:
                assert x == y and type(x) is type(y)


def mlp(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    hidden = torch.nn.functional.gelu(torch.addmm(bias, x, a) * 2)
    return torch.softmax(hidden @ b, -1) + x.sum()


def test_products_and_kernels() -> None:
    same(mlp, lambda: (rand(33, 24), rand(24, 65), rand(65, 24), rand(65)))


def test_symbolic_sizes() -> None:
    sizes = iter([33, 40, 1, 57] * 2)

    def make() -> tuple[Tensor, ...]:
        n = next(sizes)
        return rand(n + 1, 24), rand(24, 65), rand(65, 24), rand(65)

    same(mlp, make, calls=4, dynamic=True)


def alternate(x: Tensor) -> Tensor:
    """Rows and columns in turn: kernels that cannot be one, with nothing between them but memory of their own."""
    for _ in range(3):
        x = x.softmax(0).softmax(1)
    return x.sum(0)


@pytest.mark.parametrize("host", ["python", "native"])
def test_an_arena_of_symbolic_sizes(host: str) -> None:
    gm = make_fx(lambda x: (alternate(x),), tracing_mode="symbolic")(rand(30, 20))
    compiled = compile_graph(gm, [rand(30, 20)], options=Options(host_program=host), fresh=True)
    assert compiled.stages is not None and compiled.call is not None
    arena = compiled.stages.program.arena
    assert arena is not None and len(arena.offsets) > 1 and arena.size.free_symbols
    for shape in ((30, 20), (2, 999), (500, 3), (64, 64)):
        x = rand(*shape)
        (result,) = compiled.call([x])
        torch.testing.assert_close(result, alternate(x))
        assert result.untyped_storage().nbytes() == result.nbytes


def test_an_arena_on_the_stack_of_each_thread() -> None:
    gm = make_fx(lambda x: (alternate(x),), tracing_mode="fake")(rand(30, 20))
    compiled = compile_graph(gm, [rand(30, 20)], options=Options(host_program="native"), fresh=True)
    assert compiled.stages is not None and compiled.call is not None
    arena, call = compiled.stages.program.arena, compiled.call
    assert arena is not None and arena.bound is not None and arena.bound <= MOST_STACK
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(30):
            x = rand(30, 20)
            if not torch.allclose(call([x])[0], alternate(x), atol=1e-5):
                wrong.append(k)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert not wrong


def test_sizes_that_are_computed_and_returned() -> None:
    def f(x: Tensor, n: int) -> Any:
        y = x.reshape(-1)[: x.numel() // 3 + n]
        return y.sum(), y.numel() * 2, torch.zeros(n + 1, x.shape[0] // 2 + 1), x.shape[1] % 3

    same(f, lambda: (rand(7, 12), 5), dynamic=True)


def test_memory_that_is_shared() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        x.add_(y)
        z = torch.sin(x)
        return x, x[1:], x.t(), z, z[0], z.view(-1), y

    same(f, lambda: (rand(5, 6), rand(5, 6)))


def test_ops_that_python_calls() -> None:
    def f(x: Tensor) -> Any:
        order = torch.sort(x * 2, dim=0)
        kept = torch.nonzero(order[0] > 0)
        return order[1] + 1, kept * 2, torch.linalg.inv(x @ x.t() + 40 * torch.eye(9)) + 1

    same(f, lambda: (rand(9, 9),))


def test_random_numbers_follow_the_seed() -> None:
    same(lambda x: torch.nn.functional.dropout(x * 2, 0.5) + torch.rand_like(x), lambda: (rand(40, 9),))


def test_control_flow() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.sin(x) @ x, lambda x: x @ torch.cos(x), (x * 2,)) + 1

    same(f, lambda: (rand(8, 8),), calls=4)


def test_convolutions_and_channels_last() -> None:
    layer = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            return layer(x) * 2

    same(f, lambda: (rand(2, 3, 9, 9).to(memory_format=torch.channels_last),))
    same(f, lambda: (rand(2, 3, 9, 9),))


def test_nothing_to_compute() -> None:
    same(lambda x, y: (x, y.t(), 3), lambda: (rand(3), rand(0, 4)))
    same(lambda x: (x * 2).sum(), lambda: (rand(0, 4),))


def test_large_tensors_have_memory_of_their_own() -> None:
    def f(x: Tensor) -> Tensor:
        for k in range(3):
            x = (x * (k + 1)) + x.sum()
        return x

    same(f, lambda: (rand(300, 1000),))


@pytest.mark.parametrize("bias", [False, True])
def test_training(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30, bias=bias), nn.GELU(), nn.LayerNorm(30), nn.Linear(30, 5))
    x = rand(17, 12)
    gradients = []
    for host in ("python", "native"):
        model.zero_grad()
        before = counters.snapshot()
        run = compiled(model, host)
        for _ in range(2):
            run(x).square().sum().backward()
        assert counters.since(before).get("native_programs", 0) == (2 if host == "native" else 0)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_an_optimizer_over_many_tensors() -> None:
    def step(xs: list[Tensor], gs: list[Tensor]) -> None:
        for x, g in zip(xs, gs, strict=True):
            x.mul_(0.99).add_(g, alpha=-0.1)

    shapes = [(k + 1, 3) for k in range(20)]
    same(step, lambda: ([rand(*s) for s in shapes], [rand(*s) for s in shapes]))


@pytest.mark.parametrize("host", ["python", "native"])
def test_what_dies_in_the_program_is_let_go(host: str) -> None:
    """An argument that nobody else holds is freed after its last use."""
    gone: list[bool] = []
    watched: list[StorageWeakRef] = []

    @torch.library.custom_op(f"mlc_native::look_{host}", mutates_args=())
    def look(x: Tensor) -> Tensor:
        gone.append(watched[0].expired())
        return x.clone()

    look.register_fake(torch.empty_like)
    gm = make_fx(lambda x, w: (look((x @ w) * 2) + 1,), tracing_mode="fake")(rand(4, 4), rand(4, 4))
    call = compile_graph(gm, [rand(4, 4)] * 2, options=Options(host_program=host), fresh=True).call
    assert call is not None
    w = rand(4, 4)
    given = [rand(4, 4), w]
    watched.append(StorageWeakRef(given[0].untyped_storage()))
    expected = (given[0] @ w) * 2 + 1
    torch.testing.assert_close(call(given)[0], expected)
    assert gone == [True] and not given
    kept = rand(4, 4)
    watched[:] = [StorageWeakRef(kept.untyped_storage())]
    call([kept, w])
    assert gone == [True, False] and kept.isfinite().all()


def test_errors_are_those_of_python() -> None:
    def gather(x: Tensor, i: Tensor) -> Tensor:
        return x[i] * 2

    for host in ("python", "native"):
        run = compiled(gather, host)
        run(rand(5), torch.tensor([4, 0]))
        with pytest.raises(IndexError, match="index 5 is out of bounds for dimension 0 with size 5"):
            run(rand(5), torch.tensor([5, 0]))
        assert torch.equal(run(torch.ones(5), torch.tensor([1, 0])), torch.full((2,), 2.0))


@torch_mends_it
def test_an_op_that_fails_raises_what_it_raises() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x + 0) * 2

    for host in ("python", "native"):
        run = compiled(f, host)
        run(torch.eye(3))
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            run(-torch.eye(3))


@pytest.mark.parametrize("host", ["python", "native"])
def test_steps_that_fail_raise_what_python_raises(host: str) -> None:
    """Operands that do not fit, and sizes that no memory has; afterwards the program runs as before."""
    gm = make_fx(lambda x, w: (torch.sin(x @ w),), tracing_mode="fake")(rand(40, 50), rand(50, 30))
    product = compile_graph(gm, [rand(40, 50), rand(50, 30)], options=Options(host_program=host), fresh=True).call
    gm = make_fx(lambda x: (x.expand(x.shape[0], 1 << 40) * 2,), tracing_mode="symbolic")(rand(3, 1))
    large = compile_graph(gm, [rand(3, 1)], options=Options(host_program=host), fresh=True).call
    assert product is not None and large is not None
    before = counters.snapshot()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            product([rand(40, 50), rand(60, 30)])
        with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory"):
            large([rand(3, 1)])
        x, w = rand(40, 50), rand(50, 30)
        torch.testing.assert_close(product([x, w])[0], torch.sin(x @ w))
    assert counters.since(before).get("native_refusals", 0) == 0


def test_subclasses_are_left_to_python() -> None:
    class Wrapped(torch.Tensor):
        pass

    gm = make_fx(lambda x: (x * 2,), tracing_mode="fake")(rand(4))
    call = compile_graph(gm, [rand(4)], options=Options(host_program="native"), fresh=True).call
    assert call is not None
    before = counters.snapshot()
    x = rand(4)
    given: list[Any] = [x.as_subclass(Wrapped)]
    torch.testing.assert_close(call(given)[0], x * 2)
    assert not given and counters.since(before)["native_refusals"] == 1


def test_threads_at_once() -> None:
    run = compiled(mlp, "native")
    args = (rand(33, 24), rand(24, 65), rand(65, 24), rand(65))
    expected = run(*args)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(50):
            if not torch.equal(run(*args), expected):
                wrong.append(k)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong


SCRIPT = """
import sys, torch
from llvmlite import binding
if sys.argv[1] == "second":
    def refuse(*_, **__):
        raise AssertionError("compiled again")
    binding.parse_assembly = refuse  # and not a function of ours, which would be part of every key
f = torch.compile(lambda x, a: torch.sin(x @ a) + x.sum(), backend="mlc", options={"host_program": "native"})
print(float(f(torch.ones(5, 5), torch.eye(5)).sum()))
from torch_mlc.runtime.counters import counters
assert counters["native_programs"] == 1
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    env = {"MLC_CACHE_DIR": str(tmp_path)}
    first = warm_processes.start(SCRIPT, "first", env=env).output()
    assert warm_processes.start(SCRIPT, "second", env=env).output() == first
