"""``python -m tests.opinfo``: every operator of torch's database, compiled and compared with eager.

python -m tests.opinfo                             go on with build/opinfo/results.jsonl
python -m tests.opinfo --ops 'nn.functional.*' --dtypes float32 --modes forward,gradient --samples 3
python -m tests.opinfo --ops 'linalg.*' --dtypes float32 --telling
                                                   one sample of each, which says most, through torch.compile
python -m tests.opinfo --report                    what differs, and why
python -m tests.opinfo --table                     write docs/operators.md
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..workers import ROOT
from .cases import DTYPES, MODES, jobs
from .report import differences, write_table
from .sweep import FAULTS, Sweep, latest, read


@click.command()
@click.option("--ops", default="*", help="operators, as patterns divided by commas")
@click.option("--dtypes", default=",".join(DTYPES))
@click.option("--modes", default="forward,gradient", help=",".join(MODES))
@click.option("--samples", default=0, help="at most so many of a job; 0: all")
@click.option("--workers", default=2)
@click.option("--patience", default=120.0, help="seconds that one sample may take")
@click.option("--at-once", default=8, help="samples that are compiled in one function")
@click.option("--telling", is_flag=True, help="one sample of a job, which says most")
@click.option("--again", is_flag=True, help="also what differed before")
@click.option("--results", type=click.Path(path_type=Path), help="by default in build/opinfo")
@click.option("--report", is_flag=True, help="run nothing; say what differs")
@click.option("--table", is_flag=True, help="run nothing; write docs/operators.md")
def main(
    ops: str, dtypes: str, modes: str, samples: int, workers: int, patience: float, at_once: int,
    telling: bool, again: bool, results: Path | None, report: bool, table: bool,
) -> None:  # fmt: skip
    """Check operators against eager."""
    console = Console()
    results = results or ROOT / "build" / "opinfo" / ("telling.jsonl" if telling else "results.jsonl")
    if not (report or table):
        patterns = ops.split(",")
        chosen = [
            job
            for job in jobs(tuple(dtypes.split(",")), tuple(modes.split(",")))
            if any(fnmatch(job.op, p) for p in patterns)
        ]
        counts: Counter[str] = Counter()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("operators", total=len(chosen))

            def told(record: dict[str, Any]) -> None:
                if record["sample"] is None:
                    progress.advance(task)
                    return
                counts[record["status"]] += 1
                if record["status"] in FAULTS:
                    where = f"{record['op']} {record['dtype']} {record['mode']} [{record['sample']}]"
                    console.print(f"{where} {record['status']}: {record['detail']}", markup=False, soft_wrap=True)
                progress.update(task, description=" ".join(f"{n} {k}" for k, n in counts.most_common()))

            Sweep(chosen, results, samples, workers, patience, again, at_once, telling, told).run()
    written = read(results)
    if table:
        write_table(written, ROOT / "docs" / "operators.md")
    console.print(differences(latest(written)), markup=False, soft_wrap=True)


main()
