"""Native host programs of graphs on GPUs do what the same programs do as Python: they launch the same kernels in the
same order with the same arguments, on a driver that the CPU plays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from tests.runtime.played_driver import FAILED, NO_MEMORY, SCRATCH, Kernel, Launched, PlayedLibrary, played_code
from torch_mlc.codegen.host import HostProgram, Launch
from torch_mlc.codegen.host_native import NativeHost, emit_native
from torch_mlc.codegen.host_shims import Shims
from torch_mlc.codegen.host_text import print_host
from torch_mlc.codegen.plan_memory import check_arena
from torch_mlc.dynamo_backend import host_programs, kernels
from torch_mlc.dynamo_backend.capture import capture
from torch_mlc.dynamo_backend.compile import compile_graph
from torch_mlc.dynamo_backend.compiled import Stages
from torch_mlc.dynamo_backend.decompositions import decomposition_table
from torch_mlc.dynamo_backend.fake_device import retarget
from torch_mlc.dynamo_backend.host_programs import HostCode, host_code, stored_host_code
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.executable import HELPERS, Boxed, draw_seeds, load_program
from torch_mlc.runtime.gpu_driver import GpuDriverError
from torch_mlc.runtime.host_native import load_native, program_code, shims, support_code
from torch_mlc.runtime.kernels import KernelStore, LoadedKernel, load_code
from torch_mlc.runtime.options import Options
from torch_mlc.runtime.targets import target_for

pytest.importorskip("triton")
Tensor = torch.Tensor
Function = Callable[..., Any]
STORE = KernelStore(None)
OPTIONS = Options.resolve(None, {"target": "cuda:sm_90"}, {})
# What the text of a program is given in the place of what allocates on GPUs and makes them current.
PLAYED: dict[str, Any] = {
    "empty_cuda_": HELPERS["empty_cpu_"],
    "empty_": lambda size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype),
    "guard_": lambda index: nullcontext(),
    "seeds_": lambda count, device: draw_seeds(count, "cpu"),
}


def played_shims() -> Shims:
    """torch's C interface for a GPU, which is that of the CPU."""
    cpu = shims()
    prefix = cpu.prefixes["cpu"]
    return Shims(cpu.prototypes, cpu.dtypes, {"cpu": 0, "cuda": 0}, {"cpu": prefix, "cuda": prefix})


