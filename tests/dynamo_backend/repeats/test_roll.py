"""Layers that repeat are calls of a region, and a loop of the host program, which does what a program does in which
each is written out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torch_mlc.dynamo_backend.compiling.plans as planning
import torch_mlc.dynamo_backend.repeats.passes as layer_passes
from benchmarks.memory import peak_of
from torch_mlc.codegen.host.capture import capture_plan
from torch_mlc.dynamo_backend.compiling.compiled import CompiledGraph
from torch_mlc.dynamo_backend.compiling.graph_kernels import called
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.repeats.layers import FEWEST, HEAD, TAIL
from torch_mlc.dynamo_backend.repeats.repeating import NotAlike, Repeating
from torch_mlc.ir.graph.graph import CallRegion, CallTensor, Graph
from torch_mlc.ir.graph.regions import write_out_regions
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.runtime.compile.kernels import kernel_store
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.fusion.fusion import Fusion

COUNT = FEWEST + 2
# Large enough for products to be calls of the library, whose results are no part of an arena.
ROWS, WIDTH = 512, 64
LOOP = "for _ in range("
Body: TypeAlias = Callable[[Tensor, Sequence[Tensor]], Tensor]


def residual(x: Tensor, w: Sequence[Tensor]) -> Tensor:
    return x + F.gelu(F.layer_norm(x, w[0].shape, w[0], w[1]) @ w[2]) @ w[3]


def reads_the_weight_again_behind(x: Tensor, w: Sequence[Tensor]) -> Tensor:
    return (x @ w[2]).relu() @ w[3] * w[0] + x * w[0]


def is_two_streams(x: Tensor, w: Sequence[Tensor]) -> Tensor:
    """The second half of the elements is the first half of the layer before."""
    a, b = x.chunk(2, dim=0)
    return torch.cat([torch.tanh(a @ w[2] @ w[3]) + b, a])


def stack(body: Body, x: Tensor, weights: Sequence[Tensor], every: bool) -> Any:
    found = [x.sin()]
    for k in range(0, len(weights), 4):
        found.append(body(found[-1], weights[k : k + 4]))
    return tuple(found[1:]) if every else found[-1].cos()


def weights_of(count: int, width: int = WIDTH) -> list[Tensor]:
    shapes = [(width,), (width,), (width, 2 * width), (2 * width, width)] * count
    return [(torch.randn(shape) / 9).requires_grad_() for shape in shapes]


def unlike(short: Repeating) -> Graph:
    raise NotAlike


def no_layers(gm: fx.GraphModule, key: object) -> None:
    return None


def programs_of(gm: fx.GraphModule, options: Options, monkeypatch: pytest.MonkeyPatch) -> list[CompiledGraph]:
    """With layers as a loop, with each written out, and as the plan of the whole graph has it."""
    with monkeypatch.context() as patched:
        programs = []
        for module, name, other in (
            (None, "", None),
            (layer_passes, "roll", unlike),
            (planning, "find_layers", no_layers),
        ):
            if module is not None:
                patched.setattr(module, name, other)
            kernel_store.cache_clear()
            programs.append(compile_graph(gm, (), options=options, name="stack"))
        return programs


def graphs_of(body: Body, every: bool, training: bool, dynamic: bool) -> list[fx.GraphModule]:
    x = torch.randn(ROWS, WIDTH).requires_grad_(training)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return capture(lambda x, *w: stack(body, x, w, every), (x, *weights_of(COUNT)), training=training, dynamic=None)


def arguments_of(gm: fx.GraphModule, rows: int) -> list[Any]:
    """Random ones, with ``rows`` in place of each size that is a symbol."""
    found: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        if isinstance(val, torch.SymInt):
            found.append(rows)
            continue
        sizes, strides = ([concrete(n, rows) for n in ns] for ns in (val.shape, val.stride()))
        made = torch.empty_strided(sizes, strides, dtype=val.dtype)
        found.append(made.copy_(torch.rand(sizes) if val.dtype.is_floating_point else torch.zeros(sizes)))
    return found


def concrete(size: int | torch.SymInt, rows: int) -> int:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.xreplace(dict.fromkeys(expr.free_symbols, rows)))


# How many of the graphs (the inference graph, or forward and backward) have loops. Where gradients of all layers'
# results come in, those of weights are put off to the end, and halves of a stream live for two layers.
CASES = [
    (residual, False, False, False, 1),
    (residual, True, False, True, 1),
    (residual, False, True, True, 2),
    (residual, True, True, False, 1),
    (reads_the_weight_again_behind, False, False, True, 1),
    (reads_the_weight_again_behind, True, False, False, 1),
    (reads_the_weight_again_behind, False, True, False, 2),
    (reads_the_weight_again_behind, True, True, True, 2),
    (is_two_streams, False, False, False, 1),
    (is_two_streams, True, False, True, 1),
    (is_two_streams, False, True, True, 0),
    (is_two_streams, True, True, False, 0),
]


def results_of(program: CompiledGraph, given: Sequence[Any]) -> Sequence[Any]:
    assert program.call is not None
    return program.call([a.clone() if isinstance(a, Tensor) else a for a in given])


@pytest.mark.parametrize(
    ("body", "every", "training", "dynamic", "loops", "host"),
    # Each case always with one kind of program, and with the other one where there is time.
    [
        pytest.param(*case, host, marks=pytest.mark.slow if (k + k // 4 + n) % 2 else [])
        for k, case in enumerate(CASES)
        for n, host in enumerate(("python", "native"))
    ],
)
def test_a_loop_does_what_all_layers_do(
    body: Body, every: bool, training: bool, dynamic: bool, loops: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = 0
    for gm in graphs_of(body, every, training, dynamic):
        looped, *others = programs_of(gm, Options(strict=True, cache=False, host_program=host), monkeypatch)
        found += LOOP in looped.text.text
        assert not any(LOOP in o.text.text for o in others)
        for rows in (ROWS, ROWS + 6) if dynamic else (ROWS,):
            given = arguments_of(gm, rows)
            results, peaks = [], []
            for program in (looped, *others):
                results.append(results_of(program, given))
                peaks.append(peak_of(partial(results_of, program, given), "cpu"))
            for other in results[1:]:
                assert len(other) == len(results[0])
                for mine, own in zip(results[0], other, strict=True):
                    torch.testing.assert_close(mine, own, rtol=0, atol=0)
            assert peaks[0] <= max(peaks[1:]), peaks
    assert found == loops


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("host", ["python", "native"])
def test_all_times_share_a_place_in_the_arena(dynamic: bool, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few elements are kernels, and what lies between kernels needs no tensor."""
    x = torch.randn(5, 12)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    (gm,) = capture(lambda x, *w: stack(residual, x, w, False), (x, *weights_of(COUNT, 12)), dynamic=None)
    options = Options(strict=True, cache=False, host_program=host, verify=1)
    looped, *others = programs_of(gm, options, monkeypatch)
    assert LOOP in looped.text.text and "arena" in looped.text.text
    for rows in (5, 9) if dynamic else (5,):
        given = arguments_of(gm, rows)
        (mine,), *rest = (results_of(program, given) for program in (looped, *others))
        for (other,) in rest:
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
        assert peak_of(partial(results_of, looped, given), "cpu") <= peak_of(
            partial(results_of, others[-1], given), "cpu"
        )


