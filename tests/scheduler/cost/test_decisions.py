"""What is decided for each machine: pieces of sums and of keys, tiles, warps, teams, and what goes to a library.

The golden files hold it for a set of programs. A change that moves figures of machines leaves them as they are; one
that is to decide otherwise shows what it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.dynamo_backend.converters.linear import products
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import CallTensor, Graph, Library
from torch_mlc.ir.nest.loops import LoopKind, LoopNest, blocks
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.cost.cpu_kernels import online_tile, stencil_scratch
from torch_mlc.scheduler.cost.programs import few_rows, is_split, pieces_of_sum
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.fusion.fusion import Fusion
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule, design_space

HALF, FULL, WORDS, BYTES = torch.bfloat16, torch.float32, torch.int64, torch.int8
GOLDEN = Path(__file__).with_name("decisions")
KB = 1 << 10


def _cpu(arch: str, cores: int, vector_bytes: int, l1_bytes: int, l2_bytes: int) -> Target:
    return Target("cpu", arch, cores, vector_bytes, l1_bytes, l2_bytes, warp=1, max_threads=1)


TARGETS = {
    "cpu_avx2": _cpu("znver3", 8, 32, 32 * KB, 512 * KB),
    "cpu_avx512": _cpu("znver5", 2, 64, 48 * KB, 1024 * KB),
    **{name.partition(":")[2]: gpu_target(name) for name in ("cuda:sm_75", "cuda:sm_80", "cuda:sm_90", "hip:gfx942")},
}


@dataclass(frozen=True, slots=True)
class Program:
    """A function of tensors of these shapes; ``training`` asks for its backward as well."""

    function: Callable[..., Any]
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]
    training: bool = False


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT * 0.01) * 30
    return torch.softmax(scores, -1) @ v


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def _batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, training=True))


def _depthwise(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, padding=1, groups=x.shape[1]))


def _gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, a)) * F.linear(x, b)


def _heads(batch: int, queries: int, keys: int, width: int, dtype: torch.dtype) -> list[tuple[Any, torch.dtype]]:
    own, others = (batch, 8, queries, width), (batch, 8, keys, width)
    return [(own, dtype), (others, dtype), (others, dtype)]


def _bytes_linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale)


PROGRAMS = {
    "sum of all": Program(torch.sum, [((1 << 24,), FULL)]),
    "sum of a few rows": Program(lambda x: x.sum(1), [((24, 1 << 17), HALF)]),
    "sum of columns": Program(lambda x: x.sum(0), [((8192, 256), HALF)]),
    "sum of images": Program(lambda x: x.sum((0, 2, 3)), [((64, 64, 56, 56), HALF)]),
    "softmax 1024": Program(lambda x: torch.softmax(x, -1), [((8192, 1024), HALF)]),
    "softmax 32768": Program(lambda x: torch.softmax(x, -1), [((4096, 32768), HALF)]),
    "softmax 131072": Program(lambda x: torch.softmax(x, -1), [((1024, 131072), FULL)]),
    "softmax, short rows": Program(lambda x: torch.softmax(x, -1), [((512, 40), FULL)]),
    "norm and its backward": Program(_rms_norm, [((4096, 4096), HALF), ((4096,), HALF)], training=True),
    "norm of long rows": Program(_rms_norm, [((2048, 16384), HALF), ((16384,), HALF)], training=True),
    "batch norm": Program(_batch_norm, [((32, 64, 28, 28), HALF), ((64,), FULL), ((64,), FULL)], training=True),
    "bias and gelu": Program(lambda x, b: F.gelu(x + b), [((8192, 3072), HALF), ((3072,), HALF)], training=True),
    "linear and gelu": Program(lambda x, w: F.gelu(F.linear(x, w)), [((512, 768), HALF), ((3072, 768), HALF)],
                               training=True),
    "few rows by a matrix": Program(lambda x, w: F.silu(x @ w), [((16, 8192), HALF), ((8192, 1024), HALF)]),
    "deep product": Program(lambda x, w: F.relu(x @ w), [((256, 16384), HALF), ((16384, 256), HALF)]),
    "float32 product": Program(lambda x, w: F.relu(x @ w), [((384, 1024), FULL), ((1024, 512), FULL)]),
    "tiny product": Program(lambda x, w: F.relu(x @ w), [((8, 24), FULL), ((24, 16), FULL)]),
    "bytes by one row": Program(_bytes_linear, [((1, 4096), HALF), ((14336, 4096), BYTES), ((14336, 1), HALF)]),
    "bytes by 64 rows": Program(_bytes_linear, [((64, 4096), HALF), ((4096, 4096), BYTES), ((4096, 1), HALF)]),
    "gated": Program(_gated, [((1024, 4096), HALF), ((11008, 4096), HALF), ((11008, 4096), HALF)]),
    "attention": Program(_attention, _heads(2, 1024, 1024, 64, HALF)),
    "attention, wide heads": Program(_attention, _heads(4, 2048, 2048, 128, HALF)),
    "attention, float32": Program(_attention, _heads(2, 512, 512, 64, FULL)),
    "attention of one query": Program(_attention, _heads(1, 1, 8192, 128, HALF)),
    "attention, short": Program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                                _heads(4, 256, 256, 64, FULL)),
    "depthwise": Program(_depthwise, [((32, 96, 56, 56), HALF), ((96, 1, 3, 3), HALF)], training=True),
    "convolution": Program(lambda x, w: F.relu(F.conv2d(x, w, padding=1)),
                           [((8, 64, 56, 56), FULL), ((64, 64, 3, 3), FULL)]),
    "convolution of points": Program(lambda x, w: F.relu(F.conv2d(x, w)),
                                     [((8, 64, 28, 28), FULL), ((256, 64, 1, 1), FULL)]),
    "scan": Program(lambda x: x.cumsum(-1), [((256, 4096), FULL)]),
    "long scan": Program(lambda x: x.cumsum(-1) * 2, [((16, 65536), FULL)]),
    "transpose": Program(lambda x, y: x + y.mT, [((4096, 4096), HALF), ((4096, 4096), HALF)]),
    "point-wise": Program(lambda x, y: torch.exp(x) + y, [((4096, 1000), HALF), ((1000,), FULL)]),
    "small point-wise": Program(lambda x: torch.tanh(x) * 2, [((3000,), FULL)]),
    "concatenation": Program(lambda x, y: torch.cat([x * 2, y], 1), [((512, 300), FULL), ((512, 212), FULL)]),
    "gather and scatter": Program(lambda w, at: F.embedding(at, w) * 2, [((5000, 256), FULL), ((4096,), WORDS)],
                                  training=True),
    "loss of many classes": Program(lambda x, w, at: F.cross_entropy(F.linear(x, w), at),
                                    [((4096, 1024), HALF), ((32000, 1024), HALF), ((4096,), WORDS)]),
}  # fmt: skip


@cache
def graphs(name: str, device: str) -> list[Graph]:
    return imported(PROGRAMS[name], device)


def imported(program: Program, device: str) -> list[Graph]:
    """The graphs of a program for tensors of a device."""
    with FakeTensorMode():
        made = [torch.empty(s, dtype=t, requires_grad=program.training and t.is_floating_point)
                for s, t in program.shapes]  # fmt: skip
    found = capture(program.function, made, training=program.training)
    if device != "cpu":
        retarget(found, device)
    return [import_graph(gm) for gm in found]


def planned(graph: Graph, target: Target) -> Fusion:
    """The graph after all passes, fused, for one machine."""
    context = PassContext(target_of=lambda device: target)
    return fuse(run_passes(GRAPH_PASSES, graph, context), context)


def decisions(name: str, target: Target) -> Iterator[str]:
    """Lines: why libraries are called, and of each kernel its rule, what may vary, and how its loops run."""
    for graph in graphs(name, "cuda" if target.is_gpu else "cpu"):
        fusion = planned(graph, target)
        yield f"{name}:" if graph is graphs(name, "cuda" if target.is_gpu else "cpu")[0] else f"{name}, backward:"
        for node in fusion.graph.nodes:
            match node:
                case Library():
                    yield f"  {node.target}: {node.reason or 'as it is'}"
                case CallTensor():
                    nest = lower_to_loops(fusion.functions[node.function])
                    scheduled = default_schedule(nest, target)
                    rule = next(r for r in design_space(nest, target).rules if r.name == scheduled.rule)
                    varied = {k: list(v) for k, v in rule.parameters(nest, target).items()}
                    notes = dict.fromkeys(o.note for s in fusion.functions[node.function].stages for o in s.origins)
                    yield f"  {rule.name} {varied} {'; '.join(n for n in notes if n)}".rstrip()
                    yield from (f"    {line}" for line in running(scheduled.nest))


def running(nest: LoopNest) -> Iterator[str]:
    """The loops around each block, their extents and kinds."""
    numbers = [f"{k}={v}" for k, v in nest.annotations if not isinstance(v, str)]
    if numbers:
        yield " ".join(numbers)

    lines = (", ".join(f"{o.kind.value} {o.extent}" for o in around) or "once" for _, around in blocks(nest))
    yield from dict.fromkeys(lines)


@pytest.fixture(autouse=True)
def _half_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs multiply half types, whatever the one of this machine does."""
    monkeypatch.setattr(products, "multiplies", lambda dtype: True)


