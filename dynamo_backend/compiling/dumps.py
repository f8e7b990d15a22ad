"""Files for people who look inside: the stages after the passes, numbered on from theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...codegen.host.python.text import HostText
from ...ir.text.printer import show
from .kernels import KernelBuild

_SUFFIX = {"llvm": "ll", "triton": "py"}


def dump_graph(folder: Path, kernels: Mapping[str, KernelBuild], text: HostText, number: int) -> None:
    """Write functions, nests, schedules, sources and the host program into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_fuse.txt").write_text("\n".join(show(b.function) for b in kernels.values()))
    for name, build in kernels.items():
        if build.nest is not None and build.schedule is not None:
            parts = ("# lowered", show(build.nest), f"# rule {build.schedule.rule}", str(build.schedule.trace),
                     "# scheduled", show(build.schedule.nest))  # fmt: skip
            (folder / f"{number + 1:02d}_schedule_{name}.txt").write_text("\n".join(parts) + "\n")
        if build.source is not None:
            suffix = _SUFFIX.get(build.source.language, "txt")
            (folder / f"{number + 2:02d}_emit_{name}.{suffix}").write_text(build.source.text)
    (folder / f"{number + 3:02d}_host.py").write_text(text.text)
