"""The lock file as one graph sees it: which section is its own, and what is done with that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import repeat
from pathlib import Path

import torch
from torch import fx

from ...ir.expr.size_regions import SizeRegion
from ...ir.expr.symbols import SymbolTable
from ...ir.target import Target
from ...runtime.cache.fingerprint import key_of
from ...runtime.settings.options import Options, option_specs, typed_value
from ...runtime.targets import target_for
from ...scheduler.decisions import LockedWays
from ...scheduler.schedule.overrides import Overrides
from .decided import condition_text, planned_text
from .differences import difference, model_lines
from .lock_store import read_lock, section_name, sections_of, write_graph, written_sections
from .lock_text import PROGRAMS, WHERE, LockError, LockText, Section
from .locked import SectionWays, schedules_of
from .names import NodeNames

# Settings that say where decisions come from, or are told elsewhere.
_UNTOLD = ("tune", "target", "verify", "strict", "threads", "decisions", "numerics")


@dataclass(frozen=True, slots=True)
class GraphLock:
    """A graph of AOTAutograd under a lock: what it is called, and what its nodes are. ``name`` says what is compiled,
    for which inputs, and which part of that."""

    name: str
    names: NodeNames

    def within(self, node: fx.Node, body: fx.GraphModule) -> GraphLock:
        """That of a body of control flow, which a node of the graph reads."""
        reader = next(iter(node.users), node)
        places = [str(k) for k, a in enumerate(reader.args) if a is node]
        names = NodeNames()
        names.take(body)
        return GraphLock(f"{self.name}, {self.names.of_node(reader.name)} argument {'/'.join(places)}", names)

    def open(self, gm: fx.GraphModule, options: Options, devices: Iterable[str]) -> OpenLock:
        """The section of the graph as it is now, and what is fixed by it. Raises LockError."""
        self.names.take(gm)
        assert options.lock is not None
        targets = dict.fromkeys(map(target_text, _targets(options, devices)))
        name = f"{self.name} on {' and '.join(targets) or 'no device'}"
        if options.lock_mode == "write":
            return OpenLock(options.lock, name, self.names, options)
        text = read_lock(options.lock)
        section = _nearest(sections_of(text, name), self.names)
        if section is None:
            raise LockError(_missing(options.lock, name))
        if options.lock_mode == "check":
            return OpenLock(options.lock, name, self.names, options)
        programs = {n: s for n in section.programs if (s := text.sections.get(n)) is not None}
        lines = [line for s in (section, *programs.values()) for line in s.content]
        return OpenLock(options.lock, name, self.names, options, section, programs, key_of(lines))


@dataclass(frozen=True)
class OpenLock:
    """The section of a graph, or of one of its programs. ``asked`` are the settings. Where the file is used,
    ``section`` is what it has, ``programs`` the sections of the graph's programs by name, and ``content`` a digest of
    all."""

    path: Path
    name: str
    names: NodeNames
    asked: Options
    section: Section | None = None
    programs: Mapping[str, Section] = field(default_factory=dict)
    content: str = ""
    is_of_program: bool = False

    def of_program(self, region: SizeRegion, table: SymbolTable) -> OpenLock:
        """That of the graph's program for a region of its sizes. Raises LockError."""
        where = WHERE + condition_text(region, table)
        section = self.programs.get(self.section.name + where) if self.section is not None else None
        if section is None and self.section is not None:
            raise LockError(_missing(self.path, self.name + where))
        return replace(self, name=self.name + where, section=section, programs={}, is_of_program=True)

    def planned_for(self, region: SizeRegion, others: Iterable[SizeRegion], table: SymbolTable) -> SizeRegion:
        """Of some other regions that for which the program of a region was planned, as the file has it that is used;
        the region itself where it has none of them."""
        lines = self.section.tree().get(PROGRAMS, ()) if self.section is not None else ()
        text = condition_text(region, table)
        told = {below.text for line in lines if line.text == text for below in line.below}
        return next((o for o in others if planned_text(o, table) in told), region)

    @cached_property
    def ways(self) -> LockedWays | None:
        """The decisions that are fixed."""
        return SectionWays(self.section, self.names) if self.section is not None else None

    @cached_property
    def options(self) -> Options:
        """Those to compile with: where the file is used, its schedules are as if somebody gave them."""
        if self.section is None:
            return self.asked
        schedules, given = schedules_of(self.section), self.asked.schedules
        if given is not None:  # what a person gives goes before; that it is no other is checked at last
            mine = [o.workload for o in given.items]
            schedules = (*given.items, *(s for s in schedules if not any(_is_same(m, s.workload) for m in mine)))
        content = key_of([*self.section.content, str(given.content if given is not None else "")])
        is_known = given is None or given.content is not None
        return replace(self.asked, tune=False, schedules=Overrides(schedules, content if is_known else None))

    @property
    def key(self) -> str:
        """What a key of the graph's program must tell of the lock: its lines are kept beside the program."""
        return f"{self.name} {self.names.text} {self.content}"

    @property
    def settings(self) -> list[str]:
        """The settings that decide, as lines."""
        usual = {f.name: f.default for f in fields(Options)}
        told = [f"numerics {typed_value(spec, getattr(self.asked, spec.name))}" for spec in option_specs()
                if spec.name == "numerics"]  # fmt: skip
        for spec in option_specs():
            value = getattr(self.asked, spec.name)
            if spec.changes_code and spec.name not in _UNTOLD and value != usual.get(spec.name):
                told.append(f"{spec.name} {typed_value(spec, value)}")
        return [*told, *(["deterministic algorithms"] if torch.are_deterministic_algorithms_enabled() else [])]

    def unfollowed(self, error: BaseException) -> LockError:
        """That what the file has cannot be done here."""
        return LockError(
            f"{self.path} cannot be followed for {self.name}: {error}. What is compiled, or torch-mlc, has changed "
            "since it was written: write it again (MLC_LOCK_MODE=write) and look at the difference"
        )

    def settle(self, body: Sequence[str], programs: Sequence[Sequence[str]] = ()) -> None:
        """Do with what was decided what the mode says: with the lines of the graph's section, and of those of its
        programs, where it has several. Raises LockError."""
        if self.asked.lock_mode == "write":
            number = written_sections(self.path).number(self.name, self.names.text)
            write_graph(self.path, _graph_sections(section_name(self.name, number), body, programs))
            return
        text = read_lock(self.path)
        known = sections_of(text, self.name)
        if not known:
            raise LockError(_missing(self.path, self.name))
        found = {s.name: _graph_sections(s.name, body, programs) for s in known}
        if any(all(map(_is_held, repeat(text), sections)) for sections in found.values()):
            return
        nearest = _nearest(known, self.names)
        assert nearest is not None
        other = next(s for s in found[nearest.name] if not _is_held(text, s))
        file = text.sections.get(other.name)
        raise LockError(_missing(self.path, other.name) if file is None else self._differs(file, other))

    def _differs(self, file: Section, build: Section) -> str:
        told = difference(file.content[1:], build.content[1:], (f"{self.path}:{file.number}", "this build"))
        where = model_lines(told, self.names.mentioned, self.names.source)
        if self.asked.lock_mode == "use":
            begin = f"{self.path} has decisions for {build.name} that cannot be taken:"
            end = (
                "The model, settings or torch-mlc have changed since the file was written. To take what this build "
                "decides, write the file again (MLC_LOCK_MODE=write) and look at the difference"
            )
        else:
            begin = f"{build.name} is decided otherwise than {self.path} has it:"
            end = (
                "If this is what you want, write the file again (MLC_LOCK_MODE=write) and look at its difference. If "
                "not, find what changed (model, settings, machine, versions of torch or torch-mlc), or decide as the "
                "file says (MLC_LOCK_MODE=use)"
            )
        model = ["in the model:", *(f"  {line}" for line in where)] if where else []
        return "\n".join([begin, *told, *model, end])


