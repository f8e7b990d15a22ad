"""Native host programs of graphs on GPUs do what the same programs do as Python: they launch the same kernels in the
same order with the same arguments, on a driver that the CPU plays."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import torch_mlc
from tests.dynamo_backend.played_programs import (
    STORE,
    Function,
    Tensor,
    alternate,
    inputs,
    momentum,
    played_shims,
    rand,
    same,
    stages_of,
)
from tests.runtime.played_driver import FAILED, NO_MEMORY
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.codegen.host.steps.step import Launch
from torch_mlc.dynamo_backend.compiling import host_programs
from torch_mlc.dynamo_backend.compiling.host_programs import host_code, stored_host_code
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.gpu.driver import GpuDriverError
from torch_mlc.runtime.settings.options import Options

pytest.importorskip("triton")

pytest.importorskip("triton")


def mlp(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    hidden = torch.nn.functional.gelu(torch.addmm(bias, x, a) * 2)
    return torch.softmax(hidden @ b, -1) + x.sum(), hidden.amax(0)


def test_kernels_in_an_arena(both):
    b = both(alternate, (30, 20))
    arena = b.program.arena
    assert arena is not None and arena.device == "cuda:0" and len(arena.offsets) >= 2
    assert all(int(o) % 256 == 0 for o in arena.offsets.values())
    launched = same(b, lambda: (rand(30, 20),), alternate)
    assert len(launched) == b.program.launches and {x.block for x in launched} <= {(32 * 2**k, 1, 1) for k in range(6)}


def test_symbolic_sizes(both):
    b = both(alternate, (30, 20), dynamic=True)
    arena = b.program.arena
    assert arena is not None and arena.size.free_symbols
    sizes = iter([(30, 20), (2, 999), (500, 3), (64, 64)])
    grids = set()
    for shape in sizes:
        grids |= {x.grid for x in same(b, partial(inputs, shape), alternate, calls=1)}
    assert len(grids) > 3


def test_products_and_kernels(both):
    shapes = ((33, 24), (24, 65), (65, 24), (65,))
    b = both(mlp, *shapes)
    assert "aoti_torch_cpu_addmm_out" in dict(b.native.own).values() or "function" in dict(b.native.own)
    same(b, lambda: tuple(rand(*s) for s in shapes), mlp)


def small(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Inputs for which no logit is so large that roundings count."""
    return tuple(t * 0.2 for t in inputs(*shapes))


def block(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """A training step of a transformer's block: the loss and all gradients."""
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    x, norm, shift, qkv, out, up, down = leaves
    h = torch.nn.functional.layer_norm(x, (16,), norm, shift)
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(-2, -3) for t in (h @ qkv).chunk(3, -1))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    x = x + (scores @ v).transpose(-2, -3).flatten(-2) @ out
    x = x + torch.nn.functional.gelu(x @ up) @ down
    loss = (x * x).mean()
    return loss, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_training_step(both, dynamic):
    shapes = ((3, 5, 16), (16,), (16,), (16, 48), (16, 16), (16, 64), (64, 16))
    b = both(block, *shapes, dynamic=dynamic)
    assert b.program.arena is not None and b.program.library_calls > 5
    for first in (shapes[0], (2, 9, 16)) if dynamic else shapes[:1]:
        same(b, partial(small, first, *shapes[1:]), block)


def test_the_stream_of_each_call(both, played):
    b = both(alternate, (30, 20))
    for stream in (0, 3, 1 << 40):
        played.stream = stream
        assert {x.stream for x in same(b, lambda: (rand(30, 20),), alternate, calls=1)} == {stream}


def test_addresses_that_are_aligned_otherwise_get_their_variant_once(both, played):
    b = both(lambda x, y: (x * 2 + y,), (40,), (40,))
    memory = rand(100)

    def make(start: int) -> tuple[Tensor, Tensor]:
        return memory[start : start + 40], memory[start + 40 : start + 80]

    for start in (0, 1, 4, 2, 0, 1):
        x, y = make(start)
        (result,), (launch,) = b.run(b.machine, x, y)
        torch.testing.assert_close(result, x * 2 + y)
        assert launch.arguments[:2] == (x.data_ptr(), y.data_ptr())
    assert len(played.functions) == 2


def test_nothing_is_launched_over_no_elements(both):
    b = both(lambda x: (x * 2,), (3, 5), dynamic=True)
    assert len(same(b, lambda: (rand(4, 5),), lambda x: (x * 2,))) == 1
    results, launched = b.run(b.machine, rand(0, 5))
    assert not launched and results[0].shape == (0, 5)


def test_many_calls_in_one_launch(both):
    shapes = [(k + 2, 3) for k in range(6)]
    b = both(momentum, *shapes, *shapes)
    assert any(s.use.table for s in b.program.steps if isinstance(s, Launch))
    for _ in range(3):
        args = [rand(*s) for s in (*shapes, *shapes)]
        for call in (b.python, b.machine):
            results, _ = b.run(call, *args)
            torch.testing.assert_close(results, list(momentum(*args)))


def test_random_numbers_follow_the_seed(both):
    b = both(lambda x: (torch.nn.functional.dropout(x * 2, 0.5),), (40, 9))
    seen = []
    for call in (b.python, b.machine):
        torch.manual_seed(3)
        (result,), _ = b.run(call, torch.ones(40, 9))
        seen.append(result)
    torch.testing.assert_close(*seen, rtol=0, atol=0)
    assert 0 < seen[0].eq(0).sum() < 360


