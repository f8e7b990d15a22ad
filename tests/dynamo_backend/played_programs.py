"""Graphs for a GPU whose host programs run over a driver that the CPU plays (``tests/runtime/played_driver.py``), as
Python and as machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.runtime.played_driver import SCRATCH, Kernel, Launched, PlayedLibrary, played_code
from torch_mlc.codegen.host.memory.plan_memory import check_arena
from torch_mlc.codegen.host.native.native import NativeHost, emit_native
from torch_mlc.codegen.host.native.shims import Shims
from torch_mlc.codegen.host.python.text import print_host
from torch_mlc.codegen.host.steps.lines import Lines
from torch_mlc.codegen.host.steps.program import HostProgram
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.codegen.host.steps.step import Launch
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.compiling.compiled import Stages
from torch_mlc.dynamo_backend.compiling.host_programs import HostCode
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.dynamo_backend.tracing.origins import lines_of
from torch_mlc.runtime.compile.kernels import KernelStore, LoadedKernel, load_code
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.host.executable import HELPERS, Boxed, draw_seeds, load_program
from torch_mlc.runtime.host.native import load_native, program_code, shims, support_code
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.targets import target_for

Tensor = torch.Tensor
Function = Callable[..., Any]
STORE = KernelStore(None)
OPTIONS = Options.resolve(None, {"target": "cuda:sm_90"}, {})
# What the text of a program is given in the place of what allocates on GPUs and makes them current.
PLAYED: dict[str, Any] = {
    "empty_cuda_": HELPERS["empty_cpu_"],
    "empty_": lambda size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype),
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
    native: NativeHost | None
    python: Boxed
    machine: Boxed

    def run(self, call: Boxed, *args: Any) -> tuple[list[Any], list[Launched]]:
        """Results and launches of a call."""
        before = len(self.library.launches)
        results = list(call(list(args)))
        assert not self.library.errors, self.library.errors
        return results, self.library.launches[before:]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedLibrary:
    found = PlayedLibrary()
    found.play(monkeypatch)
    return found


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def inputs(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(rand(*s) for s in shapes)


def stages_of(fn: Function, shapes: tuple[tuple[int, ...], ...], dynamic: bool, device: str = "cuda") -> Stages:
    return compiled_for(fn, shapes, dynamic, device)[0]


@cache
def compiled_for(fn: Function, shapes: tuple[tuple[int, ...], ...], dynamic: bool, device: str) -> tuple[Stages, Lines]:
    """The stages of a function for a GPU, and the lines that its program may name."""
    if len(shapes) == 1 and not dynamic:
        (gm,) = capture(fn, inputs(*shapes))  # with lines of the model, and inputs in the order of their use
    else:
        gm = make_fx(fn, decomposition_table(), "symbolic" if dynamic else "fake")(*inputs(*shapes))
    retarget([gm], device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_source", played_code)
        stages = compile_graph(gm, (), options=OPTIONS, load=False, fresh=True).stages
    assert stages is not None
    return stages, lines_of(gm)


def play(
    library: PlayedLibrary,
    fn: Function,
    *shapes: tuple[int, ...],
    dynamic: bool = False,
    checked: bool = False,
    device: str = "cuda",
) -> Both:
    """A function that returns a tuple, compiled for inputs of these shapes, over a driver that is played already."""
    return load(library, *compiled_for(fn, shapes, dynamic, device), checked=checked)


def load(
    library: PlayedLibrary,
    stages: Stages,
    lines: Lines,
    *,
    checked: bool = False,
    constants: dict[str, Any] | None = None,
    machine_code: bool = True,
) -> Both:
    """Both forms of a program, or Python for both; ``constants`` has ops in the place of others."""
    program = stages.program
    check_arena(program)
    uses = {n.function: stages.kernels[n.function] for n in stages.fusion.graph.nodes if hasattr(n, "function")}
    variables = {s.use.kernel for s in program.steps if isinstance(s, Launch)}
    keys = list(dict.fromkeys(b.key for b in stages.kernels.values()))
    builds = {f"k{keys.index(b.key)}_": b for b in uses.values()}
    assert variables <= builds.keys()
    library.know(Kernel(b.code, b.function) for b in builds.values() if b.code is not None)
    kernels = {v: load_code(b.code, checked=checked) for v, b in builds.items() if b.code is not None}
    calls = {**{v: k.host_call for v, k in kernels.items()}, **PLAYED}
    constants = constants or {}
    native = emit_native(resolve(program), played_shims()) if machine_code else None
    host = HostCode(print_host(resolve(program)), native, lines=lines)

    def python() -> Boxed:
        return load_program(host.told, calls, constants, "main")

    if native is None:
        return Both(library, program, kernels, native, python(), python())
    target = target_for("cpu", None, None)
    code, support = program_code(STORE, native, target), support_code(STORE, target)
    addresses = host.addresses(kernels)
    machine = load_native(
        host.told_native(native),
        code.payload,
        support.payload,
        addresses,
        calls,
        constants,
        python,
        "main",
        library.find,
    )
    return Both(library, program, kernels, native, python(), machine)


@pytest.fixture
def both(played: PlayedLibrary) -> Callable[..., Both]:
    """``both(fn, *shapes, dynamic=False, checked=False, device="cuda")``; ``fn`` returns a tuple."""
    return partial(play, played)


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


def momentum(*args: Tensor) -> tuple[Tensor, ...]:
    half = len(args) // 2
    return tuple(p * 0.99 - 0.1 * g.sign() for p, g in zip(args[:half], args[half:], strict=True))
