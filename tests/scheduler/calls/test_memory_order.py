"""Orders that hold less at once: they obey what reads, what writes, and random calls, and their peak is lower."""

from __future__ import annotations

import random

import pytest
import sympy

from torch_mlc.codegen.host.build import build_host_program
from torch_mlc.codegen.host.steps.kernel_use import KernelUse
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, Library, Node, TensorType, View, uses
from torch_mlc.scheduler.calls.memory_order import order_for_memory
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.fusion.fusion import Fusion

I0 = symbol("i0")
USE = {"f": KernelUse("k0_", ())}


def of(count: int) -> TensorType:
    return TensorType((sympy.Integer(count),), (sympy.S.One,), DType.FLOAT32)


def call(name: str, *args: str, n: int = 1000, into: str | None = None) -> CallTensor:
    return CallTensor((name,), (of(n),), "f", args, into=(into,) if into else ())


def graph(nodes: list[Node], *outputs: str) -> Graph:
    return Graph("g", (Input("x", of(1000)), Input("y", of(1000))), tuple(nodes), outputs)


def ordered(g: Graph) -> Graph:
    return order_for_memory(Fusion(g), USUAL).graph


def peak(g: Graph) -> int:
    return int(build_host_program(g, USE).peak_bytes)


def names(g: Graph) -> list[str]:
    return [n.names[0] for n in g.nodes]


def test_large_results_are_made_late_and_used_up_early() -> None:
    made = [call(f"big{k}", "x") for k in range(6)]
    used = [call(f"small{k}", f"big{k}", n=1) for k in range(6)]
    g = graph([*made, *used, call("out", *(f"small{k}" for k in range(6)), n=1)], "out")
    assert peak(g) > 24000
    better = ordered(g)
    assert peak(better) < 4100
    assert sorted(names(better)) == sorted(names(g))


def test_an_order_that_is_as_good_stays() -> None:
    g = graph([call("a", "x"), call("b", "a"), call("c", "b")], "c")
    assert ordered(g) is g


def test_what_writes_keeps_its_place_among_readers() -> None:
    nodes = [call("a", "x"), *(call(f"big{k}", "a") for k in range(4)), call("v", "a", into="a")]
    nodes += [call(f"small{k}", f"big{k}", n=1) for k in range(4)]
    nodes += [call("out", "v", *(f"small{k}" for k in range(4)), n=1)]
    better = ordered(graph(nodes, "out"))
    order = names(better)
    assert all(order.index("v") > order.index(f"big{k}") for k in range(4))


@pytest.mark.parametrize("target", ["aten::rand.default", "mlc::seeds"])
def test_random_calls_keep_their_order(target: str) -> None:
    targets = ["aten::rand.default"] * 3 + [target] * 2
    draws: list[Node] = [Library((f"r{k}",), (of(1000 + k),), op, ([1000 + k],)) for k, op in enumerate(targets)]
    used = [call(f"small{k}", f"r{k}", n=1) for k in range(5)]
    g = graph([*draws, *used, call("out", *(f"small{k}" for k in range(5)), n=1)], "out")
    better = ordered(g)
    assert better is not g
    assert [n for n in names(better) if n.startswith("r")] == [f"r{k}" for k in range(5)]


def test_random_graphs_stay_in_topological_order() -> None:
    changed = 0
    for seed in range(60):
        draw = random.Random(seed)
        nodes: list[Node] = []
        known, written = ["x", "y"], set()
        for k in range(30):
            name, free = f"t{k}", [n for n in known if n not in written]
            source = draw.choice(free)
            if draw.random() < 0.15:
                nodes.append(View(name, of(10), source, (I0,), (I0,)))
            elif draw.random() < 0.15 and nodes and isinstance(nodes[-1], CallTensor):
                target = nodes[-1].names[0]
                if target in written:
                    continue
                nodes.append(call(name, target, n=int(nodes[-1].types[0].numel), into=target))
                written.add(target)
            else:
                nodes.append(call(name, *draw.sample(free, min(2, len(free))), n=draw.choice([1, 100, 5000])))
            known.append(name)
        outputs = [n for n in known[-3:] if n not in written]
        g = graph(nodes, *outputs)
        better = ordered(g)
        changed += better is not g
        assert peak(better) <= peak(g)
        at = {name: k for k, name in enumerate(names(better))}
        old = {name: k for k, name in enumerate(names(g))}
        for k, node in enumerate(better.nodes):
            assert all(at.get(u, -1) < k for u in uses(node))
            if isinstance(node, CallTensor) and node.into and node.into[0]:
                target = node.into[0]
                readers = [n for n in g.nodes if target in uses(n)]
                assert all((at[r.names[0]] < k) == (old[r.names[0]] < old[node.names[0]]) for r in readers if r != node)
    assert changed > 5
