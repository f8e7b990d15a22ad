"""A few random programs by the backend; and that their maker, their judge and what makes them smaller do their work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tests.fuzz import check as judge
from tests.fuzz.campaign import Campaign
from tests.fuzz.check import Outcome, check, difference
from tests.fuzz.generate import make_program
from tests.fuzz.program import Input, Program, Step
from tests.fuzz.record import add, row
from tests.fuzz.run import Result, function_of, inputs_of, run, run_rounds, run_wide
from tests.fuzz.shrink import shrink
from tests.workers import Worker, WorkerLost

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_equal_eager(seed: int) -> None:
    outcome = check(make_program(seed))
    assert outcome.status in ("equal", "torch"), f"{outcome}\n{make_program(seed).snippet(str(seed))}"


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_is_one_program_and_json_holds_all_of_it(seed: int) -> None:
    program = make_program(seed)
    assert Program.of(json.loads(json.dumps(program.record()))) == program == make_program(seed)


def test_a_snippet_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    program = replace(_small(), gradient=True)
    exec(compile(program.snippet("x"), "snippet", "exec"), {})
    said = capsys.readouterr().out
    assert said.count("gradients:") == 2 and "eager:" in said and "mlc:" in said


def _small(*lines: str, returns: tuple[str, ...] = ("t1",), eps: float = 0.0) -> Program:
    names = ("x0", "t0", "t1", "t2", "t3")
    lines = lines or ("torch.exp(x0)", "t0 * 2")
    steps = tuple(
        Step(line, (names[k + 1],), tuple(n for n in names if n in line), eps=eps) for k, line in enumerate(lines)
    )
    made = Input("x0", "numbers((A, 3, ), torch.float32, 5)", True)
    return Program(0, (made,), steps, returns, ({"A": 4},))


def _broken(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A backend whose answers are changed."""

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: tuple(change(t) if isinstance(t, torch.Tensor) else t for t in gm(*args))

    return backend


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t * (1 + 1e-4), "differ"),
        (lambda t: t.double(), "float64"),
        (lambda t: t[:-1], "eager's float32"),
        (lambda t: t.t().contiguous().t(), "strides"),
        (lambda t: torch.where(torch.arange(3) == 1, torch.nan, t), "nan"),
    ],
)
def test_the_judge_sees_what_differs(change: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    outcome = check(_small(), _broken(change))
    assert outcome.status == "wrong" and said in outcome.detail


def test_the_judge_sees_a_write_that_is_missing_and_memory_that_is_shared() -> None:
    write = replace(_small(), steps=(Step("x0.mul_(2)", (), ("x0",), "write"), Step("x0 + 1", ("t1",), ("x0",))))

    def lost(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: gm(*(a.clone() for a in args))

    assert "input 0 afterwards" in check(write, lost).detail
    two = replace(_small("x0 + 1", "x0 + 1"), returns=("t0", "t1"))

    def one(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: (gm(*args)[0],) * 2

    assert "shares memory" in check(two, one).detail


def test_nothing_is_said_of_who_shares_no_elements() -> None:
    views = replace(_small("x0[2:2]", "x0[:1]"), returns=("t0", "t1"))

    def alone(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: [r if r.numel() else r.clone() for r in gm(*args)]

    assert check(views, alone).status == "equal"


def test_random_errors_of_zeros_without_memory() -> None:
    """torch crashes where a mode sees them, as in the tangent of a gradient."""
    step = Step("torch.func.jvp(torch.func.grad(lambda p: p.square().sum()), (x0,), (x0 * 1,))[1]", ("t0",), ("x0",))
    program = replace(_small(), steps=(step,), returns=("t0",), gradient=True)
    assert run_wide(program, program.sizes[0], noise=3).values[0] is not None


def test_zeros_are_the_gradient_of_what_is_not_differentiated() -> None:
    """AOTAutograd gives them where eager gives none; other numbers are wrong, and so is a result."""
    end = torch.ones(2)
    want = Result([end, None], [0, 1], 1, 0)
    assert difference(Result([end, torch.zeros(3)], [0, 1], 1, 0), want, _no_reference) == ""
    assert "eager's None" in difference(Result([end, torch.ones(3)], [0, 1], 1, 0), want, _no_reference)
    want = Result([end, None], [0, 1], 2, 0)
    assert "eager's None" in difference(Result([end, torch.zeros(3)], [0, 1], 2, 0), want, _no_reference)


def _no_reference(runs: int) -> Any:
    raise AssertionError("nothing is compared with double precision")


def test_a_rounding_that_the_program_makes_large_is_no_fault() -> None:
    """exp of 40 times a rounded number: relative errors of 1e-5 are what float32 has there."""
    lines = ("torch.sin(x0) * 40", "torch.exp(t0) * 1e-9")
    moved = _broken(lambda t: t * (1 + 3e-6))
    eps = torch.finfo(torch.float32).eps
    assert check(_small(*lines, eps=eps), moved).status == "equal"
    assert check(_small("x0 * 2", "t0 * 1.5", eps=eps), _broken(lambda t: t * (1 + 2e-5))).status == "wrong"


def test_gradients_of_attention_are_as_sure_as_its_kernels_make_them() -> None:
    """Kernels keep the logarithm of a row's sum, which rounds by the size of the scores, here of hundreds."""
    attention = "F.scaled_dot_product_attention(x0 * 3.5, x0, x0)"
    given = Input("x0", "(numbers((1, 1, A, 64), torch.float32, 7) * 3)", True)
    program = Program(
        0, (given,), (Step(attention, ("t0",), ("x0",), eps=2.0**-23),), ("t0",), ({"A": 31},), gradient=True
    )  # fmt: skip

    def by_kernel(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x * 3.5, x, x * off)[0],)

        return run

    off = 1.0
    assert check(program, by_kernel).status == "equal"
    off = 1.001
    assert check(program, by_kernel).status == "wrong"


def test_errors_reach_lines_beside_operators_with_bodies() -> None:
    """The gradient of the sum of a norm cancels, so what single precision has of it is all rounding."""
    lines = (
        "torch.func.grad(lambda p: F.layer_norm(p, p.shape[-1:], eps=0.1).sum())(x0)",
        "flex(x0[None, None], x0[None, None], x0[None, None], None)",
    )
    program = _small(*lines, returns=("t0",), eps=torch.finfo(torch.float32).eps)
    assert float(run_wide(program, program.sizes[0]).values[0].abs().max()) < 1e-14
    assert float(run_wide(program, program.sizes[0], 0).values[0].abs().max()) > 1e-9


def test_more_runs_are_made_where_a_few_say_nothing() -> None:
    """Each may have found the same sign by chance."""
    asked = []

    def reference(runs: int) -> judge.Reference:
        asked.append(runs)
        one = torch.ones(2).double()
        return judge.Reference([one], [[one * (1 + (k > 9))] for k in range(runs)])

    got, want = (Result([torch.full((2,), v)], [0], 1, 0) for v in (2.0, 1.0))
    assert difference(got, want, reference) == "" and asked == list(judge.RUNS)
    assert "2 of 2 differ" in difference(Result([torch.full((2,), 20.0)], [0], 1, 0), want, reference)


def test_double_precision_is_the_same_program() -> None:
    program = replace(_small(), gradient=True)
    narrow = run(program, function_of(program), inputs_of(program, program.sizes[0])).values
    wide = run_wide(program, program.sizes[0]).values
    for n, w in zip(narrow, wide, strict=True):
        assert w.dtype is torch.float64
        torch.testing.assert_close(n.double(), w, rtol=1e-6, atol=1e-6)


def test_torch_excuses_what_differs_as_it_does_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value is none where torch's own tracing has other strides."""
    wrong = _broken(lambda t: t + 1)
    seen = {"value": _broken(lambda t: t + 2), "strides": _broken(lambda t: t.t().contiguous().t())}
    for excuse, status in (("value", "torch"), ("strides", "wrong")):
        monkeypatch.setattr(judge, "PEER", seen[excuse])
        assert check(_small(), wrong).status == status


def test_random_errors_reach_what_is_a_view_of_what_was_written() -> None:
    """Torch crashes where such a view gets a hook once its memory was written again."""
    write = Step("t0[0].add_(1)", ("t1",), ("t0",), "write", eps=1e-7)
    program = replace(_small("x0.to(torch.float64, copy=True)"), returns=("t1",), gradient=True)
    program = replace(program, steps=(*program.steps, write))
    plain, moved = (run_wide(program, program.sizes[0], noise).values for noise in (None, 0))
    assert 0 < float((plain[0] - moved[0]).abs().max()) < 1e-5


def test_random_errors_of_a_view_that_is_what_it_is_a_view_of() -> None:
    """It has a hook; torch crashes where it gets one more after a write to its memory."""
    eps = torch.finfo(torch.bfloat16).eps
    steps = (
        Step("torch.cumsum(x0.tanh(), 0)", ("t0",), ("x0",), eps=eps),
        Step("t0.flatten()", ("t1",), ("t0",), "view", eps=eps),
        Step("t1.neg_() * 2", ("t2",), ("t1",), "write", eps=eps),
        Step("t1.flatten()", ("t3",), ("t1",), "view", eps=eps),
    )
    program = replace(_small(), steps=steps, returns=("t2", "t3"), gradient=True)
    plain, moved = (run_wide(program, program.sizes[0], noise).values for noise in (None, 0))
    for a, b in zip(plain, moved, strict=True):
        assert float((a - b).abs().max()) < 1
    assert not torch.equal(plain[-1], moved[-1])


def test_rounds_see_other_values_each() -> None:
    program = replace(_small(), gradient=True, rounds=2)
    args = inputs_of(program, program.sizes[0])
    first = run_rounds(program, function_of(program), args, 1).values[0].clone()
    second = run_rounds(program, function_of(program), inputs_of(program, program.sizes[0]), 2).values[0]
    assert torch.equal(second, first.flip(0)) and not torch.equal(second, first)

    def kept(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found: list[Any] = []
        return lambda *given: found[0] if found else found.append(gm(*given)) or found[0]

    assert "round 1" in check(replace(program, gradient=False), kept).detail


def test_programs_become_smaller_while_they_fail() -> None:
    program = make_program(next(s for s in range(100, 200) if len(make_program(s).steps) > 6))
    culprit = program.steps[3]

    def fails(p: Program) -> bool:
        return any(s.text.split("(")[0] == culprit.text.split("(")[0] for s in p.steps) and bool(p.returns)

    small = shrink(program, fails)
    assert fails(small) and len(small.steps) < len(program.steps)
    assert len(small.returns) == 1 and len(small.sizes) == 1 and not small.gradient


@pytest.mark.parametrize(("reduction", "tries"), [(60.0, 5), (0.0, 0)])
def test_a_failing_program_is_made_smaller_for_so_long(
    reduction: float, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Program] = []

    def again(self: Campaign, worker: Worker, program: Program) -> dict[str, Any]:
        tried.append(program)
        return {"status": "hang", "detail": "again"}

    monkeypatch.setattr(Campaign, "again", again)
    campaign = Campaign(tmp_path, trials=5, reduction=reduction)
    record: dict[str, Any] = {"seed": 0, "status": "hang", "detail": "first"}
    program = make_program(next(s for s in range(100, 200) if len(make_program(s).steps) > 6))
    campaign.fault(_worker("true", tmp_path), program, record)
    assert len(tried) == tries and record["smaller"] == ("again" if tries else "first")
    assert Program.of(record["whole"]) == program and (record["program"] != record["whole"]) == bool(tries)
    assert (tmp_path / f"seed_{program.seed}.py").read_text() == record["script"]


def test_an_outcome_of_eager_is_no_fault() -> None:
    assert check(_small("x0 @ x0")).status == "invalid"
    assert isinstance(check(_small()), Outcome)


def test_a_campaign_is_a_row_of_a_table(tmp_path: Path) -> None:
    statuses = {7: "equal", 5: "equal", 6: "torch", 8: "wrong", 9: "invalid", 10: "generator"}
    line = row([{"seed": seed, "status": status} for seed, status in statuses.items()], "2026-01-02")
    assert line == "| 2026-01-02 | 5 to 10 | 6 | 2 | 1 | 2 | 8 wrong |\n"
    page = tmp_path / "campaigns.md"
    add(page, line)
    add(page, line)
    head, *rows = page.read_text().split("|---|---|---:|---:|---:|---:|---|\n")
    assert head.startswith("# ") and rows == [line * 2]
    with pytest.raises(ValueError, match="without programs"):
        row([], "2026-01-02")


def _worker(script: str, tmp_path: Path) -> Worker:
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return Worker("", tmp_path, process)


def test_a_worker_that_gets_little_of_a_machine_is_waited_for(tmp_path: Path) -> None:
    worker = _worker("sleep 1.5; echo {}", tmp_path)
    try:
        assert worker.answer(1) == {}
    finally:
        worker.end()


@pytest.mark.parametrize("script", ["while :; do :; done", "sleep 600"])
def test_a_worker_that_does_not_come_back_is_ended(script: str, tmp_path: Path) -> None:
    worker = _worker(f"exec sh -c '{script}'", tmp_path)
    with pytest.raises(WorkerLost) as lost:
        worker.answer(0.2)
    assert lost.value.status == "hang" and worker.process is None


def test_what_cancels_wholly_has_no_digits() -> None:
    """The gradient of a standard deviation of two numbers is one of two constants, whose own gradient is nothing; where
    eager has digits, as many are asked for."""
    truth, eager = torch.full((4,), 1e-16, dtype=torch.float64), torch.tensor([1e-7, -8e-8, 0, 3e-8]).double()
    near = judge._near(eager.flip(0) * 2, eager, truth, [], 2e-6, torch.float32)
    assert bool(near.all())
    truth, eager = torch.ones(4, dtype=torch.float64), torch.tensor([1 + 1e-7, 1, 1, 1]).double()
    near = judge._near(eager + 1e-4, eager, truth, [], 2e-6, torch.float32)
    assert not bool(near.any())
