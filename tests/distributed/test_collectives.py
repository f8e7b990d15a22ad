"""Collectives in a graph: their order, their waits, and what may not be touched between the two. One process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

from torch_mlc.codegen.host.steps.program import HostProgram
from torch_mlc.codegen.host.steps.step import Allocate, CallLibrary, Free, Launch, Reuse, WriteOver
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.ir.graph.begun import in_flight, is_wait
from torch_mlc.ir.graph.collectives import is_collective
from torch_mlc.ir.graph.graph import Graph, Library, Ref
from torch_mlc.runtime.settings.options import Options


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of four of which only this process is there: its collectives change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def compiled(fn: Callable[..., object], *inputs: Tensor) -> tuple[Graph, HostProgram]:
    (gm,) = capture(fn, inputs)
    stages = compile_graph(gm, (), options=Options.resolve(None, None, {}), fresh=True).stages
    assert stages is not None
    return stages.fusion.graph, stages.program


def calls(program: HostProgram) -> list[str]:
    """Collectives, waits and kernels in the order in which they run."""
    found = []
    for step in program.steps:
        if isinstance(step, CallLibrary) and (is_collective(step.node) or is_wait(step.node)):
            found.append(step.node.target.split("::")[1].split(".")[0])
        elif isinstance(step, Launch):
            found.append("kernel")
    return found


def test_a_wait_is_where_its_result_is_first_read() -> None:
    def f(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        total = funcol.all_reduce(x.exp(), "sum", world())
        busy = torch.softmax(y @ w, -1).cumsum(0)
        for _ in range(2):
            busy = (busy @ w).relu()
        return busy + total

    _, program = compiled(f, torch.randn(6, 6), torch.randn(6, 6), torch.randn(6, 6))
    order = calls(program)
    assert order[-2:] == ["wait_tensor", "kernel"] and order.index("all_reduce") < 3, order


def test_the_weights_of_the_next_layer_are_on_their_way_while_one_runs() -> None:
    """Shards that are gathered where they are used, as models in shards have them."""
    own = dist.new_group([0], backend="fake")

    def f(x: Tensor, *shards: Tensor) -> Tensor:
        for shard in shards:
            w = funcol.all_gather_tensor(shard, 0, own)
            x = torch.softmax(x @ w, -1).cumsum(-1)
        return x

    inputs = torch.randn(2048, 256), *(torch.randn(256, 256) for _ in range(3))
    _, program = compiled(f, *inputs)
    order = calls(program)
    gathers = [k for k, c in enumerate(order) if c == "all_gather_into_tensor"]
    waits = [k for k, c in enumerate(order) if c == "wait_tensor"]
    for k in (0, 1):
        assert "kernel" in order[gathers[k + 1] : waits[k + 1]], order
    untouched(program)
    torch.testing.assert_close(torch.compile(f, backend="mlc", fullgraph=True)(*inputs), f(*inputs))


def test_collectives_keep_their_order() -> None:
    """Though the first waits for more than the second, and a kernel could make both operands."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = funcol.all_reduce((x @ x @ x).relu(), "sum", world())
        b = funcol.all_gather_tensor(y * 2, 0, world())
        c = funcol.reduce_scatter_tensor(b.sin(), "sum", 0, world())
        d = funcol.all_reduce(y + 1, "max", world())
        return a + 1, b, c * 2, d - 1

    _, program = compiled(f, torch.randn(4, 4), torch.randn(4, 4))
    names = [n for n in calls(program) if n not in ("kernel", "wait_tensor")]
    assert names == ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]


def test_fusion_does_not_reach_around_a_collective() -> None:
    """One kernel for what the second collective's result and the first one's operand need would be a cycle."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = funcol.all_reduce(x * 2, "sum", world())
        second = funcol.all_reduce(y * 3, "sum", world())
        return (x * 2) + second, (y * 3) - first, x * 2 * (y * 3)

    _, program = compiled(f, torch.randn(8), torch.randn(8))
    order = calls(program)
    assert [n for n in order if n == "all_reduce"] == ["all_reduce"] * 2, order


def untouched(program: HostProgram) -> None:
    """From a collective to its wait nothing writes or frees what it reads, and nobody reads what it writes."""
    held: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    for step in program.steps:
        busy = {owner.get(n, n) for names in held.values() for n in names}
        match step:
            case CallLibrary(node) if is_collective(node):
                for name in node.names:
                    held[name] = tuple(a.name for a in node.args if hasattr(a, "name"))
            case CallLibrary(node) if is_wait(node):
                held.pop(node.args[0].name)
            case WriteOver(name, target):
                assert owner.get(target, target) not in busy, (name, target)
                owner[name] = owner.get(target, target)
            case Reuse(name, source):
                assert owner.get(source, source) not in busy, (name, source)
            case Free(names):
                assert not busy & set(names), names
            case Launch(_, tensors):
                assert not held.keys() & set(tensors), tensors


def test_operands_are_left_alone_until_the_wait() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        total = funcol.all_gather_tensor(h, 0, world())
        g = h.relu() + 1  # could be written over h, which nobody else reads
        g = (g @ w).exp()
        return g.sum(0), total.sum(0)

    graph, program = compiled(f, torch.randn(8, 8), torch.randn(8, 8))
    assert any(is_collective(n) for n in graph.nodes)
    untouched(program)


def test_an_input_is_not_written_before_the_wait() -> None:
    def f(p: Tensor, g: Tensor) -> Tensor:
        total = funcol.all_gather_tensor(p, 0, world())
        p.sub_(g * 0.1)
        return total.sum() + 1

    graph, program = compiled(f, torch.randn(64), torch.randn(64))
    position = next(k for k, s in enumerate(program.steps) if isinstance(s, CallLibrary) and is_wait(s.node))
    for step in program.steps[:position]:
        assert not (isinstance(step, WriteOver) and step.target == graph.inputs[0].name)
    untouched(program)


def test_memory_between_a_collective_and_its_wait() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for k in range(4):
            x = (x + k).tanh()
            kept.append(funcol.all_gather_tensor(x, 0, world()))
            x = torch.softmax(x, -1) * 2
        return x, *(t.sum(0) for t in kept)

    _, program = compiled(f, torch.randn(8, 8))
    untouched(program)
    assert any(isinstance(s, Allocate) for s in program.steps)


def test_what_is_in_flight() -> None:
    """An operand is read until the last wait for what came of it, and always where there is none."""
    start = Library(("a", "b"), (None, None), "_c10d_functional::all_reduce_coalesced.default", ((Ref("x"), Ref("y")),))
    waits = [Library((f"w{n}",), (None,), "_c10d_functional::wait_tensor.default", (Ref(n),)) for n in "ab"]
    assert is_collective(start) and is_wait(waits[0]) and not is_collective(waits[0])
    assert in_flight(Graph("g", (), (start, *waits), ())) == {1: ("x", "y"), 2: ("x", "y")}
    assert in_flight(Graph("g", (), (start, waits[0]), ())) == {1: ("x", "y"), 2: ("x", "y")}
    assert in_flight(Graph("g", (), (start,), ())) == {1: ("x", "y")}


def test_values_of_a_group_of_one() -> None:
    """With this process alone, a sum over the group is the thing itself."""
    own = dist.new_group([0], backend="fake")

    def f(x: Tensor) -> Tensor:
        y = funcol.all_reduce(x.sin().t(), "sum", own)  # not contiguous: the result has strides of its own
        return y.exp() + x.t()

    x = torch.randn(5, 7)
    torch.testing.assert_close(torch.compile(f, backend="mlc", fullgraph=True)(x), f(x))
