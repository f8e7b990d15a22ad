"""Passes: what a rewrite declares, and the runner that verifies, dumps, times and records every step of a compilation.

A list of passes is data. No pass is known by identity and none runs another: what one of them must find is a ``Form``
that an earlier one leaves, and what decides whether it runs at all is a ``Setting`` of the compilation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from .errors import MlcError
from .graph.graph import Graph, IRModule
from .nest.loops import LoopNest
from .text.printer import show
from .verify.verify import verify

S = TypeVar("S")
C = TypeVar("C")


class PassError(MlcError):
    """A step failed, or left IR that breaks a rule; names the step and, where dumps are kept, the file of its input."""


class OrderError(MlcError):
    """A list in which a pass comes before the one that leaves what it needs."""


def _no_rules(subject: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Level(Generic[S]):
    """What passes of one kind rewrite: how it is printed, how large it is, and how it is verified (which raises).

    Without ``verify`` no rules are known. ``told`` names a part of the graph (a function), "" where there is one of the
    kind a graph.
    """

    name: str
    show: Callable[[S], str] = field(repr=False)
    size: Callable[[S], int] = field(repr=False)
    verify: Callable[[S], object] = field(default=_no_rules, repr=False)
    told: Callable[[S], str] = field(default=lambda _: "", repr=False)
    suffix: str = "txt"


@dataclass(frozen=True, slots=True)
class Form(Generic[S]):
    """A property of IR that a pass leaves and later ones rely on. ``holds`` is asked under MLC_VERIFY."""

    name: str
    holds: Callable[[S], bool] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Setting(Generic[C]):
    """What of a compilation decides whether a pass runs at all."""

    name: str
    holds: Callable[[C], bool] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Pass(Generic[S, C]):
    """A rewrite. ``name`` is a verb, and the name of its function and dumps as well.

    ``run(subject, context)`` gives the subject rewritten, the same object where nothing changed. What works in place
    gives instead how often it did something. It needs every form of ``needs`` before it, is skipped where one of the
    settings among them does not hold, and ``leaves`` other forms behind. What it ``raises`` as an answer goes on as it
    is; anything else is a fault of the pass.
    """

    name: str
    level: Level[S]
    run: Callable[[S, C], S | int]
    needs: tuple[Form[S] | Setting[C], ...] = ()
    leaves: tuple[Form[S], ...] = ()
    raises: tuple[type[Exception], ...] = ()

    def applies(self, context: C) -> bool:
        """Whether the settings of a compilation ask for it; ``left_out`` of a context are names of those that are not
        to run."""
        return self.name not in getattr(context, "left_out", ()) and all(
            n.holds(context) for n in self.needs if isinstance(n, Setting)
        )

    @property
    def function(self) -> Callable[..., Any]:
        """The function that does the work."""
        return self.run.rewrite if isinstance(self.run, Plain) else self.run


@dataclass(frozen=True, slots=True)
class Plain(Generic[S]):
    """A rewrite that asks nothing of its context."""

    rewrite: Callable[[S], S | int]

    def __call__(self, subject: S, context: object) -> S | int:
        return self.rewrite(subject)


def check_order(passes: Sequence[Pass[Any, Any]]) -> None:
    """Raises OrderError where a pass needs a form that none before it in the list leaves."""
    left: set[str] = set()
    for p in passes:
        for form in p.needs:
            if isinstance(form, Form) and form.name not in left:
                givers = [q.name for q in passes if any(f.name == form.name for f in q.leaves)]
                mend = f"it must stand behind {' or '.join(givers)}" if givers else "no pass of the list leaves that"
                raise OrderError(f"pass {p.name} needs {form.name!r}: {mend}")
        left |= {f.name for f in p.leaves}


def run_passes(passes: Sequence[Pass[S, C]], subject: S, context: C) -> S:
    """The subject after the passes of a list that the context asks for; nothing is verified, dumped or recorded."""
    for p in passes:
        if p.applies(context):
            after = p.run(subject, context)
            subject = subject if isinstance(after, int) else after
    return subject


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a compilation: a pass, or a step from one level to the next. ``of`` names the part of the graph that
    it worked on, "" for all of it; ``before`` and ``after`` are sizes in nodes, stages or lines."""

    level: str
    name: str
    of: str
    seconds: float
    changed: bool
    before: int
    after: int


