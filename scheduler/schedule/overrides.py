"""Schedules by hand: what a user gives in place of the compiler's choice, by the hash of the kernel's workload.

A source is a mapping from hashes to functions of a ``Schedule`` or to traces, a JSON file of such traces, or a Python
script whose functions are registered by ``schedule``. Hashes may be shortened, as long as they name one kernel.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import TypeAlias, TypeVar

from ...ir.errors import MlcError, VerifyError
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...ir.text.structure import structural_key
from ...ir.verify.verify import verify
from ..error import ScheduleError
from .schedule import Schedule, replay
from .trace import Trace

ScheduleFunction: TypeAlias = Callable[[Schedule], object]
F = TypeVar("F", bound=ScheduleFunction)
# Digits of a hash that tell kernels apart in practice: what reports print, and the least that is taken.
SHORT, LEAST = 12, 6
RULE = "override"


def workload_of(nest: LoopNest) -> str:
    """The hash, 64 hex digits, of a kernel as it was lowered: the same in every process, and whatever things are
    called. Tuning records measurements under it."""
    return structural_key(nest)


class OverrideError(MlcError):
    """A source of schedules cannot be read, or holds something that is no schedule; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Override:
    """One schedule that a user gives: for workloads whose hash begins with ``workload``, on targets of that kind
    ("cpu") or name ("cuda:sm_90"), or on all. ``place`` is where it stands, ``file:line``, ``rule`` what the schedule
    says it is by."""

    workload: str
    target: str | None
    how: ScheduleFunction | Trace = field(repr=False)
    place: str
    rule: str = RULE

    def fits(self, workload: str, target: Target) -> bool:
        return workload.startswith(self.workload) and self.target in (None, target.kind, str(target))

    def __str__(self) -> str:
        on = f" on {self.target}" if self.target is not None else ""
        return f"the schedule for {self.workload[:SHORT]}{on} ({self.place})"

    def apply(self, nest: LoopNest) -> Schedule:
        """The nest, scheduled. Raises ScheduleError, which names the hash and the line that is at fault."""
        try:
            result = self._applied(nest)
            verify(result.nest)
        except ScheduleError as error:
            where = f"{self._at(error)}: {error.asked}"
            raise ScheduleError(where, error.reason, error.nest, error.at, error.hint) from error
        except VerifyError as error:
            raise ScheduleError(f"{self}", f"it leaves no sound nest: {error}") from error
        except Exception as error:  # whatever a user's function does
            raise ScheduleError(self._at(error), f"it raised {type(error).__name__}: {error}") from error
        return result

    def _applied(self, nest: LoopNest) -> Schedule:
        if isinstance(self.how, Trace):
            # A trace of another version or nest is refused step by step.
            return replay(Trace(self.how.steps, self.rule), nest)
        schedule = Schedule(nest, self.rule)
        self.how(schedule)
        return schedule

    def _at(self, error: Exception) -> str:
        """This schedule, with the line in its own file that the error came through."""
        file = self.place.rpartition(":")[0]
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        return str(Override(self.workload, self.target, self.how, f"{file}:{lines[-1]}") if lines else self)


@dataclass(frozen=True, slots=True)
class Overrides:
    """Every schedule of one source. ``content`` is a hash of all that decides what they do; None where that cannot be
    known (functions of a mapping, which may close over anything)."""

    items: tuple[Override, ...]
    content: str | None

    def find(self, workload: str, target: Target) -> Override | None:
        """The schedule for a workload; one for this target goes before one for all. Raises OverrideError where two
        fit alike."""
        fitting = [o for o in self.items if o.fits(workload, target)]
        if not fitting:
            return None
        most = max(_precision(o) for o in fitting)
        best = [o for o in fitting if _precision(o) == most]
        if len(best) > 1:
            raise OverrideError(
                f"{' and '.join(map(str, best))} are both for the kernel {workload}: give more digits, or drop one"
            )
        return best[0]


def _precision(override: Override) -> int:
    return 0 if override.target is None else 2 if ":" in override.target else 1


# --- sources ----------------------------------------------------------------------------------------------------------


