"""`torch-mlc doctor`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from ..cli.near import tell
from .examine import DoctorStage, examine, timed
from .finding import MARKS, Finding, Mark

_SIGNS: Mapping[Mark, tuple[str, str]] = {
    "ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red"), "not done": ("-", "dim")
}  # fmt: skip
_WIDTH = 22


@click.command()
@click.option("--target", help="Compile for this GPU (cuda:sm_90, hip:gfx942), which need not be here.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, at the end.")
def doctor(target: str | None, as_json: bool) -> None:
    """Check this machine: versions, the cache, small programs on the CPU and on the GPU, compared with eager.

    Without a GPU nothing is launched: the programs are compiled for --target (cuda:sm_90), run in Triton's interpreter,
    and their machine code is read. Each stage is a process of its own. The status is 1 where something failed; warnings
    do not count."""
    console = Console(soft_wrap=True)

    def begin(stage: DoctorStage) -> None:
        if not as_json:
            console.print(Text(stage.name, "bold"))

    def show(finding: Finding) -> None:
        if not as_json:
            console.print(line_of(finding))

    found, seconds = timed(lambda: examine(target, show, begin=begin))
    counts = Counter(f.mark for f in found)
    good = not counts["failed"]
    if as_json:
        findings = [asdict(f) for f in found]
        tell(json.dumps({"ok": good, "seconds": round(seconds, 1), "findings": findings}, indent=2))
    else:
        told = ", ".join(f"{counts[mark]} {mark}" for mark in MARKS if counts[mark])
        console.print(Text(f"{told}; {seconds:.0f} s"))
    sys.exit(0 if good else 1)


def line_of(finding: Finding) -> Text:
    """A finding as a line, and how to mend it as another."""
    sign, style = _SIGNS[finding.mark]
    text = Text.assemble("  ", (sign, style), f" {finding.what:<{_WIDTH}} {finding.found}")
    if finding.mend and finding.mark != "ok":
        text.append(f"\n    {'':<{_WIDTH}} → {finding.mend}", "dim" if finding.mark == "not done" else "bold")
    return text
