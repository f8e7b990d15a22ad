"""Texts of all kernels, before and after: the same code makes the same, and what changes is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.kernel_texts.cli import main
from benchmarks.kernel_texts.corpus import corpus
from benchmarks.kernel_texts.taking import normal
from torch_mlc.codegen.triton import emit
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.runtime.compile.kernels import compile_source

pytest.importorskip("triton")

# A kernel in training, a model with a library's products, and a static workload without a gradient.
SOME = ("kernels/rms_norm, odd", "models/dlrm, cuda:sm_90, inference", "static/softmax rows, N=1024, float32")


def run(*arguments: object, patterns: tuple[str, ...] = ()) -> Result:
    filters = [part for pattern in patterns for part in ("--filter", pattern)]
    return CliRunner().invoke(main, [*map(str, arguments), *filters], catch_exceptions=False)


def write(folder: Path, *patterns: str) -> list[str]:
    result = run("--size", "tiny", "--out", folder, patterns=patterns)
    assert result.exit_code == 0, result.output
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def counts(result: Result) -> list[int]:
    """The last row of the table: workloads, texts, and those equal, changed, missing and added."""
    (row,) = (line for line in result.output.splitlines() if line.startswith("│ all "))
    return [int(cell) for cell in row.split("│") if cell.strip().isdigit()]


def test_the_same_code_makes_the_same_texts(tmp_path: Path) -> None:
    places = write(tmp_path / "before", *SOME)
    assert "kernels/rms_norm,_odd/cpu/training/host native.ll" in places
    assert {p.split("/")[0] for p in places} == {"corpus.json", "kernels", "models", "static"}
    result = run("--against", tmp_path / "before")  # of the size and the cases that are there
    assert result.exit_code == 0, result.output
    texts = len(places) - 1
    assert texts > 20 and counts(result) == [3, texts, texts, 0, 0, 0]


@pytest.mark.slow
def test_other_seeds_of_hashes_and_another_folder_make_the_same_texts(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    for seed, option in (("1", "--out"), ("2", "--against")):
        command = [
            sys.executable,
            "-m",
            "benchmarks.kernel_texts",
            option,
            str(tmp_path / "texts"),
            "--filter",
            "llama",
        ]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed, "MLC_NUMERICS": "eager"}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_an_emitter_does_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "before", "static/softmax rows, N=1024, float32")
    monkeypatch.setattr(emit, "_HEAD", emit._HEAD + "# planted\n")
    result = run("--against", tmp_path / "before", "--out", tmp_path / "after")
    assert result.exit_code == 1
    assert counts(result) == [1, 5, 4, 1, 0, 0]  # a kernel for the CPU and one for the GPU, their programs
    assert "\n+# planted\n" in result.output and "/cuda_sm_90/inference/" in result.output
    # What was written is whole, and is what the code at hand makes.
    assert run("--against", tmp_path / "after").exit_code == 0


def test_texts_that_are_there_once_are_told(tmp_path: Path) -> None:
    places = write(tmp_path, "kernels/row_sum, odd, cuda:sm_90, inference")
    (kernel,) = (p for p in places if p.endswith(".py") and "host" not in p)
    (tmp_path / kernel).rename((tmp_path / kernel).with_name("another.py"))
    result = run("--against", tmp_path)
    assert result.exit_code == 1 and counts(result) == [1, 2, 1, 0, 1, 1]
    assert f"added: {kernel}" in result.output and "missing: " in result.output


def test_kernels_that_are_compiled_past_it_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compile_source", lambda *a, **k: compile_source(*a, **k))
    result = run("--out", tmp_path / "texts", patterns=("kernels/row_sum, odd, cpu, inference",))
    assert result.exit_code == 1 and "was compiled, but not by compile_source" in result.output
    assert not (tmp_path / "texts" / "corpus.json").exists()
    result = run("--against", tmp_path / "texts")
    assert result.exit_code == 2 and "holds no texts, or they were not all written" in result.output


def test_folders_and_sizes_that_do_not_fit(tmp_path: Path) -> None:
    assert "say where the texts go" in run().output
    write(tmp_path / "texts", "kernels/row_sum, odd, cuda:sm_90, inference")
    assert "not an empty folder" in run("--out", tmp_path / "texts").output
    assert "are of size tiny" in run("--against", tmp_path / "texts", "--size", "full").output


def test_the_corpus_has_every_workload_for_both_targets() -> None:
    cases = corpus("tiny")
    for_cpu, for_gpu = ([(c.name, c.modes) for c in cases if c.target.startswith(t)] for t in ("cpu", "cuda"))
    assert for_cpu == for_gpu and len(for_cpu) * 2 == len(cases) > 200
    training = {name for name, modes in for_cpu if "training" in modes}
    assert {"kernels/softmax, odd", "kernels/depthwise_norm_relu, odd", "models/llama"} < training
    assert not training & {"kernels/row_argmax, odd", "models/gpt2_d128_decode", "static/linear + GELU"}


def test_what_differs_from_run_to_run_is_left_out() -> None:
    assert normal(
        "# model__12_forward_3: made\n# /a/b/model.py:12 in f; <string>.py:3\n<f at 0x7f12> 0x4168 @mlc[1,2] @mlc(3)"
    ) == ("# forward: made\n# model.py in f; <string>.py\n<f at an address> 0x4168 @mlc @mlc")
