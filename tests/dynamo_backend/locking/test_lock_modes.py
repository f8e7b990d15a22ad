"""Lock files under torch.compile: written, checked, followed; with a warm cache and without."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dynamo_backend.locking.lock_models import Mlp, Stack, softmax
from tests.dynamo_backend.locking.locks import compiled, edited, explained, run_locked, sections
from torch_mlc.dynamo_backend.locking.lock_text import LockError, LockFileError
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.fusion import rematerialize

pytestmark = pytest.mark.usefixtures("fresh")


def scores(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1)


SCORES = (scores, (torch.randn(16, 64), torch.randn(64, 128)))


def kernels(found: Any) -> list[list[str]]:
    """The texts of the kernels of each graph."""
    return [[b.source.text for b in g.stages.kernels.values()] for g in found.graphs]


# --- write and check --------------------------------------------------------------------------------------------------


def test_what_was_written_is_checked(path: Path) -> None:
    model, x = Mlp(), torch.randn(16, 32)
    expected = model(x)
    torch.testing.assert_close(run_locked(model, (x,), path, "write"), expected)
    before = path.stat()
    torch.testing.assert_close(run_locked(model, (x,), path, "write"), expected)
    torch.testing.assert_close(run_locked(model, (x,), path, "check"), expected)
    after = path.stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino), "what is unchanged is not touched"


def test_check_is_the_default_and_wants_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LockError, match=f"there is no lock file {re.escape(str(path))}. Write it by one build with"):
        run_locked(softmax, (torch.randn(4, 8),), path, "check")
    assert not path.exists()
    assert Options.resolve(None, {"lock": str(path)}, {}).lock_mode == "check"
    found = Options.resolve(None, None, {"MLC_LOCK": str(path), "MLC_LOCK_MODE": "use"})
    assert (found.lock, found.lock_mode) == (path, "use")


def test_a_section_that_is_missing_is_told_as_such(path: Path) -> None:
    run_locked(softmax, (torch.randn(4, 8),), path, "write")
    with pytest.raises(LockError, match=r"has no section 'softmax\(float32\[4, 9\]\) inference on cpu.*the nearest"):
        run_locked(softmax, (torch.randn(4, 9),), path, "check", cache=False)
    threads = torch.get_num_threads() + 1
    with pytest.raises(LockError, match=r"has this graph for cpu .* bits, \d+ thread"):
        run_locked(softmax, (torch.randn(4, 8),), path, "check", threads=threads)
    run_locked(softmax, (torch.randn(4, 8),), path, "write", threads=threads)
    run_locked(softmax, (torch.randn(4, 8),), path, "check")
    run_locked(softmax, (torch.randn(4, 8),), path, "check", threads=threads)
    assert len(sections(path)) == 2


def test_training_has_sections_of_both_directions(path: Path) -> None:
    model, x = Stack(1), torch.randn(2, 4, 32)
    run_locked(model, (x,), path, "write").sum().backward()
    kinds = [re.search(r"\) (\w+) on", name) for name in sections(path)]
    assert sorted(k[1] for k in kinds if k) == ["backward", "forward"]
    edited(path, "order:", "order: not")
    call = compiled(model, path, "check")
    with pytest.raises(Exception, match="is decided otherwise than") as caught:
        call(x).sum().backward()
    assert "+      order:" in str(caught.value) and "-      order: not" in str(caught.value)


def test_a_changed_cost_fails_with_what_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(x: Tensor) -> Tensor:
        y = x * 2 + 1
        return torch.sort(torch.softmax(y, -1)).values + y

    x = torch.randn(300, 400)
    run_locked(repeated, (x,), path, "write", cache=False)
    (before,) = sections(path).values()
    assert any("recompute: again" in line for line in before), "the example has nothing to compute again"
    monkeypatch.setattr(rematerialize, "GAIN", 0.0)
    with pytest.raises(LockError) as caught:
        run_locked(repeated, (x,), path, "check", cache=False)
    told = str(caught.value)
    assert "-      recompute: again" in told and "+      recompute: store" in told
    assert "test_lock_modes.py" in told and "y = x * 2 + 1" in told, "the model's line is not told"
    assert "MLC_LOCK_MODE=write" in told and "MLC_LOCK_MODE=use" in told
    torch.testing.assert_close(run_locked(repeated, (x,), path, "use", cache=False), repeated(x))


def test_a_cached_graph_is_checked_too(path: Path) -> None:
    call, inputs = SCORES
    run_locked(call, inputs, path, "write")
    edited(path, "product: library", "product: loops")
    before = counters.snapshot()
    with pytest.raises(LockError, match=r"(?s)-      product: loops.*\+      product: library"):
        run_locked(call, inputs, path, "check")
    after = counters.snapshot()
    assert after["graph_cache_hits"] == before.get("graph_cache_hits", 0) + 1, "this was to be a cached graph"


def test_graphs_that_are_equal_but_for_names_have_their_own(path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.alpha(x).relu()

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.beta(x).relu()

    with torch.no_grad():
        run_locked(One(), (torch.randn(3, 8),), path, "write")
        run_locked(Other(), (torch.randn(3, 8),), path, "write")
    one, other = (sections(path)[n] for n in sorted(sections(path)))
    assert [line.replace("alpha", "beta") for line in one[1:]] == other[1:] != one[1:]


def test_two_graphs_of_one_name_are_two_sections(path: Path) -> None:
    def made(scale: bool) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            return torch.softmax(x, -1) if scale else x.relu()

        return f

    x = torch.randn(5, 7)
    calls = [torch.compile(made(k), backend="mlc", options={"lock": str(path), "lock_mode": "write"}) for k in (0, 1)]
    for call in calls:
        call(x)
    names = list(sections(path))
    assert len(names) == 2 and names[1] == f"{names[0]} #2"
    for k in (1, 0):
        run_locked(made(bool(k)), (x,), path, "check")
        run_locked(made(bool(k)), (x,), path, "use")


# --- use --------------------------------------------------------------------------------------------------------------


def test_use_takes_the_library_or_loops_of_the_file(path: Path) -> None:
    call, inputs = SCORES
    by_cost = explained(call, inputs, path)
    (product,) = (d for d in by_cost.graphs[0].stages.decisions if d.kind == "product")
    other = {"library": "loops", "loops": "library"}[product.chosen]
    written = explained(call, inputs, path, options={"decisions": {product.name: other}})
    assert f"product: {other}, by hand" in path.read_text()
    used = explained(call, inputs, path, "use")
    assert kernels(used) == kernels(written) != kernels(by_cost)
    torch.testing.assert_close(run_locked(call, inputs, path, "use"), call(*inputs))
    with pytest.raises(LockError, match=f"-      product: {other}"):
        run_locked(call, inputs, path, "check")


def test_use_takes_the_fusion_of_the_file(path: Path) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x, -1)
        return y, (x * 3).cos()

    x = torch.randn(64, 100)
    by_cost = explained(f, (x,), path)
    apart = {d.name: "apart" for d in by_cost.graphs[0].stages.decisions if d.kind in ("fuse", "unite")}
    written = explained(f, (x,), path, options={"decisions": apart})
    assert len(kernels(written)[0]) > len(kernels(by_cost)[0]) == 1
    used = explained(f, (x,), path, "use")
    assert kernels(used) == kernels(written)
    torch.testing.assert_close(run_locked(f, (x,), path, "use"), f(x))


def test_use_takes_the_schedules_of_the_file(path: Path) -> None:
    x = torch.randn(64, 100)
    by_cost = explained(softmax, (x,), path)
    (build,) = by_cost.graphs[0].stages.kernels.values()
    assert build.schedule is not None
    edited(path, "      s.parallel(loop='b0_i0')\n", "")
    used = explained(softmax, (x,), path, "use")
    (other,) = used.graphs[0].stages.kernels.values()
    assert other.schedule is not None and other.schedule.trace.steps == build.schedule.trace.steps[:-1]
    assert other.schedule.rule == build.schedule.rule
    torch.testing.assert_close(run_locked(softmax, (x,), path, "use"), softmax(x))
    # A warm cache has the program of the other schedule.
    edited(path, "      s.vectorize(loop='b3_r0_1')\n", "")
    before = counters.snapshot()
    torch.testing.assert_close(run_locked(softmax, (x,), path, "use"), softmax(x))
    assert counters.snapshot()["kernels_generated"] == before["kernels_generated"] + 1


def test_use_takes_the_order_of_the_file(path: Path) -> None:
    model, x = Stack(1), torch.randn(2, 8, 32)
    by_cost = explained(model, (x,), path, training=True)
    orders = [d for g in by_cost.graphs for d in g.stages.decisions if d.kind == "order"]
    changed = {d.name: next(o.name for o in d.options if o.name != d.chosen) for d in orders}
    written = explained(model, (x,), path, training=True, options={"decisions": changed})
    used = explained(model, (x,), path, "use", training=True)
    for a, b in zip(written.graphs, used.graphs, strict=True):
        assert a.stages is not None and b.stages is not None
        assert [n.names for n in a.stages.fusion.graph.nodes] == [n.names for n in b.stages.fusion.graph.nodes]


def test_use_tunes_nothing(path: Path, tmp_path: Path) -> None:
    x = torch.randn(64, 100)
    run_locked(softmax, (x,), path, "write")
    before = counters.snapshot()
    run_locked(softmax, (x,), path, "use", tune=1, tune_budget="5s")
    assert counters.snapshot().get("kernels_tuned", 0) == before.get("kernels_tuned", 0)
    assert not (tmp_path / "cache" / "tuning.sqlite").exists()


def test_use_and_by_hand_may_not_contradict(path: Path) -> None:
    call, inputs = SCORES
    found = explained(call, inputs, path)
    (product,) = (d for d in found.graphs[0].stages.decisions if d.kind == "product")
    other = {"library": "loops", "loops": "library"}[product.chosen]
    with pytest.raises(LockError, match="that cannot be taken"):
        explained(call, inputs, path, "use", options={"decisions": {product.name: other}})


# --- files that are wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["check", "use"])
def test_another_model_is_no_match(mode: str, path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    x = torch.randn(6, 50)
    run_locked(f, (x,), path, "write")

    def f(x: Tensor) -> Tensor:  # type: ignore[no-redef]
        return torch.log_softmax(x, -1)

    with pytest.raises(LockError, match="_log_softmax"):
        run_locked(f, (x,), path, mode)


def test_a_way_that_is_none_names_the_line(path: Path) -> None:
    call, inputs = SCORES
    run_locked(call, inputs, path, "write")
    edited(path, "product: library", "product: magic")
    number = path.read_text().splitlines().index("      product: magic") + 1
    with pytest.raises(LockError, match=r"has product 'magic', and there are loops, library") as caught:
        run_locked(call, inputs, path, "use")
    assert f"model.mlc.lock:{number}: scores: mm" in str(caught.value).replace(f":{number - 1}:", f":{number}:")


def test_a_step_that_is_not_legal_names_the_line(path: Path) -> None:
    x = torch.randn(64, 100)
    run_locked(softmax, (x,), path, "write")
    edited(path, "s.parallel(loop='b0_i0')", "s.parallel(loop='b0_i7')")
    with pytest.raises(LockError, match=r"(?s)cannot be followed.*model\.mlc\.lock:\d+.*b0_i7"):
        run_locked(softmax, (x,), path, "use")
    edited(path, "s.parallel(loop='b0_i7')", "s.parallel(loop=")
    with pytest.raises(LockFileError, match=r"model\.mlc\.lock:\d+: .*is no step of a schedule"):
        run_locked(softmax, (x,), path, "use")


# --- several at once --------------------------------------------------------------------------------------------------


def test_threads_write_one_file(path: Path) -> None:
    failures: list[BaseException] = []
    shapes = [(3, 8 * k) for k in range(1, 7)]

    def write(shape: tuple[int, int]) -> None:
        try:
            explained_alone(shape, path)
        except BaseException as error:  # whatever it is, the test tells of it
            failures.append(error)

    threads = [threading.Thread(target=write, args=(shape,)) for shape in shapes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    text = path.read_text()
    assert [f"softmax(float32[{a}, {b}])" in text for a, b in shapes] == [True] * len(shapes)
    for shape in shapes:
        run_locked(softmax, (torch.randn(shape),), path, "check")


def explained_alone(shape: tuple[int, int], path: Path) -> None:
    torch.compile(softmax, backend="mlc", dynamic=False, options={"lock": str(path), "lock_mode": "write"})(
        torch.randn(shape)
    )
