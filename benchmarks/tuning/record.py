"""Recording: what legal schedules of many nests take beside the default, in batches, whenever that is."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from torch_mlc.dynamo_backend.compiling.predicting import PredictingMeasurer, measurer_of
from torch_mlc.ir.errors import MlcError
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.runtime.tuning.records import Head, Line, RecordsError, head_text, line_text, read_records
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.tuning.database import target_key
from torch_mlc.scheduler.tuning.features import draft_features, nest_features
from torch_mlc.scheduler.tuning.measurer import Measurement, Measurer
from torch_mlc.scheduler.tuning.space import Draft, Space

from ..machine import describe_machine
from ..steps import replace_text
from .nests import Named, Source, nests_of, sources

# Candidates that are timed beside the default, twice, in one batch; batches of a nest before the next one's turn.
BATCH, TURN = 8, 2
# Equals that differ by more than this are measured again, so often at most.
QUIET, AGAIN = 0.03, 2
# Nests whose default takes more seconds are left out: the slowest candidates take a hundred times as long.
SLOW = 0.012
# Of the candidates a third are near the defaults, from the first so many, and as many are neighbours of
# those; the others are drawn by chance.
NEAR = 1500
# Draws in a row that find nothing new before a space counts as exhausted.
PATIENCE = 200
_NAME = re.compile(r"[^\w.+-]+")


@dataclass(slots=True)
class Recording:
    """One nest: what is on file of it, and what is to come."""

    named: Named
    path: Path
    space: Space
    rng: random.Random
    lines: list[Line] = field(default_factory=list)
    exhausted: bool = False

    @property
    def count(self) -> int:
        """Candidates on file, controls apart."""
        return sum(not line.control for line in self.lines)

    def fresh(self, count: int) -> list[tuple[Draft, Schedule]]:
        """Legal drafts whose nests are not on file."""
        known = {line.key for line in self.lines}
        found: list[tuple[Draft, Schedule]] = []
        for draft in self._draws():
            schedule = self.space.replayed(draft)
            key = self.space.key(schedule) if schedule is not None else ""
            if schedule is not None and key not in known:
                known.add(key)
                found.append((draft, schedule))
                if len(found) == count:
                    return found
        self.exhausted = True
        return found

    def _draws(self) -> Iterator[Draft]:
        yield from self.space.first()
        near = list(self.space.listed(NEAR))
        for _ in range(PATIENCE):
            yield self.rng.choice(near)
            yield self.space.random(self.rng)
            yield self.space.mutated(self.rng.choice(near), self.rng)

    def add(self, lines: Sequence[Line]) -> None:
        with self.path.open("a") as file:
            file.write("".join(map(line_text, lines)))
            file.flush()
            os.fsync(file.fileno())
        self.lines += lines


def record(
    folder: Path,
    target: str,
    candidates: int,
    choose: Callable[[list[str]], list[str]],
    told: Callable[[str, int, int], object],
    measurer: Callable[[LoopNest, Target, int], Measurer | None] = measurer_of,
) -> dict[str, str]:
    """Measure up to ``candidates`` schedules of each nest, all nests in turn, and keep each batch as it ends.

    What is on file is not measured again; its features are computed anew where they are of another version. Returns
    what failed, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    begun: dict[str, Recording] = {}
    session = datetime.now(timezone.utc).isoformat(timespec="seconds")
    every = sources(target)
    names = choose([s.name for s in every])
    chosen = [s for s in every if s.name in names]
    seen: set[str] = set()
    for wanted in range(TURN * BATCH, candidates + TURN * BATCH, TURN * BATCH):
        for k, source in enumerate(chosen):
            told(f"{source.name}, {min(wanted, candidates)} candidates", k, len(chosen))
            for r in _recordings(source, target, folder, begun, seen, failed):
                try:
                    _turn(r, min(wanted, candidates), session, measurer)
                except (MlcError, AssertionError) as error:
                    failed[r.named.name] = _told(error)
                    r.exhausted = True
    return failed


def _recordings(
    source: Source, target: str, folder: Path, begun: dict[str, Recording], seen: set[str], failed: dict[str, str]
) -> list[Recording]:
    """Those of a source, which are made at its first turn."""
    if f"{source.name}!" not in seen:
        seen.add(f"{source.name}!")
        try:
            for named in nests_of(source, target):
                if named.workload not in seen:
                    seen.add(named.workload)
                    begun[named.name] = _begin(named, folder)
        except Exception as error:  # one source must not hide the others
            failed[source.name] = _told(error)
    return [r for name, r in begun.items() if name == source.name or name.startswith(f"{source.name} #")]


def _begin(named: Named, folder: Path) -> Recording:
    path = folder / f"{_NAME.sub('_', named.name)}.jsonl"
    space = Space(named.nest, named.target)
    result = Recording(named, path, space, random.Random(named.workload))
    if path.exists():
        result.lines = _on_file(path, named, space)
        for _ in result.lines:  # other draws than those that are on file
            result.rng.random()
    else:
        replace_text(path, head_text(_head(named)))
    return result


def _head(named: Named) -> Head:
    kind = "gpu" if named.target.is_gpu else "cpu"
    machine = describe_machine("cpu") | {"threads": torch.get_num_threads()}
    here = not named.target.is_gpu or torch.cuda.is_available()
    return Head(
        named.name, named.family, named.workload, target_key(named.target), kind, here, show(named.nest), machine
    )