_SCRIPT: ContextVar[list[Override] | None] = ContextVar("script", default=None)


def schedule(workload: str, target: str | None = None) -> Callable[[F], F]:
    """Decorates a function of a script that schedules one kernel, known by the hash of its workload.

    ``@schedule("3f2a9c04b1de")`` above ``def _(s): ...``, where ``s`` is the ``Schedule`` of the nest as lowered; 6
    digits or more. ``target`` restricts it to a kind of target ("cpu", "cuda") or to one ("cuda:sm_90"). The script is
    given to ``torch.compile(options={"schedules": path})``; where a script is run otherwise the decorator does nothing.
    Raises OverrideError for what is no hash.
    """
    key = _checked(workload)

    def register(function: F) -> F:
        found = _SCRIPT.get()
        if found is not None:
            found.append(Override(key, target, function, _place(function)))
        return function

    return register


def load_overrides(source: object) -> Overrides:
    """The schedules of a mapping, or of the script or JSON file at a path. Raises OverrideError."""
    match source:
        case Mapping():
            return _of_mapping(source, "the mapping")
        case str() | Path():
            path = Path(source).expanduser().absolute()
            if path.suffix not in (".py", ".json"):
                raise OverrideError(f"{path}: schedules are in a script (.py) or a file of traces (.json)")
            try:
                data = path.read_bytes()
            except OSError as error:
                raise OverrideError(f"{path}: {error.strerror}") from error
            return _of_script(path, data) if path.suffix == ".py" else _of_json(path, data)
    raise OverrideError(f"{type(source).__name__} is no source of schedules: give a path or a mapping")


def _of_mapping(source: Mapping[object, object], place: str) -> Overrides:
    found: list[Override] = []
    for key, how in source.items():
        if isinstance(how, Trace):
            found.append(Override(_checked(key), None, how, f"{place}"))
        elif callable(how):
            found.append(Override(_checked(key), None, how, _place(how)))
        else:
            raise OverrideError(
                f"{place}, {key}: a {type(how).__name__} is neither a Trace nor a function of a Schedule"
            )
    texts = [f"{o.workload} {o.how.to_json()}" for o in found if isinstance(o.how, Trace)]
    return Overrides(tuple(found), _digest("\n".join(texts).encode()) if len(texts) == len(found) else None)


def _of_json(path: Path, data: bytes) -> Overrides:
    try:
        content = json.loads(data)
        traces = {key: Trace.from_json(json.dumps(trace)) for key, trace in content.items()}
    except (ValueError, AttributeError) as error:
        raise OverrideError(f"{path}: not a JSON object of traces by hash ({error})") from None
    except ScheduleError as error:
        raise OverrideError(f"{path}: {error.reason}") from None
    return _of_mapping(traces, str(path))


def _of_script(path: Path, data: bytes) -> Overrides:
    module = ModuleType(f"torch_mlc_schedules_{path.stem}")
    module.__file__ = str(path)
    found: list[Override] = []
    try:
        with _collecting(found):
            exec(compile(data, str(path), "exec"), module.__dict__)
    except Exception as error:  # whatever a user's script does
        at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else at[-1] if at else 1
        raise OverrideError(f"{path}:{line}: the script raised {type(error).__name__}: {error}") from error
    if not found:
        raise OverrideError(f'{path}: no schedule in it; register functions by @torch_mlc.schedule("<hash>")')
    return Overrides(tuple(found), _digest(str(path).encode() + b"\0" + data))


@contextmanager
def _collecting(found: list[Override]) -> Iterator[None]:
    token = _SCRIPT.set(found)
    try:
        yield
    finally:
        _SCRIPT.reset(token)


def _checked(workload: object) -> str:
    text = str(workload).strip().lower()
    if not re.fullmatch(rf"[0-9a-f]{{{LEAST},64}}", text):
        frame = _caller()
        raise OverrideError(
            f"{frame}{workload!r} is no workload's hash: {LEAST} to 64 hex digits, as torch_mlc.explain prints them"
        )
    return text


def _caller() -> str:
    """The line outside of this file that called, ``file:line: ``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""


def _place(function: Callable[..., object]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
