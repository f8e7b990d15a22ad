"""Libraries for systems that this one is not: AArch64 under qemu, and musl's C library. Both need compilers and an
emulator that few machines have; without them ``tests/codegen/elf/test_aarch64.py`` reads instructions back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.runtime.export.models import ARM, V4, written
from tests.runtime.export.test_programs import PROGRAM, SAID, built, run
from torch_mlc.ir.target import Target

ARM_GCC, MUSL_GCC = "aarch64-linux-gnu-gcc", "musl-gcc"
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
# Where cross compilers have the C library of AArch64.
ARM_ROOT = os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu")
needs_arm = pytest.mark.skipif(
    shutil.which(ARM_GCC) is None or QEMU is None,
    reason=f"there is no {ARM_GCC}, or no qemu-aarch64 to run its programs",
)
needs_musl = pytest.mark.skipif(shutil.which(MUSL_GCC) is None, reason=f"there is no {MUSL_GCC}")


@needs_arm
def test_a_library_of_aarch64_runs(tmp_path: Path) -> None:
    """Threads, forks, wrong calls: the program is that of x86-64, with the shared object and with the object."""
    written(tmp_path, target=ARM, machine="aarch64")
    for kind in ("model.so", "model.o"):
        program = built(tmp_path, "program", str(tmp_path / kind), "-lpthread", "-lm", compiler=ARM_GCC)
        assert run([str(QEMU), "-L", ARM_ROOT, program, tmp_path]) == SAID
    stress = PROGRAM.with_name("stress.c")
    program = built(tmp_path, "stress", str(tmp_path / "model.so"), "-lpthread", source=stress, compiler=ARM_GCC)
    assert run([str(QEMU), "-L", ARM_ROOT, program, tmp_path, 3, 30]) == "right\n"


@needs_arm
def test_processors_of_aarch64_are_asked_for_what_they_have(tmp_path: Path) -> None:
    more = Target("cpu", "generic", 4, vector_bytes=16, features="+dotprod,+i8mm,+bf16")
    for name, target, variants in (("both", ARM, (more,)), ("more", more, ())):
        folder = tmp_path / name
        written(folder, target=target, variants=variants, machine="aarch64")
        program = built(folder, "program", str(folder / "model.so"), "-lpthread", "-lm", compiler=ARM_GCC)
        on = [str(QEMU), "-L", ARM_ROOT, "-cpu"]
        assert run([*on, "max", program, folder]) == SAID
        if name == "both":
            assert run([*on, "cortex-a53", program, folder]) == SAID
        else:
            said = run([*on, "cortex-a53", program, folder], status=1)
            assert "open: this processor lacks dotprod; the library needs at least generic" in said


@needs_musl
def test_the_same_library_runs_on_musl(tmp_path: Path) -> None:
    written(tmp_path, variants=(V4,))
    program = built(tmp_path, "program", str(tmp_path / "model.so"), compiler=MUSL_GCC)
    assert run([program, tmp_path]) == SAID
    stress = PROGRAM.with_name("stress.c")
    program = built(tmp_path, "stress", str(tmp_path / "model.so"), source=stress, compiler=MUSL_GCC)
    assert run([program, tmp_path, 3, 100]) == "right\n"