@dataclass(slots=True)
class Runner:
    """Runs the steps of the compilation of one graph, and keeps a record of them.

    ``folder`` is where each step that changed something leaves a numbered file; None writes nothing. With ``verify``
    the rules of each level are checked before the first pass of a list and after each that changed something, and so
    are the forms that passes need and leave.
    """

    folder: Path | None = None
    verify: bool = False
    steps: list[StepRecord] = field(default_factory=list)
    _files: int = 0

    def __call__(self, subject: S, passes: Sequence[Pass[S, C]], context: C) -> S:
        """The subject after the passes of a list that the context asks for.

        Raises:
            PassError: a pass raised, or its result breaks a rule; the cause is chained. A subject that breaks a rule
                is reported as such, before any pass has run.
        """
        if passes and (self.verify or (self.folder is not None and self._files == 0)):
            level = passes[0].level
            self._check(level, subject, f"the input of the {level.name} passes", None)
            if self._files == 0:
                self.dump("input", level, subject)
        for p in passes:
            if p.applies(context):
                subject = self._rewritten(p, subject, context)
        return subject

    def step(self, level: Level[S], function: Callable[..., S], *args: Any, **kwargs: Any) -> S:
        """What a function makes, which is on ``level``, of something that is not: its name is that of the step."""
        start = time.perf_counter()
        made = function(*args, **kwargs)
        seconds = time.perf_counter() - start
        self.steps.append(
            StepRecord(level.name, function.__name__, level.told(made), seconds, True, 0, level.size(made))
        )
        self.dump(function.__name__, level, made)
        return made

    def dump(self, name: str, level: Level[S], subject: S) -> Path | None:
        """Write the text of something as the next file; where it is."""
        return None if self.folder is None else self.write(name, level.told(subject), level.show(subject), level.suffix)

    def write(self, name: str, of: str, text: str, suffix: str = "txt") -> Path | None:
        """Write a text as the next file; where it is."""
        if self.folder is None:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self._files:02d}_{name}{'_' * bool(of)}{of}.{suffix}"
        path.write_text(text)
        self._files += 1
        return path

    def _rewritten(self, p: Pass[S, C], subject: S, context: C) -> S:
        level, before = p.level, p.level.size(subject)
        if self.verify:
            self._check_forms(p, subject, p.needs, "needs")
        start = time.perf_counter()
        try:
            result = p.run(subject, context)
        except p.raises:
            raise
        except Exception as error:
            where = self.dump(f"{p.name}_failed", level, subject)
            raise PassError(f"pass {p.name}: {error}{_see('its input', where)}") from error
        seconds = time.perf_counter() - start
        in_place = isinstance(result, int)
        after = subject if in_place else cast(S, result)
        changed = bool(result) if in_place else after is not subject
        self.steps.append(
            StepRecord(level.name, p.name, level.told(after), seconds, changed, before, level.size(after))
        )
        if changed:
            self._check(level, after, f"pass {p.name}", None if in_place else subject)
            self.dump(p.name, level, after)
        if self.verify:
            self._check_forms(p, after, p.leaves, "does not leave")
        return after

    def _check(self, level: Level[S], subject: S, who: str, before: S | None) -> None:
        if not self.verify:
            return
        try:
            level.verify(subject)
        except Exception as error:
            name = who.removeprefix("pass ").replace(" ", "_")
            if before is not None:
                self.dump(f"{name}_failed", level, before)
            where = self.dump(f"{name}_broken", level, subject)
            raise PassError(f"{who}: {error}{_see('what it made', where)}") from error

    def _check_forms(self, p: Pass[S, C], subject: S, forms: Sequence[Form[S] | Setting[C]], fault: str) -> None:
        for form in forms:
            if isinstance(form, Form) and not form.holds(subject):
                where = self.dump(f"{p.name}_broken", p.level, subject)
                raise PassError(f"pass {p.name} {fault} {form.name!r}{_see('the text', where)}")


def _see(what: str, path: Path | None) -> str:
    return "" if path is None else f"\n{what} is in {path}"


def _module(graph: Graph) -> IRModule:
    return IRModule({graph.name: graph}, graph.name)


GRAPH: Level[Graph] = Level(
    "graph", lambda g: show(_module(g)), lambda g: len(g.nodes), lambda g: verify(_module(g))
)  # fmt: skip
NEST: Level[LoopNest] = Level("nest", show, lambda n: len(n.body), verify, lambda n: n.name)
