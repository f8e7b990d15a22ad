"""Collectives hidden by calls, by a clock of two streams: orders obey what reads and what is sent, hold no more, and
take less time."""

from __future__ import annotations

import random

import pytest
import sympy

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.graph.begun import in_flight, is_wait
from torch_mlc.ir.graph.collectives import is_collective
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, Library, Node, Ref, TensorType, uses
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.calls.flow import CallFlow
from torch_mlc.scheduler.calls.overlap_begun import overlap_begun
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.cost.begun import LATENCY, Times
from torch_mlc.scheduler.fusion.fusion import Fusion

MB = 1 << 20
MACHINE = gpu_target("cuda:sm_90")
CONTEXT = PassContext(target_of=lambda device: MACHINE)


def of(nbytes: int) -> TensorType:
    return TensorType((sympy.Integer(nbytes // 4),), (sympy.S.One,), DType.FLOAT32, "cuda:0")


def call(name: str, *args: str, n: int = 256 * MB) -> CallTensor:
    return CallTensor((name,), (of(n),), "f", args)


def gather(name: str, shard: str, n: int = 32 * MB) -> list[Node]:
    """An all-gather that is begun and waited for at once."""
    started = f"{name}_started"
    return [
        Library((started,), (of(n),), "_c10d_functional::all_gather_into_tensor.default", (Ref(shard), 8, "0")),
        Library((name,), (of(n),), "_c10d_functional::wait_tensor.default", (Ref(started),)),
    ]


def graph(nodes: list[Node], *outputs: str, inputs: tuple[str, ...] = ("x",), n: int = 4 * MB) -> Graph:
    return Graph("g", tuple(Input(i, of(n)) for i in inputs), tuple(nodes), outputs)


def overlapped(g: Graph) -> Graph:
    return overlap_begun(Fusion(g), CONTEXT).graph


def clock(g: Graph) -> float:
    """Nanoseconds until both streams are done: calls one after the other, collectives beside them in their order."""
    times = Times(g, {}, MACHINE.machine)
    compute = network = 0.0
    done: dict[str, float] = {}
    for node in g.nodes:
        if is_collective(node):
            network = max(network, compute) + times.of(node)
            done.update(dict.fromkeys(node.names, network))
        elif is_wait(node):
            compute = max(compute, *(done[u] for u in uses(node)))
        else:
            compute += times.of(node)
    return max(compute, network)


def peak(g: Graph) -> int:
    return CallFlow.of(Fusion(g), ()).peak(range(len(g.nodes)))


def check(before: Graph, after: Graph) -> None:
    """The same nodes, each behind what it reads; collectives in order; memory and time no more than before."""
    assert sorted(map(repr, before.nodes)) == sorted(map(repr, after.nodes))
    known = {i.name for i in after.inputs}
    for node in after.nodes:
        assert known.issuperset(uses(node)), node
        known.update(node.names)
    names = [[n.names for n in g.nodes if is_collective(n)] for g in (before, after)]
    assert names[0] == names[1]
    assert peak(after) <= 1.01 * peak(before)
    assert clock(after) <= clock(before) * (1 + 1e-9)


def layers(count: int, n: int = 32 * MB) -> Graph:
    """Weights in shards, gathered layer by layer where they are used."""
    nodes: list[Node] = []
    last = "x"
    for k in range(count):
        nodes += [*gather(f"w{k}", f"shard{k}", n), call(f"h{k}", last, f"w{k}"), call(f"y{k}", f"h{k}")]
        last = f"y{k}"
    return graph(nodes, last, inputs=("x", *(f"shard{k}" for k in range(count))))


def test_the_next_layers_weights_come_while_a_layer_runs() -> None:
    g = layers(4)
    better = overlapped(g)
    check(g, better)
    gathering = Times(g, {}, MACHINE.machine).of(g.nodes[0])
    assert clock(g) - clock(better) == pytest.approx(3 * gathering), "all but the first are hidden"


def test_weights_are_not_gathered_before_there_is_need() -> None:
    """One layer ahead is enough: all of them together would be held at once."""
    better = overlapped(layers(6))
    begun = [k for k, n in enumerate(better.nodes) if is_collective(n)]
    used = [k for k, n in enumerate(better.nodes) if n.names[0].startswith("h")]
    for k in range(2, 6):
        assert begun[k] > used[k - 2], "not before the layer before the last began"


def test_the_wait_goes_down_with_what_reads_it() -> None:
    """Nothing is left to do before the collective begins, but something that does not wait for it stands behind."""
    nodes = [call("a", "x"), *gather("w", "a"), call("use", "w"), call("other", "x"), call("out", "use", "other")]
    g = graph(nodes, "out")
    better = overlapped(g)
    check(g, better)
    order = [n.names[0] for n in better.nodes]
    assert order == ["a", "w_started", "other", "w", "use", "out"]
    assert clock(better) < clock(g)


def test_what_is_given_to_a_collective_moves_up_with_it() -> None:
    nodes = [call("busy", "x"), call("part", "y", n=MB), *gather("w", "part"), call("out", "busy", "w")]
    g = graph(nodes, "out", inputs=("x", "y"))
    better = overlapped(g)
    check(g, better)
    assert [n.names[0] for n in better.nodes][:2] == ["part", "w_started"]


def test_memory_bounds_how_early() -> None:
    """The gathered tensor would be there beside the largest results."""
    large = 4096 * MB
    nodes = [call("a", "x", n=large), call("b", "a", n=large), call("c", "b", n=MB), *gather("w", "s", large)]
    g = graph([*nodes, call("out", "c", "w", n=MB)], "out", inputs=("x", "s"))
    better = overlapped(g)
    check(g, better)
    assert [n.names[0] for n in better.nodes].index("w_started") > 1


def test_what_is_sent_is_not_written_before_the_wait() -> None:
    wait, start = gather("w", "a")[::-1]
    write = CallTensor(("v",), (of(256 * MB),), "f", ("a",), into=("a",))
    g = graph([call("a", "x"), start, call("b", "x"), wait, write, call("out", "w", "v", "b")], "out")
    better = overlapped(g)
    check(g, better)
    order = [n.names[0] for n in better.nodes]
    assert order.index("v") > order.index("w")


def test_hidden_already_stays_as_it_is() -> None:
    start, wait = gather("w", "s", MB)
    g = graph([start, call("a", "x"), wait, call("out", "a", "w")], "out", inputs=("x", "s"))
    assert overlapped(g) is g


def test_without_collectives_nothing_is_looked_at() -> None:
    g = graph([call("a", "x"), call("out", "a")], "out")
    fusion = Fusion(g)
    assert overlap_begun(fusion, CONTEXT) is fusion


def test_effects_that_nobody_knows_keep_the_order() -> None:
    start, wait = gather("w", "s")
    unknown = Library(("e",), (of(MB),), "hop::effect", (Ref("x"),))
    g = graph([call("a", "x"), unknown, start, wait, call("out", "a", "w")], "out", inputs=("x", "s"))
    assert overlapped(g) is g


def test_a_sum_is_sent_twice_and_small_ones_take_the_latency() -> None:
    times = Times(graph([], n=64 * MB), {}, MACHINE.machine)
    kinds = [Library(("r",), (of(64 * MB),), f"_c10d_functional::{op}.default", (Ref("x"),))
             for op in ("all_reduce", "all_to_all_single")]  # fmt: skip
    total, once = (Times(graph([n], n=64 * MB), {}, MACHINE.machine).of(n) - LATENCY for n in kinds)
    assert total == pytest.approx(2 * once) and times.machine.link == 450


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    names, nodes = ["x", "s"], []
    for k in range(rng.randint(5, 40)):
        size = rng.choice((MB, 16 * MB, 128 * MB))
        if rng.random() < 0.3:
            start, wait = gather(f"w{k}", rng.choice(names), size)
            nodes.append(start)
            for j in range(rng.randint(0, 2)):
                nodes.append(call(f"m{k}_{j}", rng.choice(names), n=size))
                names.append(f"m{k}_{j}")
            nodes.append(wait)
            names.append(f"w{k}")
        else:
            nodes.append(call(f"c{k}", *rng.sample(names, min(2, len(names))), n=size))
            names.append(f"c{k}")
    g = graph(nodes, names[-1], names[-2], inputs=("x", "s"))
    better = overlapped(g)
    check(g, better)
    for at, operands in in_flight(better).items():
        assert at <= len(better.nodes) and all(isinstance(o, str) for o in operands)
