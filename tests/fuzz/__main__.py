"""``python -m tests.fuzz``: random programs, compiled and compared with eager and with double precision.

python -m tests.fuzz --minutes 10                    programs of the seeds from 0 on
python -m tests.fuzz --minutes 10 --seed 5000 --workers 4
python -m tests.fuzz --one 1234                      print the program of a seed and check it, in this process
python -m tests.fuzz --again                         check once more what failed, as it was and as it was made smaller
python -m tests.fuzz --minutes 60 --record           add a row to docs/campaigns.md at the end
python -m tests.fuzz --target cuda:sm_90             as if on a GPU, with Triton's interpreter for kernels

What fails is made smaller while it fails, printed as a script, and kept in build/fuzz.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ..workers import ROOT
from .campaign import FAULTS, Campaign
from .record import read, record


@click.command()
@click.option("--minutes", default=1.0, help="how long")
@click.option("--programs", default=0, help="at most so many; 0: as many as the time allows")
@click.option("--seed", default=0, help="the first program's")
@click.option("--workers", default=1)
@click.option("--patience", default=120.0, help="seconds that one program may take")
@click.option("--trials", default=120, help="how many programs may be tried to make a failing one smaller")
@click.option("--results", type=click.Path(path_type=Path), default=ROOT / "build" / "fuzz")
@click.option("--again", is_flag=True, help="check what is kept of an earlier run's failures")
@click.option("--record", "keep", is_flag=True, help="begin anew, and add a row to docs/campaigns.md")
@click.option("--target", help="the GPU to compile for (cuda:sm_90); none is needed")
@click.option("--one", type=int, help="check the program of this seed, in this process")
def main(
    minutes: float, programs: int, seed: int, workers: int, patience: float, trials: int, results: Path,
    again: bool, keep: bool, target: str | None, one: int | None,
) -> None:  # fmt: skip
    """Look for programs whose answer is not eager's."""
    if one is not None:
        check_one(one, target)
        return
    if again:
        raise SystemExit(check_again(Campaign(results, 1, patience)))
    if keep:
        (results / "outcomes.jsonl").unlink(missing_ok=True)
    counts: Counter[str] = Counter()
    began = time.monotonic()

    def told(record: dict[str, Any]) -> None:
        counts[record["status"]] += 1
        total = sum(counts.values())
        if "script" in record:
            click.echo(f"--- seed {record['seed']} {record['status']}: {record['detail']}")
            click.echo(record["script"])
        if total % 100 == 0:
            click.echo(_line(counts, time.monotonic() - began))

    campaign = Campaign(results, workers, patience, trials, told, target=target)
    campaign.run(seed, minutes * 60, programs)
    click.echo(_line(counts, time.monotonic() - began))
    if keep:
        click.echo(record(results, target=target))
    raise SystemExit(1 if any(counts[s] for s in FAULTS) else 0)


def _line(counts: Counter[str], seconds: float) -> str:
    said = ", ".join(f"{n} {k}" for k, n in counts.most_common())
    return f"{sum(counts.values())} programs in {seconds:.0f} s: {said}"


def check_again(campaign: Campaign) -> int:
    """Say what has become of the failures of earlier runs; how many there still are."""
    still = 0
    for outcome, program, found in campaign.repeat(read(campaign.results)):
        still += found["status"] in FAULTS
        what = "as found" if program.record() == outcome.get("whole") else "made smaller"
        click.echo(f"seed {program.seed} {what}: {outcome['status']}, now {found['status']} {found['detail']}")
    return min(still, 100)


def check_one(seed: int, target: str | None) -> None:
    """Print the program of a seed, and what its check finds."""
    if target is not None:
        from . import interpreted  # noqa: F401  # before Triton
    from .check import check
    from .generate import make_program
    from .program import on_target

    program = make_program(seed)
    program = program if target is None else on_target(program, target)
    click.echo(program.snippet(f"Seed {seed}."))
    click.echo(check(program))


main()
