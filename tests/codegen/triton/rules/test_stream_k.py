"""Products whose steps are dealt evenly to programs (stream-K): every kernel interpreted against the oracle, and all of
them together against eager in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, SizeInput
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.facts.contraction import Decision, Products, StreamK
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import eliminate_dead, simplify_algebra
from torch_mlc.scheduler.passes.products.decompose_contractions import decompose_product
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import replay
from torch_mlc.scheduler.schedule.trace import Trace

SM90 = gpu_target("cuda:sm_90")
F32, BF16 = torch.float32, torch.bfloat16


class Call(nn.Module):
    def __init__(self, fn: Callable[..., object]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *inputs: Tensor) -> object:
        return self.fn(*inputs)


def dealt(fn: Callable[..., object], inputs: tuple[Tensor, ...], stream_k: StreamK, dynamic: bool = False) -> Fusion:
    """The graph of a function, its products dealt as asked for, fused."""
    model, fakes = on_fake_device(Call(fn), inputs, "cuda")
    graph = simplify_algebra(import_graph(capture(model, fakes, dynamic=dynamic)[0]))
    products, taken = Products(graph), {n for node in graph.nodes for n in node.names}
    nodes = []
    for node in graph.nodes:
        p = products.product(node)
        decision = Decision(True, "asked for", (True, True), stream_k=stream_k)
        nodes += [node] if p is None else decompose_product(p, decision, graph, taken)
    return fuse(eliminate_dead(replace(graph, nodes=tuple(nodes))))


def as_array(t: Tensor) -> np.ndarray:
    return t.float().numpy().astype(ml_dtypes.bfloat16) if t.dtype is BF16 else t.numpy()


def sizes_of(graph: Graph, arrays: dict[str, np.ndarray]) -> dict[sympy.Symbol, sympy.Integer]:
    """The graph's symbols, from the shapes of its inputs."""
    found: dict[sympy.Symbol, sympy.Integer] = {}
    for i in graph.inputs:
        if isinstance(i, Input):
            for e, n in zip(i.type.shape, arrays[i.name].shape, strict=True):
                if e.is_Symbol:
                    found[e] = sympy.Integer(n)
    return found


def run(fusion: Fusion, inputs: tuple[Tensor, ...], check) -> list[np.ndarray]:
    """The outputs of a graph of kernels, each of them interpreted, and compared with what its loops mean."""
    graph = fusion.graph
    named = [i for i in graph.inputs if not isinstance(i, SizeInput)]
    arrays = {i.name: as_array(t) for i, t in zip(named, matched(named, inputs), strict=True)}
    symbols = sizes_of(graph, arrays)
    for node in graph.nodes:
        if isinstance(node, CallTensor):
            function = fusion.functions[node.function]
            given = {b.name: arrays[a] for b, a in zip(function.inputs, node.args, strict=True)}
            sizes = {
                s.name: int(sympy.sympify(e).xreplace(symbols))
                for s, e in zip(function.symbols.symbols, node.sizes, strict=True)
            }
            made = check(lower_to_loops(function), given, sizes)
            arrays |= {name: made[o.buffer.name] for name, o in zip(node.names, function.outputs, strict=True)}
    return [arrays[o] for o in graph.outputs if isinstance(o, str)]


def matched(named: list[Input], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """``capture`` lifts inputs in the order of their use; types, strides and shapes tell them apart."""
    left, found = list(inputs), []
    for i in named:
        fixed = [int(e) if sympy.sympify(e).is_Integer else None for e in i.type.shape]
        k = next(
            k for k, t in enumerate(left)
            if len(fixed) == t.dim() and DType.from_torch(t.dtype) is i.type.dtype
            and all(e in (None, n) for e, n in zip(fixed, t.shape, strict=True))
        )  # fmt: skip
        found.append(left.pop(k))
    return found


@pytest.fixture
def checked(interpreter):
    """`checked(fn, inputs, stream, dynamic=, asked=, oracle=)`: kernels agree with the oracle (with "both" before
    scheduling too; with "" they are not asked, since it takes long), their traces replay, and the whole agrees with
    eager; gives the rules' names and the sources."""

    def check(fn, inputs, stream, dynamic=False, asked=None, oracle="scheduled"):
        rules, sources = [], []

        def kernel(nest, given, sizes):
            schedule = default_schedule(nest, SM90)
            rules.append(schedule.rule)
            again = replay(Trace.from_json(schedule.trace.to_json()), nest)
            assert again.nest == schedule.nest
            source = emit_triton(schedule.nest, SM90)
            sources.append(source)
            found = interpreter.run(source, nest.outputs, given, sizes)
            for meant in {"": (), "scheduled": (schedule.nest,), "both": (schedule.nest, nest)}[oracle]:
                wanted = run_nest(meant, given, sizes)
                for name in nest.outputs:
                    a, b = found[name].astype(np.float64), wanted[name].astype(np.float64)
                    np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2, err_msg=source.text)
            return found

        fusion = dealt(fn, asked or inputs, stream, dynamic)
        results = run(fusion, inputs, kernel)
        wanted = fn(*(t.double() for t in inputs))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for a, b in zip(results, wanted, strict=True):
            bound = 1e-4 if inputs[0].dtype is F32 else 3e-2
            np.testing.assert_allclose(a.astype(np.float64), b.numpy(), rtol=bound, atol=bound * 4)
        return rules, sources

    return check


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    torch.manual_seed(len(shapes) + sum(map(sum, shapes)))
    return tuple((torch.randn(s) / 2).to(dtype) for s in shapes)


