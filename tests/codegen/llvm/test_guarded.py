"""Kernels read and write nothing behind their own arrays, nor behind what they are given; a process that does, ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import warm_processes
from tests.codegen.llvm.guarded import CASES


@pytest.mark.skipif(sys.platform != "linux", reason="the guarded memory is asked for as Linux has it")
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_touched_beyond_the_end(name: str, tmp_path: Path) -> None:
    script = f"from tests.codegen.llvm.guarded import check\ncheck({name!r})\n"
    warm_processes.start(script, env={"MLC_CACHE_DIR": str(tmp_path)}).output()


def test_what_reads_on_is_found(tmp_path: Path) -> None:
    script = (
        "from tests.codegen.llvm import guarded\n"
        "x = guarded.guarded_tensor(guarded.torch.zeros(64))\n"
        "guarded.ctypes.string_at(x.data_ptr(), x.nbytes + 1)\n"
    )
    with pytest.raises(AssertionError, match="the process ended with -11"):
        warm_processes.start(script).output()
