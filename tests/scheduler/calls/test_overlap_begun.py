"""Collectives and copies between devices hidden by calls, by a clock of several streams: orders obey what reads and
what is sent, hold no more, and take less time."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
import sympy
import torch

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.graph.begun import in_flight, is_begun_copy, is_copy_wait, is_wait
from torch_mlc.ir.graph.collectives import is_collective
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, Library, Node, Ref, TensorType, uses
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.calls.flow import CallFlow
from torch_mlc.scheduler.calls.overlap_begun import overlap_begun
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.cost.begun import LATENCY, Times
from torch_mlc.scheduler.fusion.fusion import Fusion

by_device = sys.modules["torch_mlc.scheduler.calls.overlap_begun"]._by_device
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


# --- copies between devices -------------------------------------------------------------------------------------------


def at(device: str, nbytes: int) -> TensorType:
    return TensorType((sympy.Integer(nbytes // 4),), (sympy.S.One,), DType.FLOAT32, device)


def copied(name: str, source: str, device: str, n: int = 32 * MB, **how: bool) -> Library:
    kwargs = (("dtype", torch.float32), ("device", torch.device(device)), *how.items())
    return Library((name,), (at(device, n),), "aten::_to_copy.default", (Ref(source),), kwargs)


def shown(g: Graph) -> list[str]:
    """Names in their order; what is waited for together in one word."""
    return ["+".join(n.names) for n in g.nodes]


def test_a_copy_to_the_host_runs_beside_what_does_not_read_it() -> None:
    nodes = [call("a", "x"), copied("h", "a", "cpu", 256 * MB), *(call(f"b{k}", "a") for k in range(9))]
    better = overlapped(graph(nodes, "h", "a", "b8", n=MB))
    assert shown(better) == ["a", "h_begun", *(f"b{k}" for k in range(9)), "h"]
    assert isinstance(wait := better.nodes[-1], Library) and wait.args == ((Ref("h_begun"),), False)


def test_what_the_host_reads_is_waited_for_by_the_host() -> None:
    read = CallTensor(("r",), (at("cpu", MB),), "f", ("h",))
    nodes = [call("a", "x"), copied("h", "a", "cpu"), *(call(f"b{k}", "a") for k in range(3)), read]
    better = overlapped(graph(nodes, "r", "a", "b2", n=MB))
    assert shown(better)[-2:] == ["h", "r"]
    assert [n.args[1] for n in better.nodes if is_copy_wait(n)] == [True]  # type: ignore[union-attr]


def test_copies_to_the_host_are_waited_for_together() -> None:
    nodes = [call("a", "x"), copied("h", "a", "cpu"), call("b", "a"), copied("i", "b", "cpu"), call("c", "b")]
    better = overlapped(graph(nodes, "h", "i", "a", "b", "c"))
    assert shown(better)[-1] in ("h+i", "i+h") and len(better.nodes) == 6


def test_small_copies_to_the_host_come_last_and_share_a_wait() -> None:
    nodes = [call("a", "x", n=4), copied("h", "a", "cpu", 4), copied("i", "a", "cpu", 4), call("b", "a", n=MB)]
    assert shown(overlapped(graph(nodes, "h", "i", "a", "b")))[-1] in ("h+i", "i+h")
    alone = overlapped(graph([*nodes[:2], nodes[3]], "h", "a", "b"))
    assert shown(alone) == ["a", "b", "h"] and not any(map(is_begun_copy, alone.nodes))


def from_host(g: Graph, *names: str) -> Graph:
    """With these inputs on the host."""
    inputs = tuple(Input(i.name, at("cpu", 4 * MB)) if i.name in names else i for i in g.inputs)
    return replace(g, inputs=inputs)


def test_a_copy_from_the_host_begins_before_it_is_read() -> None:
    nodes = [*(call(f"a{k}", "x") for k in range(9)), copied("w", "s", "cuda:0", 32 * MB), call("b", "a8", "w")]
    better = overlapped(from_host(graph(nodes, "b", "a8", inputs=("x", "s"), n=MB), "s"))
    order = shown(better)
    assert order.index("w_begun") < order.index("a8") < order.index("w") < order.index("b")
    assert [n.args[1] for n in better.nodes if is_copy_wait(n)] == [False]  # type: ignore[union-attr]


def test_the_host_waits_before_it_writes_over_what_is_copied() -> None:
    write = CallTensor(("v",), (at("cpu", 4 * MB),), "f", ("s",), into=("s",))
    nodes = [*(call(f"a{k}", "x") for k in range(4)), copied("w", "s", "cuda:0"), call("b", "a3", "w"), write]
    better = overlapped(from_host(graph(nodes, "b", "v", inputs=("x", "s"), n=MB), "s"))
    (wait,) = [n for n in better.nodes if is_copy_wait(n)]
    assert isinstance(wait, Library) and wait.args[1] is True
    assert shown(better).index("w") < shown(better).index("v")


def test_what_each_device_holds_bounds_copies() -> None:
    """The result would be there beside the largest results of its device, however much another one has."""
    large = 2048 * MB
    there = CallTensor(("t",), (at("cuda:1", 8 * large),), "f", ("z",))
    use = CallTensor(("u",), (at("cuda:1", MB),), "f", ("t",))
    nodes = [there, use, call("a", "x", n=large), call("b", "a", n=large), call("c", "b", n=MB)]
    nodes += [copied("w", "s", "cuda:0", large), call("out", "c", "w", n=MB)]
    g = from_host(graph(nodes, "out", "u", inputs=("x", "s", "z"), n=MB), "s")
    assert "w_begun" not in shown(overlapped(g))[:4]


@pytest.mark.parametrize(
    "nodes",
    [
        [call("a", "x"), copied("w", "a", "cpu"), CallTensor(("b",), (at("cpu", MB),), "f", ("w",))],
        [call("a", "x"), copied("w", "a", "cuda:1"), CallTensor(("b",), (at("cuda:1", MB),), "f", ("w",))],
    ],
)
def test_a_copy_whose_reader_follows_stays_one_call(nodes: list[Node]) -> None:
    g = graph(nodes, "b")
    assert overlapped(g) is g


def test_copies_stay_where_they_are_not_to_have_streams() -> None:
    g = graph([call("a", "x"), copied("h", "a", "cpu"), call("b", "a")], "h", "b")
    assert overlapped(g) is not g
    assert overlap_begun(Fusion(g), replace(CONTEXT, copy_streams=False)).graph is g
    pinned = graph([call("a", "x"), copied("h", "a", "cpu", pin_memory=True), call("b", "a")], "h", "b")
    assert overlapped(pinned) is pinned


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_of_two_devices(seed: int) -> None:
    """Every name is made once and before it is read, what a copy reads is written by nobody before the wait, no device
    holds more, and nothing is left out."""
    rng = random.Random(seed)
    where = {"x": "cuda:0", "s": "cpu"}
    nodes: list[Node] = []
    for k in range(rng.randint(5, 30)):
        size, source = rng.choice((MB, 16 * MB, 128 * MB)), rng.choice([*where])
        if rng.random() < 0.4:
            device = rng.choice([d for d in ("cpu", "cuda:0", "cuda:1") if d != where[source]])
            nodes.append(copied(f"c{k}", source, device, size, non_blocking=rng.random() < 0.3))
        else:
            device = where[source]
            into = (source,) if rng.random() < 0.2 and source not in "xs" else (None,)
            nodes.append(CallTensor((f"c{k}",), (at(device, size),), "f", (source,), into=into))
        where[f"c{k}"] = device
    names = [*where]
    g = from_host(graph(nodes, *{names[-1], rng.choice(names), rng.choice(names)}, inputs=("x", "s")), "s")
    better = overlapped(g)
    known = {i.name for i in better.inputs}
    written: set[str] = set()
    for node in better.nodes:
        assert known.issuperset(uses(node)), node
        known.update(node.names)
    assert {n for n in known if not n.endswith("_begun")} == {n for n in where}
    for stop, operands in in_flight(better).items():
        starts = [k for k, n in enumerate(better.nodes) if is_begun_copy(n) and set(uses(n)) <= {*operands}]
        for node in better.nodes[min(starts) : stop]:
            written = {t for t in getattr(node, "into", ()) if t is not None}
            begun = {u for n in better.nodes[: better.nodes.index(node)] if is_begun_copy(n) for u in uses(n)}
            waited = {u for n in better.nodes[: better.nodes.index(node)] if is_copy_wait(n) for u in uses(n)}
            flying = {u for n in better.nodes if is_begun_copy(n) and not waited.issuperset(n.names) for u in uses(n)}
            assert not written & begun & flying
    for device in ("cpu", "cuda:0", "cuda:1"):
        held = [by_device(CallFlow.of(Fusion(one), ()), one).get(device) for one in (g, better)]
        before, after = (f.peak(range(len(o.nodes))) if f else 0 for f, o in zip(held, (g, better), strict=True))
        assert after <= 1.01 * before


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
