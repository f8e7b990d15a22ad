"""Libraries in programs written in C: linked and loaded, under valgrind, and with nothing but the C library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.export.models import V4, written

PROGRAM = Path(__file__).with_name("program.c")
SAID = """\
twice gives 8
twice: dimension 0 of result 0 (y) is 9; it has to be 10 (2*s0)
twice: input 0 (x) has elements, and its data are a null pointer
there is no function 7; the library has 0 to 1
child 0
the host ran 2 loops
"""
# Where root's programs are, which a user's path may lack.
_CHROOT = shutil.which("chroot", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc that could build a program")
pytestmark = needs_gcc


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample")
    written(path, variants=(V4,))
    return path


def built(folder: Path, name: str, *rest: str, source: Path = PROGRAM, compiler: str = "gcc") -> Path:
    program = folder / name
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{folder}"]
    done = subprocess.run([compiler, *flags, str(source), "-o", str(program), *rest], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def run(command: Sequence[object], *, status: int = 0, **options: Any) -> str:
    """What a program prints; it has to end with ``status``."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == status, done.stdout + done.stderr
    text: str = done.stdout
    return text


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    return built(folder, "program", str(folder / "model.so"), "-lpthread", "-lm")


def test_a_program_calls_a_library(program: Path, folder: Path) -> None:
    # An environment without variables, and no current folder of ours.
    assert run([program, folder], env={}, cwd="/") == SAID


@pytest.mark.parametrize("compiler", [["gcc", "-x", "c", "-std=c99"], ["g++", "-x", "c++", "-std=c++11"]])
def test_the_header_is_plain_c_and_cplusplus(folder: Path, tmp_path: Path, compiler: list[str]) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]}")
    source = tmp_path / "source"
    source.write_text(
        '#include "model.h"\n#include "model.h"\nint main(void) { '
        "mlc_options o = {sizeof o, 0, 0, 0, 0, 0, 0, 0, 0}; mlc_model *m; "
        'return sample_open(".", &o, &m); }\n'
    )
    flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", f"-I{folder}"]
    run([*compiler, *flags, source])


def test_a_program_is_built_with_the_object(folder: Path) -> None:
    """``model.o`` goes into a program as any other object does, and nothing of the library is loaded then."""
    program = built(folder, "static", str(folder / "model.o"), "-lpthread", "-lm")
    assert run([program, folder], env={}) == SAID
    if shutil.which("readelf"):
        assert "model.so" not in run(["readelf", "-d", program])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_forks_at_the_same_time(folder: Path, threads: int) -> None:
    source = PROGRAM.with_name("stress.c")
    program = built(folder, f"stress{threads}", str(folder / "model.so"), "-lpthread", source=source)
    assert run([program, folder, threads, 300]) == "right\n"


def test_two_models_in_one_program(tmp_path: Path) -> None:
    """Nothing but prefixed names of a model is seen by another, in objects and in libraries."""
    for name, factor in (("sample", 1.0), ("other", 3.0)):
        written(tmp_path / name, name=name, factor=factor)
    source = tmp_path / "two.c"
    source.write_text(
        """
#include <stdio.h>
#include "sample/model.h"
#include "other/model.h"
#define CALL(NAME, RESULT) do { \\
    mlc_model *model; mlc_context *context; \\
    if (NAME##_open(#NAME, NULL, &model) || NAME##_context(model, &context)) return 1; \\
    if (NAME##_call(context, 0, in, RESULT)) { puts(NAME##_error(context)); return 2; } \\
    NAME##_close_context(context); NAME##_close(model); } while (0)
int main(void) {
  float x[3][64] = {{0}}, y[2][3][64], rows[1][64]; int64_t index[1] = {0}, calls;
  int64_t s[2] = {3, 64}, i[1] = {1}, r[2] = {1, 64};
  DLTensor in[2] = {{x, {1, 0}, 2, {2, 32, 1}, s, 0, 0}, {index, {1, 0}, 1, {0, 64, 1}, i, 0, 0}};
  DLTensor out[2][3] = {{{y[0], {1, 0}, 2, {2, 32, 1}, s, 0, 0}, {rows, {1, 0}, 2, {2, 32, 1}, r, 0, 0},
                         {&calls, {1, 0}, 0, {0, 64, 1}, 0, 0, 0}}};
  for (int k = 0; k < 3; k++) out[1][k] = out[0][k];
  out[1][0].data = y[1];
  CALL(sample, out[0]); CALL(other, out[1]);
  for (int k = 0; k < 64; k++)
    if (y[1][2][k] < 2.999f * y[0][2][k] - 1e-5f && y[0][2][k] > 0) return 3;
  printf("%d\\n", y[1][0][0] / y[0][0][0] > 2.99f && y[1][0][0] / y[0][0][0] < 3.01f);
  return 0;
}
"""
    )
    for kind in ("model.o", "model.so"):
        objects = [str(tmp_path / n / kind) for n in ("sample", "other")]
        program = built(tmp_path, f"two{kind}", *objects, "-lpthread", "-lm", source=source)
        assert run([program], cwd=tmp_path) == "1\n"


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="there is no valgrind to look for wrong memory")
def test_valgrind_finds_nothing(program: Path, folder: Path) -> None:
    command = ["valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=all",
               "--show-leak-kinds=all"]  # fmt: skip
    assert run([*command, program, folder]) == SAID


def test_a_system_with_nothing_but_the_c_library(program: Path, folder: Path, tmp_path: Path) -> None:
    """A root folder that holds the loader, the C library, the program and the model: no Python, no torch, no gcc."""
    if os.geteuid() != 0 or _CHROOT is None or shutil.which("ldd") is None:
        pytest.skip("only root may change the root folder, by chroot, with what ldd tells")
    root = tmp_path / "root"
    (root / "model").mkdir(parents=True)
    shutil.copy(folder / "model.safetensors", root / "model")
    wanted = set(re.findall(r"(/\S+)", run(["ldd", program]) + run(["ldd", folder / "model.so"])))
    for path in (Path(w) for w in {*wanted, str(program)}):
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    files = {p.name for p in root.rglob("*") if p.is_file()}
    assert not [n for n in files if "python" in n or "torch" in n or "gomp" in n], files
    done = subprocess.run([str(_CHROOT), str(root), str(program), "/model"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """The program of docs/export-library.md is built, and prints what the page says."""
    page = (Path(__file__).parents[3] / "docs" / "export-library.md").read_text()
    code, said = re.search(r"```c\n(.*?)```\n\s*```text\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    written(tmp_path)
    (tmp_path / "example.c").write_text(code)
    for kind, rest in (("model.so", ()), ("model.o", ("-lpthread", "-lm"))):
        example = built(tmp_path, "example", str(tmp_path / kind), *rest, source=tmp_path / "example.c")
        assert run([example, tmp_path]) == said
