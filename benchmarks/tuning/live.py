"""Recorded winners, measured again in fresh processes: how often another run would say the same."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from torch_mlc.ir.errors import MlcError
from torch_mlc.ir.nest.positions import named_by_position
from torch_mlc.runtime.targets import cpu_target, named_target
from torch_mlc.runtime.tuning.machine import tuning_database
from torch_mlc.runtime.tuning.measuring import SERVICE, WorkerMeasurer
from torch_mlc.runtime.tuning.records import Recorded
from torch_mlc.runtime.tuning.worker_race import MeasuringProcess
from torch_mlc.scheduler.tuning.database import Verdict, target_key
from torch_mlc.scheduler.tuning.seeds import workload_of
from torch_mlc.scheduler.tuning.space import Draft, Space

from .record import nest_of

# A winner that is not faster than the default by more than this has lost; one that is shipped was that much faster in
# every process.
WORTH, SHIPPED = 1.01, 1.03


@dataclass(frozen=True, slots=True)
class Winner:
    """A recorded winner: its speed-up over the default as it was recorded, and in each fresh process; ``error`` where
    it could not be measured again."""

    kernel: str
    draft: str
    recorded: float
    again: tuple[float, ...]
    error: str = ""
    seconds: float = 0.0
    record: Recorded | None = field(default=None, repr=False, compare=False)

    @property
    def is_confirmed(self) -> bool:
        """Whether it was faster by what counts in every process."""
        return bool(self.again) and min(self.again) >= SHIPPED

    @property
    def flips(self) -> int:
        """Processes in which it was no faster than the default though it was recorded as faster."""
        return sum(s <= 1.0 for s in self.again) if self.recorded > WORTH else 0


def measured_again(record: Recorded, repeat: int) -> Winner | None:
    """None where nothing was recorded, or elsewhere."""
    timed = [line for line in record.lines if line.speedup is not None and not line.control]
    if not timed or not record.head.here:
        return None
    best = max(timed, key=lambda line: line.speedup or 0.0)
    draft = Draft.from_plain(best.draft)
    target = cpu_target() if record.head.kind == "cpu" else named_target("cuda")
    recorded = float(best.speedup or 0.0)
    if target_key(target) != record.head.target:
        return Winner(record.head.kernel, str(draft), recorded, (), f"recorded on {record.head.target}")
    try:
        space = Space(nest_of(record.head), target)
        winner, default = space.replayed(draft), space.replayed(space.default())
        if winner is None or default is None:
            return Winner(record.head.kernel, str(draft), recorded, (), "the draft is illegal by now")
        found, took = [], []
        for _ in range(repeat):
            process = MeasuringProcess(SERVICE)
            try:
                with closing(WorkerMeasurer(space.nest, target, process=process)) as measurer:
                    first, won, second = measurer.measure([default, winner, default.copy()])
            finally:
                process.end()
            for result in (first, won, second):
                if isinstance(result, Exception):
                    raise result
            found.append(float((first * second) ** 0.5 / won))  # type: ignore[operator]
            took.append(float(won))  # type: ignore[arg-type]
    except (MlcError, RuntimeError) as error:
        return Winner(record.head.kernel, str(draft), recorded, (), " ".join(str(error).split())[:200])
    return Winner(record.head.kernel, str(draft), recorded, tuple(found), "", statistics.median(took), record)


def live(
    records: Sequence[Recorded], repeat: int, told: Callable[[str, int, int], object] = lambda *_: None
) -> list[Winner]:
    """The winner of each file, again in ``repeat`` fresh processes."""
    winners = []
    for k, record in enumerate(records):
        told(record.head.kernel, k, len(records))
        winner = measured_again(record, repeat)
        if winner is not None:
            winners.append(winner)
    return winners


def shipped_lines(winners: Sequence[Winner]) -> list[str]:
    """The winners that were confirmed, as lines of a tuning database: what comes with the package."""
    with TemporaryDirectory() as folder, tuning_database(Path(folder) / "tuning.sqlite") as database:
        for w in winners:
            if not w.is_confirmed or w.record is None:
                continue
            target = cpu_target() if w.record.head.kind == "cpu" else named_target("cuda")
            nest = named_by_position(nest_of(w.record.head))
            best = max(
                (line for line in w.record.lines if line.speedup is not None and not line.control),
                key=lambda line: line.speedup or 0.0,
            )
            draft = Draft.from_plain(best.draft)
            schedule = Space(nest, target).replayed(draft)
            if schedule is not None:
                ratios = [1.0 / s for s in w.again]
                ratio, sigma = statistics.median(ratios), max(ratios) / min(ratios) - 1
                database.record(
                    workload_of(nest), target, schedule.trace, w.seconds, ratio=float(f"{ratio:.4g}"),
                    count=15 * len(ratios), sigma=float(f"{sigma:.3g}"),
                    verdict=Verdict.ACCEPTED, draft=json.dumps(draft.to_plain(), separators=(",", ":")),
                )  # fmt: skip
        return [*database.exported()]


def summary(winners: Sequence[Winner]) -> dict[str, float]:
    """Geometric means of recorded and repeated speed-ups, flips, and the median spread between processes."""
    known = [w for w in winners if w.again]
    if not known:
        return {}
    return {
        "winners": len(known),
        "recorded": statistics.geometric_mean(w.recorded for w in known),
        "again": statistics.geometric_mean(statistics.median(w.again) for w in known),
        "flips": sum(w.flips for w in known),
        "runs": sum(len(w.again) for w in known),
        "spread": statistics.median(max(w.again) / min(w.again) - 1 for w in known),
    }