def _on_file(path: Path, named: Named, space: Space) -> list[Line]:
    """The lines of a file; with features of this version, which it has afterwards."""
    try:
        found = read_records(path)
        if found.head.workload != named.workload:
            raise RecordsError(f"{path} is of another nest; record into an empty folder")
        return [*found.lines]
    except RecordsError as error:
        if "features of version" not in str(error):
            raise
    head, *rest = path.read_text().splitlines()
    if json.loads(head)["workload"] != named.workload:
        raise RecordsError(f"{path} is of another nest; record into an empty folder")
    lines = [line for text in rest if (line := _renewed(text, space)) is not None]
    replace_text(path, head_text(_head(named)) + "".join(map(line_text, lines)))
    return lines


def _renewed(text: str, space: Space) -> Line | None:
    """A line with features of this version; None where its draft is none any more."""
    try:
        body = json.loads(text)
        draft = Draft.from_plain(body["draft"])
        schedule = space.replayed(draft)
    except (ValueError, KeyError, TypeError, MlcError):
        return None
    # The edits of a draft may have become others.
    if schedule is None or space.key(schedule) != body["key"]:
        return None
    return Line(**{**body, **_rows(space, draft, schedule)})


def _rows(space: Space, draft: Draft, schedule: Schedule) -> Mapping[str, tuple[float, ...]]:
    """Six digits are what float32 has."""
    of_draft = draft_features(space, [draft])[0]
    of_nest = nest_features(space, schedule)
    return {
        "draft_row": tuple(float(f"{v:.6g}") for v in of_draft),
        "nest_row": tuple(float(f"{v:.6g}") for v in of_nest),
    }


def _turn(
    r: Recording, wanted: int, session: str, measurer_of: Callable[[LoopNest, Target, int], Measurer | None]
) -> None:
    if r.exhausted or r.count >= wanted:
        return
    if r.lines:  # ratios to the default of the same batch go on where a stopped run has left them
        session = r.lines[0].session
    measurer = measurer_of(r.named.nest, r.named.target, 0)
    if measurer is None:
        raise ScheduleError("record", f"{r.named.name} cannot be measured here", r.named.nest)
    default = r.space.replayed(r.space.default())
    assert default is not None, "the default applies always"
    with closing(measurer):
        if not r.lines and not r.named.target.is_gpu:
            (alone,) = measurer.measure([default])
            if not isinstance(alone, Exception) and alone > SLOW:
                raise ScheduleError("record", f"its default takes {alone * 1e3:.0f} ms", r.named.nest)
        while not r.exhausted and r.count < wanted:
            fresh = r.fresh(min(BATCH, wanted - r.count))
            if not fresh:
                return
            number = 1 + max((line.batch for line in r.lines), default=-1)
            results = _measured(measurer, default, [s for _, s in fresh])
            r.add(_lines(r.space, fresh, results, session, number, isinstance(measurer, PredictingMeasurer)))


def _measured(measurer: Measurer, default: Schedule, fresh: Sequence[Schedule]) -> list[Measurement]:
    """The default twice, so that a pair of equals tells the noise, then the others; it is first, since the others must
    have its results.

    Where the equals differ the batch is measured again, in another order, and the least time counts: what else runs on
    a machine makes times longer and never shorter.
    """
    results = list(measurer.measure([default, default.copy(), *fresh]))
    for again in range(AGAIN):
        if _noise(results) <= QUIET:
            break
        order = [*range(len(results))]
        turned = order[::-1] if again % 2 == 0 else order[len(order) // 2 :] + order[: len(order) // 2]
        schedules = [default, default.copy(), *fresh]
        for k, found in zip(turned, list(measurer.measure([schedules[k] for k in turned])), strict=True):
            best = results[k]
            if not isinstance(best, Exception) and not isinstance(found, Exception):
                results[k] = min(best, found)
    return results


def _noise(results: Sequence[Measurement]) -> float:
    first, second = results[:2]
    if isinstance(first, Exception) or isinstance(second, Exception):
        return 0.0
    return abs(math.log(max(first, 1e-12) / max(second, 1e-12)))


def _lines(
    space: Space,
    fresh: Sequence[tuple[Draft, Schedule]],
    results: Sequence[Measurement],
    session: str,
    number: int,
    predicted: bool,
) -> list[Line]:
    first, second, *others = results
    if isinstance(first, Exception) or isinstance(second, Exception):
        raise ScheduleError(
            "record", f"the default cannot be measured: {first if isinstance(first, Exception) else second}"
        )
    default = (float(first) * float(second)) ** 0.5
    made = space.replayed(space.default())
    assert made is not None
    control = _line(space, space.default(), made, second, first, session, number)
    lines = [] if predicted else [replace(control, control=True)]
    return lines + [_line(space, d, s, t, default, session, number) for (d, s), t in zip(fresh, others, strict=True)]


def _line(
    space: Space,
    draft: Draft,
    schedule: Schedule,
    took: Measurement,
    default: Any,
    session: str,
    number: int,
) -> Line:
    error = _told(took) if isinstance(took, Exception) else ""
    seconds = None if isinstance(took, Exception) else float(took)
    speedup = None if seconds is None else float(default) / max(seconds, 1e-12)
    rows = _rows(space, draft, schedule)
    return Line(session, number, draft.to_plain(), space.key(schedule), speedup, seconds, error, False, **rows)


def nest_of(head: Head) -> LoopNest:
    """The nest of a file."""
    found = parse(head.nest)
    assert isinstance(found, LoopNest)
    return found


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
