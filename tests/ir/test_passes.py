"""The runner runs what applies, checks, dumps, times and records; and says which pass it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from torch_mlc.ir.graph.graph import Compute, Graph, IRModule
from torch_mlc.ir.passes import (
    GRAPH,
    Form,
    Level,
    OrderError,
    Pass,
    PassError,
    Plain,
    Runner,
    Setting,
    check_order,
    run_passes,
)
from torch_mlc.ir.text.parser import parse

TEXT = """module(main='main')
@graph
def main(x: float32[4]):
    y = compute(float32[4], lambda i0: exp(x[i0]))
    z = compute(float32[4], lambda i0: neg(x[i0]))
    return (z,)
"""


def graph() -> Graph:
    made = parse(TEXT)
    assert isinstance(made, IRModule)
    return made.graph


def read(path: Path) -> Graph:
    made = parse(path.read_text())
    assert isinstance(made, IRModule)
    return made.graph


def drop(graph: Graph) -> Graph:
    return replace(graph, nodes=tuple(n for n in graph.nodes if n.names[0] in graph.outputs))


def spoil(graph: Graph) -> Graph:
    return replace(graph, nodes=tuple(replace(n, axes=()) for n in graph.nodes if isinstance(n, Compute)))


def crash(graph: Graph) -> Graph:
    raise KeyError("lost")


ALL_READ: Form[Graph] = Form("all read", lambda g: drop(g) == g)
NEVER: Setting[object] = Setting("never", lambda context: False)
DROP = Pass("drop", GRAPH, Plain(drop), leaves=(ALL_READ,))
KEEP = Pass("keep", GRAPH, Plain(lambda g: g))
SPOIL = Pass("spoil", GRAPH, Plain(spoil))
CRASH = Pass("crash", GRAPH, Plain(crash))


def test_steps_are_numbered_where_they_changed_something_and_recorded(tmp_path: Path) -> None:
    run = Runner(tmp_path, verify=True)
    after = run(graph(), (KEEP, DROP, KEEP), None)
    again = run.step(GRAPH, graph)
    run(again, (DROP,), None)
    assert [n.names for n in after.nodes] == [("z",)]
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["00_input.txt", "01_drop.txt", "02_graph.txt", "03_drop.txt"]
    assert read(tmp_path / "00_input.txt") == graph() and read(tmp_path / "01_drop.txt") == after
    told = [(s.level, s.name, s.of, s.changed, s.before, s.after) for s in run.steps]
    assert told == [
        ("graph", "keep", "", False, 2, 2),
        ("graph", "drop", "", True, 2, 1),
        ("graph", "keep", "", False, 1, 1),
        ("graph", "graph", "", True, 0, 2),
        ("graph", "drop", "", True, 2, 1),
    ]
    assert all(s.seconds >= 0 for s in run.steps)


def test_a_pass_that_breaks_a_rule_is_named(tmp_path: Path) -> None:
    with pytest.raises(PassError) as caught:
        Runner(tmp_path, verify=True)(graph(), (KEEP, SPOIL), None)
    text = str(caught.value)
    assert text.startswith("pass spoil: main: 0 axes and a shape of 1 dimensions") and "^ here" in text
    assert "02_spoil_broken.txt" in text
    assert read(tmp_path / "01_spoil_failed.txt") == graph()


def test_a_pass_that_raises_is_named_and_its_input_kept(tmp_path: Path) -> None:
    with pytest.raises(PassError, match=r"pass crash: 'lost'\nits input is in .*01_crash_failed.txt") as caught:
        Runner(tmp_path)(graph(), (CRASH,), None)
    assert isinstance(caught.value.__cause__, KeyError)
    assert read(tmp_path / "01_crash_failed.txt") == graph()


def test_broken_input_is_not_blamed_on_a_pass() -> None:
    with pytest.raises(PassError, match="the input of the graph passes: main: 0 axes"):
        Runner(verify=True)(spoil(graph()), (KEEP,), None)


def test_nothing_is_printed_or_verified_unasked() -> None:
    def refuse(subject: object) -> str:
        raise AssertionError("asked")

    level: Level[Graph] = Level("shy", refuse, lambda g: len(g.nodes), refuse)
    run = Runner()
    assert run(graph(), (Pass("drop", level, Plain(drop), leaves=(Form("asked", refuse),)),), None) == drop(graph())
    assert run.steps[0].changed


def test_a_pass_whose_setting_does_not_hold_is_skipped() -> None:
    run = Runner()
    skipped = replace(CRASH, needs=(NEVER,))
    assert run(graph(), (skipped,), None) == graph() == run_passes((skipped,), graph(), None)
    assert not run.steps


@dataclass
class Box:
    value: int


BOX: Level[Box] = Level("box", lambda b: f"value {b.value}", lambda b: b.value, lambda b: None, lambda b: "b")


def count_down(box: Box, least: int) -> int:
    """In place; how often."""
    done = max(box.value - least, 0)
    box.value -= done
    return done


def test_what_works_in_place_tells_by_its_return_value(tmp_path: Path) -> None:
    run, box = Runner(tmp_path), Box(5)
    down = Pass("count_down", BOX, count_down)
    assert run(box, (down, down), 3) is box and box.value == 3
    assert [(s.changed, s.before, s.after, s.of) for s in run.steps] == [(True, 5, 3, "b"), (False, 3, 3, "b")]
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "00_input_b.txt": "value 5", "01_count_down_b.txt": "value 3"
    }  # fmt: skip
    assert run_passes((down,), box, 1) is box and box.value == 1


@pytest.mark.parametrize(
    ("passes", "fault"),
    [
        ((DROP, replace(KEEP, needs=(ALL_READ,))), ""),
        ((replace(KEEP, needs=(ALL_READ,)), DROP), "pass keep needs 'all read': it must stand behind drop"),
        ((replace(KEEP, needs=(ALL_READ,)),), "no pass of the list leaves that"),
        ((replace(KEEP, needs=(NEVER,)),), ""),
    ],
)
def test_order(passes: Sequence[Pass[Graph, object]], fault: str) -> None:
    if not fault:
        check_order(passes)
        return
    with pytest.raises(OrderError, match=fault):
        check_order(passes)


def test_forms_that_do_not_hold_are_found_under_verify() -> None:
    with pytest.raises(PassError, match="pass keep needs 'all read'"):
        Runner(verify=True)(graph(), (replace(KEEP, needs=(ALL_READ,)),), None)
    with pytest.raises(PassError, match="pass keep does not leave 'all read'"):
        Runner(verify=True)(graph(), (replace(KEEP, leaves=(ALL_READ,)),), None)
