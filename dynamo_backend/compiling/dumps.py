"""Files for people who look inside: the stages after the passes, numbered on from theirs."""

from __future__ import annotations

from collections.abc import Mapping

from ...codegen.host.python.text import HostText
from ...ir.passes import Runner
from ...ir.text.printer import show
from .kernels import KernelBuild

_SUFFIX = {"llvm": "ll", "triton": "py"}


def dump_graph(kernels: Mapping[str, KernelBuild], text: HostText, run: Runner) -> None:
    """Write nests, schedules, sources and the host program."""
    for name, build in kernels.items():
        if build.nest is not None and build.schedule is not None:
            parts = ("# lowered", show(build.nest), f"# rule {build.schedule.rule}", str(build.schedule.trace),
                     "# scheduled", show(build.schedule.nest))  # fmt: skip
            run.write("schedule", name, "\n".join(parts) + "\n")
        if build.source is not None:
            run.write("emit", name, build.source.text, _SUFFIX.get(build.source.language, "txt"))
    run.write("host", "", text.text, "py")
