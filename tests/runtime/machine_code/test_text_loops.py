"""How often loops of a kernel's text run, against Python that runs them."""

import pytest

from torch_mlc.runtime.machine_code.text_loops import text_loops

TEXT = """import triton.language as tl


@triton.jit
def f(in0_ptr, s0):
    pid_x = tl.program_id(0)
    t0 = tl.arange(0, 64)
    {body}
"""


def runs(body: str, s0: int = 100, grid: tuple[int, ...] = (8,)) -> list[float | None]:
    indented = "\n    ".join(body.strip().splitlines())
    return [lp.runs for lp in text_loops(TEXT.format(body=indented), "f", {"s0": s0}, grid)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("for k0 in tl.range(0, 32):\n    x = k0", [32]),
        ("for k0 in tl.range(0, (s0 + 63) // 64, num_stages=2):\n    x = k0", [2]),
        ("for k0 in tl.static_range(3):\n    for k1 in tl.range(0, 5):\n        x = k1", [3, 15]),
        ("for k0 in tl.range(0, 0):\n    x = k0", [0]),
        # Inner bounds that follow the outer loop, and programs: the average.
        ("for k0 in tl.range(0, 4):\n    for k1 in tl.range(0, k0):\n        x = k1", [4, 6]),
        ("high = tl.minimum(tl.cast(pid_x + 1, tl.int32), 4)\nfor k0 in tl.range(0, high):\n    x = k0", [26 / 8]),
        ("for k0 in tl.range(pid_x.to(tl.int64), 16):\n    x = k0", [16 - 28 / 8]),
        ("if pid_x < 6:\n    for k0 in tl.range(0, 8):\n        x = k0", [6 / 8, 6]),
        ("if pid_x < 6:\n    x = 1\nelse:\n    for k0 in tl.range(0, 8):\n        x = k0", [6 / 8, 2, 2 / 8]),
        ("if tl.load(in0_ptr) < 6:\n    x = 1\nelse:\n    x = 2", [None, None]),
        ("first = tl.load(in0_ptr)\nfor k0 in tl.range(0, first):\n    x = k0", [None]),
        # Sizes of a row of a table: those of a typical one are given.
        ("s0 = tl.load(in0_ptr + 2).to(tl.int32)\nfor k0 in tl.range(0, s0):\n    x = k0", [100]),
        ("n = 4\nn = tl.load(in0_ptr)\nfor k0 in tl.range(0, n):\n    x = k0", [None]),
    ],
)
def test_runs(body: str, expected: list[float | None]) -> None:
    assert runs(body) == pytest.approx(expected) if None not in expected else runs(body) == expected


def test_sides_of_a_branch_have_lines_of_their_own() -> None:
    text = TEXT.format(body="if pid_x < 6:\n        x = 1\n    else:\n        x = 2")
    assert [(lp.first, lp.last) for lp in text_loops(text, "f", {"s0": 0}, (8,))] == [(8, 9), (11, 11)]


@pytest.mark.parametrize("grid", [(4096,), (64, 64), (16, 16, 16), (3, 1000), (1,)])
def test_many_programs_are_sampled_evenly(grid: tuple[int, ...]) -> None:
    (found,) = runs("for k0 in tl.range(0, pid_x):\n    x = k0", grid=grid)
    assert found == pytest.approx((grid[0] - 1) / 2, rel=0.1, abs=0.5)


def test_long_loops_are_sampled() -> None:
    outer, inner = runs("for k0 in tl.range(0, 100000):\n    for k1 in tl.range(0, 2):\n        x = k1")
    assert (outer, inner) == (100000, 200000)