def fused(gm: fx.GraphModule, **options: Any) -> Fusion:
    compiled = compile_graph(gm, (), options=Options(strict=True, **options), load=False, fresh=True)
    assert compiled.stages is not None
    return compiled.stages.fusion


def test_a_layer_is_a_region_that_is_called() -> None:
    (gm,) = graphs_of(residual, True, False, True)
    fusion = fused(gm)
    (call,) = (n for n in fusion.graph.nodes if isinstance(n, CallRegion))
    assert parse(show(fusion.module)) == fusion.module
    assert call.times == COUNT - HEAD - TAIL + 1 and len(call.taken) == 4
    assert len(call.carried) == 2, "the stream, and its norm, which one kernel makes with it"
    # Of each layer the stream leaves the graph, which the next layer is handed.
    assert len(call.kept) == 1 and {*call.kept[0]} < {*fusion.graph.outputs}
    written = write_out_regions(fusion.graph)
    runs = Counter(n.function for n in written.nodes if isinstance(n, CallTensor))
    assert runs == called(fusion) and max(runs.values()) > call.times
    assert [i.name for i in fusion.graph.inputs] == [n.name for n in gm.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("options", [{"tune": True}, {"memory_limit": 1 << 30}], ids=["tuned", "limited"])
def test_who_asks_of_each_layer_has_each_written_out(options: dict[str, Any]) -> None:
    (gm,) = graphs_of(residual, False, False, False)
    fusion = fused(gm, **options)
    assert not any(isinstance(n, CallRegion) for n in fusion.graph.nodes)
    assert len(fusion.graph.nodes) > 3 * COUNT


def test_a_capture_knows_the_arguments_of_all_layers() -> None:
    (gm,) = graphs_of(residual, False, False, False)
    plan = capture_plan(fused(gm).graph, ("cpu",))
    assert not plan.reason and plan.tensors == tuple(range(1 + 4 * COUNT))