@dataclass
class Both:
    """A graph for a GPU as Python and as machine code, over one driver."""

    library: PlayedLibrary
    program: HostProgram
    kernels: dict[str, LoadedKernel]
    native: NativeHost
    python: Boxed
    machine: Boxed

    def run(self, call: Boxed, *args: Any) -> tuple[list[Any], list[Launched]]:
        """Results and launches of a call."""
        before = len(self.library.launches)
        results = list(call(list(args)))
        assert not self.library.errors, self.library.errors
        return results, self.library.launches[before:]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PlayedLibrary:
    found = PlayedLibrary()
    found.play(monkeypatch)
    return found


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def inputs(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(rand(*s) for s in shapes)


@cache
def stages_of(fn: Function, shapes: tuple[tuple[int, ...], ...], dynamic: bool) -> Stages:
    if len(shapes) == 1 and not dynamic:
        (gm,) = capture(fn, inputs(*shapes))  # with lines of the model, and inputs in the order of their use
    else:
        gm = make_fx(fn, decomposition_table(), "symbolic" if dynamic else "fake")(*inputs(*shapes))
    retarget([gm], "cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_source", played_code)
        stages = compile_graph(gm, (), options=OPTIONS, load=False, fresh=True).stages
    assert stages is not None
    return stages


@pytest.fixture
def both(library: PlayedLibrary) -> Callable[..., Both]:
    """``both(fn, *shapes, dynamic=False)``; ``fn`` returns a tuple."""

    def make(fn: Function, *shapes: tuple[int, ...], dynamic: bool = False) -> Both:
        stages = stages_of(fn, shapes, dynamic)
        program = stages.program
        check_arena(program, stages.fusion.graph.symbols)
        uses = {n.function: stages.kernels[n.function] for n in stages.fusion.graph.nodes if hasattr(n, "function")}
        variables = {s.use.kernel for s in program.steps if isinstance(s, Launch)}
        keys = list(dict.fromkeys(b.key for b in stages.kernels.values()))
        builds = {f"k{keys.index(b.key)}_": b for b in uses.values()}
        assert variables <= builds.keys()
        library.know(Kernel(b.code, b.function) for b in builds.values() if b.code is not None)
        kernels = {v: load_code(b.code) for v, b in builds.items() if b.code is not None}
        calls = {**{v: k.host_call for v, k in kernels.items()}, **PLAYED}
        constants: dict[str, Any] = {}

        def python() -> Boxed:
            return load_program(print_host(program), calls, constants, "main")

        native = emit_native(program, played_shims())
        target = target_for("cpu", None, None)
        code, support = program_code(STORE, native, target), support_code(STORE, target)
        addresses = HostCode(print_host(program), native).addresses(kernels)
        machine = load_native(
            native, code.payload, support.payload, addresses, calls, constants, python, "main", library.find
        )
        return Both(library, program, kernels, native, python(), machine)

    return make


def same(b: Both, make: Callable[[], tuple[Any, ...]], eager: Function, calls: int = 2) -> list[Launched]:
    """Both forms give what eager gives, by the same launches; those of the last call."""
    refused = counters["native_refusals"]
    told: list[Launched] = []
    for turn in range(calls):
        torch.manual_seed(turn)
        args = make()
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        third = [a.clone() if isinstance(a, Tensor) else a for a in args]
        (expected, one), (found, told) = b.run(b.python, *args), b.run(b.machine, *copies)
        assert [x.without_addresses for x in one] == [x.without_addresses for x in told]
        where = {a.data_ptr(): k for inputs in (args, copies) for k, a in enumerate(inputs) if isinstance(a, Tensor)}
        for x, y in zip(one, told, strict=True):
            assert [where.get(a) for a in x.arguments[: x.pointers]] == [
                where.get(a) for a in y.arguments[: y.pointers]
            ]
            assert x.scratch == y.scratch == (0,) * SCRATCH
        for x, y, z in zip(eager(*third), expected, found, strict=True):
            torch.testing.assert_close(y, x)
            torch.testing.assert_close(z, y, rtol=0, atol=0, equal_nan=True)
            assert y.stride() == z.stride()
    assert counters["native_refusals"] == refused
    made, dropped = b.library.guards
    assert made == dropped >= calls
    return told


def alternate(x: Tensor) -> tuple[Tensor]:
    """Rows and columns in turn: kernels that cannot be one, with nothing between them but memory of their own."""
    for _ in range(3):
        x = x.softmax(0).softmax(1)
    return (x.sum(0),)


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


def test_the_stream_of_each_call(both, library):
    b = both(alternate, (30, 20))
    for stream in (0, 3, 1 << 40):
        library.stream = stream
        assert {x.stream for x in same(b, lambda: (rand(30, 20),), alternate, calls=1)} == {stream}


def test_addresses_that_are_aligned_otherwise_get_their_variant_once(both, library):
    b = both(lambda x, y: (x * 2 + y,), (40,), (40,))
    memory = rand(100)

    def make(start: int) -> tuple[Tensor, Tensor]:
        return memory[start : start + 40], memory[start + 40 : start + 80]

    for start in (0, 1, 4, 2, 0, 1):
        x, y = make(start)
        (result,), (launch,) = b.run(b.machine, x, y)
        torch.testing.assert_close(result, x * 2 + y)
        assert launch.arguments[:2] == (x.data_ptr(), y.data_ptr())
    assert len(library.functions) == 2


def test_nothing_is_launched_over_no_elements(both):
    b = both(lambda x: (x * 2,), (3, 5), dynamic=True)
    assert len(same(b, lambda: (rand(4, 5),), lambda x: (x * 2,))) == 1
    results, launched = b.run(b.machine, rand(0, 5))
    assert not launched and results[0].shape == (0, 5)


def momentum(*args: Tensor) -> tuple[Tensor, ...]:
    half = len(args) // 2
    return tuple(p * 0.99 - 0.1 * g.sign() for p, g in zip(args[:half], args[half:], strict=True))


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
    found = host_code(program, Options(host_program="native"), STORE)
    assert found.code is not None and found.native is not None and found.native.gpu == 0
    assert re.fullmatch(r"Python launches k0_ \(.*\), which reads a table .*", found.python)
    # What a cache keeps of it is the same program.
    again = stored_host_code(json.loads(json.dumps(found.record())), Options(host_program="native"), STORE)
    assert again is not None and again.native is not None and again.native.gpu == 0
    assert again.native.own == found.native.own
    # On GPUs nothing is native that was not asked to be.
    assert host_code(program, Options(), STORE).native is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_torch_without_gpus_is_told():
    with pytest.warns(UserWarning, match="stays Python: torch .* has no aoti_torch_create_cuda_guard"):
        report = torch_mlc.explain(lambda x: x + 1, rand(4), target="cuda:sm_90", options={"host_program": "native"})
    assert "host program: Python, for torch" in str(report)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "words"), [(FAILED, "unspecified launch failure"), (NO_MEMORY, "out of memory")])
def test_what_the_driver_refuses_is_an_error_that_names_kernel_and_line(both, library, status, words):
    b = both(alternate, (30, 20))
    x = rand(30, 20)
    same(b, lambda: (x,), alternate, calls=1)
    library.forever = status
    for call in (b.python, b.machine):
        with pytest.raises(GpuDriverError, match=rf"^fused_\w+: could not launch a grid of .*{words}") as told:
            call([x])
        assert "test_native_host_gpu.py" in str(told.value) and "in alternate: x = x.softmax(0)" in str(told.value)
    library.forever = 0
    same(b, lambda: (x,), alternate, calls=1)


def test_a_launch_that_fails_once_is_tried_again(both, library):
    b = both(alternate, (30, 20))
    x = rand(30, 20)
    same(b, lambda: (x,), alternate, calls=1)
    library.failures = [0, NO_MEMORY]
    (result,), launched = b.run(b.machine, x)
    torch.testing.assert_close(result, alternate(x)[0])
    assert len(launched) == b.program.launches


def test_no_memory_is_an_error_and_lets_go_of_all(both, library):
    b = both(lambda x: (x.expand(x.shape[0], 1 << 40) * 2,), (3, 1), dynamic=True)
    for call in (b.python, b.machine):
        with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory"):
            call([rand(3, 1)])
    assert not library.launches and library.guards == (1, 1)


def test_a_gpu_that_cannot_be_made_current_is_left_to_python(both, library):
    b = both(alternate, (30, 20))
    library.words[3] = 1
    before = counters["native_refusals"]
    x = rand(30, 20)
    (result,), _ = b.run(b.machine, x)
    torch.testing.assert_close(result, alternate(x)[0])
    assert counters["native_refusals"] == before + 1 and library.guards == (0, 0)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_at_once(both, library):
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
    assert not wrong and not library.errors


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