def integers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).remainder(17).sub(8).to(torch.int8)


def quantised(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x @ (w.to(x.dtype) * s).t()


def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return functional.silu(x @ a) * (x @ b)


CASES = {
    # 2 tiles of 3 steps: the second program ends one tile and begins another.
    "even": (torch.mm, tensors((32, 48), (48, 16)), 4),
    "odd": (torch.mm, tensors((21, 37), (37, 19)), 5),
    "fewer steps than programs": (torch.mm, tensors((17, 20), (20, 16)), 7),
    "several tiles a program": (torch.mm, tensors((35, 20), (20, 33)), 2),
    "two programs": (torch.mm, tensors((20, 20), (20, 18)), 2),
    "a program a tile": (torch.mm, tensors((32, 32), (32, 32)), 4),
    "float32": (torch.mm, tensors((21, 37), (37, 19), dtype=F32), 5),
    "left transposed": (lambda a, b: a.t() @ b, tensors((37, 21), (37, 19)), 5),
    "right transposed": (lambda a, b: a @ b.t(), tensors((32, 48), (16, 48)), 4),
    "batch": (torch.bmm, tensors((3, 17, 20), (3, 20, 16)), 5),
    "bias and gelu": (lambda x, w, b: functional.gelu(x @ w + b), tensors((21, 37), (37, 19), (19,)), 5),
    "residual": (lambda x, w, r: r + x @ w, tensors((21, 37), (37, 19), (21, 19)), 5),
    "scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), tensors((19,), (21, 37), (37, 19)), 5),
    "several outputs": (lambda x, w: ((y := x @ w), y.relu()), tensors((21, 37), (37, 19)), 5),
    "bytes": (quantised, (*tensors((21, 37)), integers(19, 37), *tensors((19, 1))), 5),
    "gated": (gated, tensors((21, 20), (20, 19), (20, 19)), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_dealt_product_is_that_product(checked, name):
    fn, inputs, programs = CASES[name]
    rules, sources = checked(
        fn, inputs, StreamK(16, 16, 16, programs), oracle="both" if name == "two programs" else "scheduled"
    )
    assert rules[0] == "gpu_contraction" and len(rules) >= 2
    source = sources[0]
    assert [int(g) for g in source.grid] == [programs]
    assert "tl.dot(" in source.text


@pytest.mark.parametrize(("rows", "depth"), [(2, 3), (17, 20)])
def test_sizes_that_are_known_when_it_runs(checked, rows, depth):
    asked = tensors((48, 80), (80, 16))
    inputs = tensors((rows, depth), (depth, 16))
    oracle = "scheduled" if rows * depth < 100 else ""
    rules, _ = checked(lambda a, b: torch.relu(a @ b), inputs, StreamK(16, 16, 16, 5), True, asked, oracle)
    assert rules[0] == "gpu_contraction"


LARGE = {
    # Tiles a few more than multiprocessors, and a few more than half of them, with long sums.
    "144 tiles": (lambda x, w, b: functional.gelu(x @ w.t() + b), ((1024, 8192), (4608, 8192), (4608,)), (128, 256)),
    "81 tiles": (torch.mm, ((1152, 8192), (8192, 2304)), (128, 256)),
    "odd rows": (lambda x, w: x @ w.t(), ((1000, 8192), (4600, 8192)), (128, 128)),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_ones_keep_the_tensor_cores_busy(name):
    """A pipelined loop of group products over a part of a tile's steps, nothing spilled, all accesses wide."""
    fn, shapes, (rows, columns) = LARGE[name]
    fusion = dealt(fn, tuple(torch.empty(s, dtype=BF16) for s in shapes), StreamK(rows, columns, 64, SM90.cores))
    first, *others = (default_schedule(lower_to_loops(f), SM90) for f in fusion.functions.values())
    assert first.rule == "gpu_contraction" and [s.rule for s in others] == ["gpu_pointwise"]
    source = emit_triton(first.nest, SM90)
    assert [int(g) for g in source.grid] == [SM90.cores]
    binary = compile_triton(source, SM90)
    report = resource_report(binary)
    assert "wgmma.mma_async" in binary.assembly and "cp.async" in binary.assembly
    # Masks at the ends of the results are those of the loads: nothing is chosen in registers.
    assert "tl.where(" not in source.text and report.wide_loads == 1.0
    assert report.spills == 0 and report.shared <= SM90.shared_bytes