@pytest.mark.parametrize("target", TARGETS)
def test_decisions(target: str, request: pytest.FixtureRequest) -> None:
    found = "\n".join(line for name in PROGRAMS for line in decisions(name, TARGETS[target])) + "\n"
    path = GOLDEN / f"{target}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text(), "if it should differ, run pytest --update-golden"


def test_machines_differ_where_they_should() -> None:
    """A sum of everything, a norm's backward, one query's keys and a filter's gradient by so many programs each."""

    def programs(name: str, gpu: str) -> int:
        *_, last = graphs(name, "cuda")
        fusion = planned(last, gpu_target(gpu))
        first = next(n for n in fusion.graph.nodes if isinstance(n, CallTensor))
        nest = default_schedule(lower_to_loops(fusion.functions[first.function]), gpu_target(gpu)).nest
        blocks_x = [lp for _, around in blocks(nest) for lp in around if lp.kind is LoopKind.BLOCK_X]
        return int(blocks_x[0].extent)

    wanted = {
        "cuda:sm_75": (128, 64), "cuda:sm_80": (256, 256), "cuda:sm_89": (512, 256), "cuda:sm_90": (512, 256),
        "cuda:sm_100": (512, 256), "cuda:sm_120": (512, 256), "hip:gfx90a": (256, 256), "hip:gfx942": (1024, 256),
    }  # fmt: skip
    found = {gpu: (programs("sum of all", gpu), programs("norm and its backward", gpu)) for gpu in wanted}
    assert found == wanted


