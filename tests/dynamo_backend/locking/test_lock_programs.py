"""Lock files of graphs that have several programs by a size: each program has its section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dynamo_backend.locking.lock_models import GPU
from tests.dynamo_backend.locking.locks import edited, explained, run_locked, sections
from torch_mlc.dynamo_backend.locking.lock_text import WHERE, LockError, LockText, Section
from torch_mlc.dynamo_backend.locking.show import shown
from torch_mlc.runtime.counters import counters

SIZES = (2, 3, 7, 8, 9, 63, 64, 65, 400)

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def eager_to_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs part a graph for whatever it gains."""
    monkeypatch.setattr("torch_mlc.scheduler.cost.regions.LEAST_SAVED", 0.0)
    monkeypatch.setattr("torch_mlc.scheduler.cost.regions.LEAST_SHARE", 0.0)


def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x @ a) @ b, -1) + x.mean(0)


def given(rows: int = 33) -> tuple[Tensor, ...]:
    x = torch.randn(rows, 64)
    torch._dynamo.mark_dynamic(x, 0)
    return x, torch.randn(64, 640), torch.randn(640, 64)


def conditions(path: Path) -> list[str]:
    """The sizes that programs are for, as sections are called."""
    return [name.partition(WHERE)[2] for name in sections(path) if WHERE in name]


@pytest.mark.parametrize("mode", ["check", "use"])
def test_each_program_has_a_section(path: Path, mode: str) -> None:
    run_locked(mlp, given(), path, "write", regions="8,64", cache=False)
    assert sorted(conditions(path)) == sorted(["n0 < 8", "8 <= n0 < 64", "n0 >= 64"])
    (head,) = (lines for name, lines in sections(path).items() if WHERE not in name)
    assert head[head.index("  programs") + 1 :][:3] == ["    n0 < 8", "    8 <= n0 < 64", "    n0 >= 64"]
    before = path.read_text()
    for rows in SIZES:
        x, a, b = given(rows)
        found = run_locked(mlp, (x, a, b), path, mode, regions="8,64")
        torch.testing.assert_close(found.double(), mlp(x.double(), a.double(), b.double()), atol=2e-5, rtol=2e-5)
    run_locked(mlp, given(), path, "write", regions="8,64")
    assert path.read_text() == before