def _graph_sections(name: str, body: Sequence[str], programs: Sequence[Sequence[str]]) -> list[Section]:
    """The section of a graph, and those of its programs."""
    head = Section.of(name, body)
    return [head, *(Section.of(n, b) for n, b in zip(head.programs, programs, strict=True))]


def _is_held(text: LockText, section: Section) -> bool:
    """Whether a file has a section with the same content."""
    file = text.sections.get(section.name)
    return file is not None and file.content[1:] == section.content[1:]


def target_text(target: Target) -> str:
    """A machine as sections name it: what decisions hold for."""
    if target.is_gpu:
        return f"{target} of {target.cores} multiprocessors"
    libraries = "" if target.libraries else ", no libraries"
    threads = f"{target.cores} thread{'s' * (target.cores != 1)}"
    return f"{target.kind} {target.arch} of {8 * target.vector_bytes} bits, {threads}{libraries}"


def _targets(options: Options, devices: Iterable[str]) -> list[Target]:
    return [target_for(d, options.target, options.threads, options.cpu_products, options.libraries) for d in devices]


def _nearest(sections: Sequence[Section], names: NodeNames) -> Section | None:
    """Of several sections of a name that which tells most of this graph's nodes."""
    if len(sections) < 2:
        return sections[0] if sections else None
    return max(sections, key=lambda s: sum(bool(names.mentioned(line)) for line in s.content) / len(s.content))


def _is_same(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _missing(path: Path, name: str) -> str:
    """That a file has no section of a name, and what it has."""
    known = list(read_lock(path).sections)
    what = name.partition(" on ")[0]
    others = [k.partition(" on ")[2] for k in known if k.partition(" on ")[0] == what]
    if others:
        has = f"it has this graph for {'; '.join(others)}"
    elif near := get_close_matches(name, known, n=1, cutoff=0.0):
        has = f"the nearest that it has is {near[0]!r}"
    else:
        has = "it has none at all"
    return (
        f"{path} has no section {name!r}: {has}. If the graph is new, or for another machine, write its section "
        "(MLC_LOCK_MODE=write); that leaves the other sections as they are"
    )
