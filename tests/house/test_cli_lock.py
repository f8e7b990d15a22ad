"""`torch-mlc lock`: what is in a lock file, and how two differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from torch_mlc.dynamo_backend.cli.main import cli

GOLDEN = Path(__file__).parents[1] / "dynamo_backend" / "locking" / "golden"


def answer(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["lock", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_show_has_a_table_of_each_graph_what_makes_most_bytes_first() -> None:
    lines = answer("show", GOLDEN / "mlp_training_avx2.txt").splitlines()
    heads = [k for k, line in enumerate(lines) if line.startswith("graph ")]
    assert [lines[k].partition(")")[2].split()[0] for k in heads] == ["backward", "forward"]
    forward = lines[heads[1] :]
    assert forward[1].startswith("1 kernel, 2 library calls, 1 schedule, ") and "numerics fast" in forward[1]
    assert forward[2].split() == ["bytes", "place", "runs", "decided"]
    assert forward[3].split()[:4] == ["8.2", "kB", "library", "up:"]
    assert "aten::addmm.default" in forward[3] and "product: library" in forward[3]
    sizes = [line.split()[0] for line in forward[3:] if "kB" in line]
    assert sizes == sorted(sizes, key=float, reverse=True)
    assert any("the graph" in line and "order:" in line for line in forward)


def test_show_of_sizes_that_vary() -> None:
    assert "4 bytes x n0 x n1  kernel softmax: _softmax" in answer("show", GOLDEN / "softmax_sizes_avx2.txt")


def test_diff_exits_as_diff_does(tmp_path: Path) -> None:
    one = GOLDEN / "mlp_avx2.txt"
    other = tmp_path / "other.lock"
    other.write_text(one.read_text())
    assert answer("diff", one, other) == ""
    other.write_text(one.read_text().replace(", by rule", ", by tuning"))
    assert answer("diff", one, other) == "", "who chose is no difference"
    other.write_text(one.read_text().replace("product: library", "product: loops", 1))
    told = answer("diff", one, other, code=1)
    assert "-      product: library\n+      product: loops\n" in told and "@@ decisions, up: addmm @@" in told
    assert f"only in {one}: " in answer("diff", one, GOLDEN / "mlp_avx512.txt", code=1)


@pytest.mark.parametrize("words", [("show",), ("diff", GOLDEN / "mlp_avx2.txt")])
def test_a_file_that_is_none_is_told(words: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "model.mlc.lock"
    assert f"there is no lock file {path}" in answer(*words, path, code=2)
    path.write_text("graph a\n")
    assert f"{path}:1: a lock file begins with" in answer(*words, path, code=2)