def test_the_same_product_is_decided_for_each_machine() -> None:
    """What a product takes in the library follows the machine's rates, and so does whether loops are worth it."""

    def told(name: str, target: Target) -> str:
        nodes = planned(graphs(name, "cuda")[0], target).graph.nodes
        return "; ".join(n.reason for n in nodes if isinstance(n, Library))

    gpus = ("cuda:sm_75", "cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120", "hip:gfx90a")
    assert len({told("gated", gpu_target(gpu)) for gpu in gpus}) == len(gpus)


def test_products_of_bfloat16_go_where_they_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with instructions for them converts a weight of bytes for 16 rows; others read it in loops."""
    monkeypatch.setattr(products, "multiplies", lambda dtype: True)
    shapes = [((16, 2048), HALF), ((2048, 2048), BYTES), ((2048, 1), HALF)]
    (graph,) = imported(Program(_bytes_linear, shapes), "cpu")
    found = {}
    for features in ("+avx512f", "+avx512bf16,+avx512f", "+amx-bf16,+avx512bf16,+avx512f"):
        target = replace(TARGETS["cpu_avx512"], features=features)
        found[features] = any(isinstance(n, Library) for n in planned(graph, target).graph.nodes)
    assert list(found.values()) == [False, True, True]


def test_single_threads_combine_no_tiles() -> None:
    """The gradient of a weight's scales sums a product over its columns: on tensor cores each tile gives its part."""
    shapes = [((16, 4096), HALF), ((14336, 4096), BYTES), ((14336, 1), HALF)]
    _, backward = imported(Program(_bytes_linear, shapes, training=True), "cuda")

    def together(name: str) -> bool:
        target = gpu_target(name)
        functions = planned(backward, target).functions.values()
        kernels = [default_schedule(lower_to_loops(f), target).nest for f in functions]
        assert all(emit_triton(k, target).text for k in kernels)
        return any({"mm", "sum"} <= set(k.name.split("_")) for k in kernels)

    assert [together(name) for name in ("cuda:sm_75", "cuda:sm_80", "cuda:sm_90")] == [False, True, True]


def test_rows_are_few_where_they_leave_a_memory_waiting() -> None:
    """As many multiprocessors as together read as fast as the memory is, each at much the same rate everywhere."""
    few = {"cuda:sm_75": 4, "cuda:sm_80": 16, "cuda:sm_89": 8, "cuda:sm_90": 64, "cuda:sm_100": 64, "cuda:sm_120": 16,
           "hip:gfx90a": 16, "hip:gfx942": 64}  # fmt: skip
    assert {name: few_rows(gpu_target(name).machine) for name in few} == few
    for name, rows in few.items():
        machine = gpu_target(name).machine
        assert is_split(machine, rows - 1, 1 << 20) and not is_split(machine, rows, 1 << 20)
        assert pieces_of_sum(machine, rows, 1 << 20) > 1 and pieces_of_sum(machine, rows + 1, 1 << 20) == 1
    cores = [few_rows(replace(TARGETS["cpu_avx2"], cores=n).machine) for n in (1, 8, 32, 96)]
    assert cores == [64, 64, 64, 192]


def test_tiles_on_cpus_fit_caches() -> None:
    usual, small = (
        TARGETS["cpu_avx2"].machine,
        replace(TARGETS["cpu_avx2"], l1_bytes=16 * KB, l2_bytes=256 * KB).machine,
    )
    assert [online_tile(m) for m in (usual, TARGETS["cpu_avx512"].machine, small)] == [2048, 2048, 1024]
    assert [stencil_scratch(m) for m in (usual, TARGETS["cpu_avx512"].machine, small)] == [64 * KB, 64 * KB, 32 * KB]