@pytest.mark.usefixtures("eager_to_part")
def test_what_costs_part_is_followed_where_they_no_longer_would(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_locked(mlp, given(400), path, "write", cache=False)
    parts = conditions(path)
    (head,) = (lines for name, lines in sections(path).items() if WHERE not in name)
    assert len(parts) > 1 and any(line.startswith("      regions: ") for line in head)
    run_locked(mlp, given(400), path, "check", cache=False)
    monkeypatch.undo()
    with pytest.raises(LockError, match=r"(?s)is decided otherwise than.*-  programs"):
        run_locked(mlp, given(400), path, "check", cache=False)
    x, a, b = given(400)
    before = counters.snapshot()
    found = run_locked(mlp, (x, a, b), path, "use", cache=False)
    torch.testing.assert_close(found.double(), mlp(x.double(), a.double(), b.double()), atol=2e-5, rtol=2e-5)
    assert counters.snapshot()["variants_compiled"] == before.get("variants_compiled", 0) + len(parts)


@pytest.mark.usefixtures("eager_to_part")
def test_one_program_stays_one_where_the_file_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("torch_mlc.scheduler.cost.regions.LEAST_SAVED", 1e12)
        run_locked(mlp, given(400), path, "write", cache=False)
    assert not conditions(path)
    run_locked(mlp, given(400), path, "use", cache=False)
    with pytest.raises(LockError, match=r"(?s)is decided otherwise than.*\+  programs"):
        run_locked(mlp, given(400), path, "check", cache=False)


def test_a_changed_program_is_found_with_its_sizes(path: Path) -> None:
    run_locked(mlp, given(), path, "write", regions="8")
    text = path.read_text()
    few = text.index("where n0 < 8")
    path.write_text(text[:few] + text[few:].replace("order:", "order: not", 1))
    for cache in (True, False):
        with pytest.raises(LockError, match=r"(?s)where n0 < 8 is decided otherwise than.*-      order: not") as caught:
            run_locked(mlp, given(), path, "check", regions="8", cache=cache)
        assert "n0 >= 8" not in str(caught.value)


def test_a_program_without_a_section_is_told_as_such(path: Path) -> None:
    run_locked(mlp, given(), path, "write", regions="8", cache=False)
    edited(path, "where n0 < 8\n", "where n0 < 7\n")
    for mode in ("check", "use"):
        with pytest.raises(LockError, match=r"has no section '.* where n0 < 8'"):
            run_locked(mlp, given(), path, mode, regions="8", cache=False)


@pytest.mark.usefixtures("eager_to_part")
@pytest.mark.parametrize("cuts", ["soon", "900000000,%", "=1"])
def test_regions_that_are_none_are_refused(path: Path, cuts: str) -> None:
    run_locked(mlp, given(400), path, "write", cache=False)
    (told,) = (x for x in path.read_text().splitlines() if x.startswith("      regions: "))
    edited(path, told, f"      regions: {cuts}")
    with pytest.raises(LockError, match=rf"model.mlc.lock:\d+: the graph has regions '{cuts}', which parts no sizes"):
        run_locked(mlp, given(400), path, "use", cache=False)


def test_programs_that_are_gone_have_no_section(path: Path) -> None:
    run_locked(mlp, given(), path, "write", regions="8,64", cache=False)
    run_locked(torch.relu, (torch.randn(3),), path, "write", cache=False)
    run_locked(mlp, given(), path, "write", regions="16", cache=False)
    assert sorted(conditions(path)) == ["n0 < 16", "n0 >= 16"]
    run_locked(mlp, given(), path, "write", regions=0, cache=False)
    assert not conditions(path) and len(sections(path)) == 2


def test_both_directions_of_training(path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 6))

    def step(mode: str, rows: int) -> None:
        x = torch.randn(rows, 12)
        torch._dynamo.mark_dynamic(x, 0)
        found = run_locked(model, (x,), path, mode, regions="16")
        found.square().sum().backward()
        got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x).square().sum().backward()
        want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)

    step("write", 33)
    kinds = [name.partition(") ")[2].partition(" on ")[0] for name in sections(path)]
    assert sorted(kinds) == ["backward"] * 3 + ["forward"] * 3
    for mode, rows in (("check", 33), ("use", 33), ("use", 16), ("use", 15)):
        step(mode, rows)


def test_for_a_gpu_that_is_not_here(path: Path) -> None:
    options: dict[str, Any] = {"target": GPU, "regions": "16"}
    call: Callable[..., Any] = mlp
    for mode in ("write", "check", "use"):
        explained(call, given(), path, mode, options=options)
    assert sorted(conditions(path)) == ["n0 < 16", "n0 >= 16"]


def test_a_file_is_shown_with_its_programs(path: Path) -> None:
    run_locked(mlp, given(), path, "write", regions="8", cache=False)
    lines = list(shown(LockText.parse(path.read_text())))
    assert sum(line.startswith("2 programs: n0 < 8, n0 >= 8; numerics fast") for line in lines) == 1
    assert sum(line.startswith("graph ") for line in lines) == 3


def test_sections_of_a_graph_are_replaced_together() -> None:
    def graph(name: str, *body: str) -> Section:
        return Section.of(name, body)

    text = LockText().having_graph([graph("f", "  programs", "    a", "    b"), graph("f where a"), graph("f where b")])
    text = text.having_graph([graph("f #2"), graph("f #2 where a")])
    assert text.having_graph([graph("f #2"), graph("f #2 where a")]) is text
    after = text.having_graph([graph("f", "  programs", "    c"), graph("f where c")])
    assert [*sorted(after.sections)] == ["f", "f #2", "f #2 where a", "f where c"]
