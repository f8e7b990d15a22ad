"""Keys of places: no name counts, what is around does, and every process has the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests import warm_processes
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, Library
from torch_mlc.ir.passes import run_passes
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.decisions import Decider, DecisionRecord, place_key
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES


def layers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.relu(torch.relu(x + 1) @ w) * 2
    return x


def imported(fn: object = layers, size: int = 64) -> Graph:
    with torch.no_grad():
        (gm,) = capture(fn, (torch.randn(8, size), torch.randn(size, size)))  # type: ignore[arg-type]
    return import_graph(gm)


def products(graph: Graph) -> list[str]:
    return [n.names[0] for n in graph.nodes if isinstance(n, Library)]


def test_layers_that_repeat_have_the_same_key() -> None:
    graph = imported()
    keys = {place_key(graph, (name,)) for name in products(graph)}
    (key,) = keys
    assert len(key) == 16 and int(key, 16)
    assert len({place_key(graph, (name,), back=4) for name in products(graph)}) == 2, "the first reads an input"


def test_names_do_not_count_and_sizes_do() -> None:
    def other_names(value: Tensor, weight: Tensor) -> Tensor:
        for _ in range(4):
            made = torch.relu(value + 1)
            value = torch.relu(made @ weight) * 2
        return value

    one, same, larger = imported(), imported(other_names), imported(size=32)
    keys = [[place_key(g, (name,)) for name in products(g)] for g in (one, same, larger)]
    assert keys[0] == keys[1] and not set(keys[0]) & set(keys[2])


def test_what_reads_a_result_counts() -> None:
    graph = imported(lambda x, w: torch.relu(x @ w))
    (name,) = products(graph)
    alone = replace(graph, nodes=tuple(n for n in graph.nodes if name in n.names), outputs=(name,))
    assert place_key(graph, (name,)) != place_key(alone, (name,))


def decided(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.softmax(x @ w, -1)
    return y, torch.relu(y).sum()


def records() -> tuple[DecisionRecord, ...]:
    with torch.no_grad():
        (gm,) = capture(decided, (torch.randn(16, 64), torch.randn(64, 20000)))
    context = PassContext(decider=Decider())
    assert context.decider is not None
    fuse(run_passes(GRAPH_PASSES, import_graph(gm), context), context)
    return context.decider.records


def test_recording_changes_no_answer() -> None:
    with torch.no_grad():
        (gm,) = capture(decided, (torch.randn(16, 64), torch.randn(64, 20000)))
    found = [
        fuse(run_passes(GRAPH_PASSES, import_graph(gm), c), c) for c in (PassContext(), PassContext(decider=Decider()))
    ]
    assert found[0].graph.nodes == found[1].graph.nodes and found[0].functions == found[1].functions
    kinds = {r.kind for r in records()}
    assert {"product", "split", "fuse"} <= kinds
    assert all(r.chosen == r.default for r in records())


SCRIPT = """
from tests.scheduler.decisions.test_keys import records
print(*(f"{r.name}={r.chosen}" for r in records()))
"""


def test_every_process_has_the_same_keys() -> None:
    here = " ".join(f"{r.name}={r.chosen}" for r in records())
    assert warm_processes.start(SCRIPT).output().strip() == here