def test_tensors_of_the_host(both):
    """A number that lies in memory of the CPU is read by ops alone."""
    b = both(lambda x, w: ((x @ w).relu() + 1, x.t()), (5, 6), (6, 7))
    same(b, lambda: (rand(5, 6), rand(6, 7)), lambda x, w: ((x @ w).relu() + 1, x.t()))


def test_what_stays_with_python_is_told(monkeypatch):
    monkeypatch.setattr(host_programs, "shims", lambda kinds: played_shims())
    shapes = [(k + 2, 3) for k in range(6)]
    stages = stages_of(momentum, (*shapes, *shapes), False)
    program = stages.program
    resolved = resolve(program)
    found = host_code(program, resolved, Options(host_program="native"), STORE)
    assert found.code is not None and found.native is not None and found.native.gpu == 0
    assert re.fullmatch(r"Python launches k0_ \(.*\), which reads a table .*", found.python)
    # What a cache keeps of it is the same program.
    again = stored_host_code(json.loads(json.dumps(found.record())), Options(host_program="native"), STORE)
    assert again is not None and again.native is not None and again.native.gpu == 0
    assert again.native.own == found.native.own
    # On GPUs nothing is native that was not asked to be.
    assert host_code(program, resolved, Options(), STORE).native is None


@pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="torch is built with GPUs")
def test_a_torch_without_gpus_is_told():
    with pytest.warns(UserWarning, match="stays Python: torch .* has no aoti_torch_create_cuda_guard"):
        report = torch_mlc.explain(lambda x: x + 1, rand(4), target="cuda:sm_90", options={"host_program": "native"})
    assert "host program: Python, for torch" in str(report)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "words"), [(FAILED, "unspecified launch failure"), (NO_MEMORY, "out of memory")])
def test_what_the_driver_refuses_is_an_error_that_names_kernel_and_line(both, played, status, words):
    b = both(alternate, (30, 20))
    x = rand(30, 20)
    same(b, lambda: (x,), alternate, calls=1)
    played.forever = status
    for call in (b.python, b.machine):
        with pytest.raises(GpuDriverError, match=rf"^fused_\w+: could not launch a grid of .*{words}") as told:
            call([x])
        assert "played_programs.py" in str(told.value) and "in alternate: x = x.softmax(0)" in str(told.value)
    played.forever = 0
    same(b, lambda: (x,), alternate, calls=1)


def test_a_launch_that_fails_once_is_tried_again(both, played):
    b = both(alternate, (30, 20))
    x = rand(30, 20)
    same(b, lambda: (x,), alternate, calls=1)
    played.failures = [0, NO_MEMORY]
    (result,), launched = b.run(b.machine, x)
    torch.testing.assert_close(result, alternate(x)[0])
    assert len(launched) == b.program.launches


def test_no_memory_is_an_error_and_lets_go_of_all(both, played):
    b = both(lambda x: (x.expand(x.shape[0], 1 << 40) * 2,), (3, 1), dynamic=True)
    for call in (b.python, b.machine):
        with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory"):
            call([rand(3, 1)])
    assert not played.launches and played.guards == (1, 1)


def test_a_gpu_that_cannot_be_made_current_is_left_to_python(both, played):
    b = both(alternate, (30, 20))
    played.words[3] = 1
    before = counters["native_refusals"]
    x = rand(30, 20)
    (result,), _ = b.run(b.machine, x)
    torch.testing.assert_close(result, alternate(x)[0])
    assert counters["native_refusals"] == before + 1 and played.guards == (0, 0)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_at_once(both, played):
    b = both(alternate, (30, 20))
    x = rand(30, 20)
    (expected,), _ = b.run(b.python, x)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(10):
            if not torch.equal(b.machine([x])[0], expected):
                wrong.append(k)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert not wrong and not played.errors


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(f: Function, host: str, **options: Any) -> Function:
    torch._dynamo.reset()
    return torch.compile(f, backend="mlc", options={"host_program": host, **options})


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
def test_the_forms_agree_on_a_gpu():
    shapes = ((33, 24), (24, 65), (65, 24), (65,))
    args = [rand(*s).cuda() for s in shapes]
    before = counters.snapshot()
    found = [on_gpu(mlp, host)(*args) for host in ("python", "native")]
    assert counters.since(before)["native_programs"] == 1
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(found[0], mlp(*args))


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
def test_streams_and_threads_on_a_gpu():
    fn = on_gpu(alternate, "native")
    xs = [rand(300, 40 + k).cuda() for k in range(4)]
    expected = [alternate(x)[0] for x in xs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(k: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                (result,) = fn(xs[k])
                stream.synchronize()
                if not torch.allclose(result, expected[k], atol=1e-5):
                    wrong.append(k)

    for k in range(4):
        fn(xs[k])
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
def test_a_native_program_is_captured_on_a_gpu():
    fn = on_gpu(alternate, "native", cuda_graphs=True)
    before = counters.snapshot()
    for _ in range(5):
        x = rand(64, 32).cuda()
        torch.testing.assert_close(fn(x), alternate(x))
    assert counters.since(before)["cuda_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
def test_training_takes_no_more_memory_than_eager_on_a_gpu():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(m for _ in range(4) for m in (torch.nn.Linear(512, 512), torch.nn.LayerNorm(512)))
    ).cuda()
    x = rand(4096, 512).cuda()
    peaks, gradients = [], []
    for run in (model, on_gpu(model, "native")):
        for _ in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run(x).square().sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert peaks[1] <= 1.01 * peaks[0]
