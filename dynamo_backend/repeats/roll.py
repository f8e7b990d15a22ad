"""The host program of a few layers to that of all: the steps of one of them become a loop over all that are like it.

The steps have to repeat as the graph does, and everything that a layer makes or is given has to have the same readers
in each. What a layer has from the one before it is handed on from one time to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ...codegen.host.steps.lines import Lines, with_lines
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.step import (
    BindSize,
    CallLibrary,
    Free,
    HostStep,
    Launch,
    MakeView,
    Repeat,
    Return,
)
from ...ir.graph.graph import GraphOutput, Input, View
from ..tracing.origins import lines_of
from .layers import HEAD
from .repeating import NotAlike, Repeating


def roll(program: HostProgram, short: Repeating) -> HostProgram:
    """The program of all layers, from that of a few, without an arena. Raises NotAlike."""
    return _Roller(program, short).run()


@dataclass(slots=True)
class _Roller:
    program: HostProgram
    short: Repeating
    # Steps before the loop, of it, and behind it, up to the views that are made for the caller.
    before: tuple[HostStep, ...] = ()
    steps: tuple[HostStep, ...] = ()
    behind: tuple[HostStep, ...] = ()
    # Names that the steps of the loop read from outside, and those that they set.
    read: dict[str, None] = field(default_factory=dict)
    made: dict[str, None] = field(default_factory=dict)
    # By name what it is in the next layer, where the loop hands that on; and inputs by what they are each time.
    next: dict[str, str] = field(default_factory=dict)
    taken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # What leaves the loop, by what it is called in the loop's steps.
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def run(self) -> HostProgram:
        short = self.short
        self.cut()
        self.hand_on()
        self.check_readers()
        self.check_layers()
        inside, behind, values = self.results()
        # What the loop hands on may be needed again as it was before.
        leaving = {v for v in values if isinstance(v, str)}.union(*(view.facts.needs for view in behind))
        begun = {name: f"{name} now" for name in self.next if name in leaving}
        steps = tuple(s.renamed(lambda n: begun.get(n, n)) for s in (*self.steps, *inside))
        carried = tuple((begun.get(a, a), begun.get(b, b), a) for chain in self.chains() for a, b in pairwise(chain))
        loop = Repeat(steps, short.left_out + 1, self.taken, self.kept, carried)
        behind = [*(s.renamed(lambda n: begun.get(n) or self.name_behind(n)) for s in self.behind), *behind]
        inputs = short.inputs
        tensors = {i.name: i.type for i in inputs if isinstance(i, Input)}
        whole = (*self.before, loop, *behind, Return(values))
        arguments = tuple(i.name for i in inputs)
        return replace(self.program, arguments=arguments, inputs=tensors, steps=whole, peaks=(), begins=())

    def cut(self) -> None:
        """Take the steps apart. One layer's are to be those of the one behind it, but for the names."""
        steps, begins = self.program.steps, self.program.begins
        start, period = self.short.window
        first, last, after, end = (begins[k] for k in (start, start + period, start + 2 * period, len(self.short.body)))
        entry = steps[: begins[0]]
        if not all(isinstance(s, (BindSize, Free)) for s in entry):
            raise NotAlike
        # Arguments that nobody reads are not taken in the first place.
        self.before = (*(s for s in entry if isinstance(s, BindSize)), *steps[begins[0] : first])
        self.steps, self.behind = steps[first:last], steps[last:end]
        following = (s.renamed(self.name_in_next) for s in self.steps)
        lines = lines_of(self.short.gm)
        if [_told(s, lines) for s in following] != [_told(s, lines) for s in steps[last:after]]:
            raise NotAlike

    def hand_on(self) -> None:
        """Find what the loop takes from outside, and what one layer has from the one before."""
        for step in self.steps:
            self.read.update(dict.fromkeys(n for n in step.facts.needs if n not in self.made))
            self.made.update(dict.fromkeys(step.facts.makes))
        inputs, earlier = {i.name for i in self.short.graph.inputs if isinstance(i, Input)}, _readers(self.before)
        for name in self.read:
            if self.short.places[name] is None:
                continue
            following = self.name_in_next(name)
            if following in self.made or following in self.read:
                self.next[name] = following
            elif name in inputs and name not in earlier:
                self.taken[name] = self.short.each(name)
            else:
                raise NotAlike

    def chains(self) -> list[list[str]]:
        """Names of the loop, each with what it becomes in the layers behind, as far as the loop hands it on."""
        found = []
        handed = set(self.next.values())
        for name in (n for n in (*self.read, *self.made) if n not in handed):
            chain = [name]
            while chain[-1] in self.next:
                chain.append(self.next[chain[-1]])
            found.append(chain)
        return found

    def check_readers(self) -> None:
        """What is made or taken each time is read behind the loop as often as it is in the times that follow.

        Passes make one sum of many (a gradient that all layers share) of those layers that they see, behind the last.
        """
        inside, behind = _readers(self.steps), _readers(self.behind)
        for chain in self.chains():
            times = 0
            for name in chain if self.short.places[chain[0]] is not None else ():
                if behind[name] != times:
                    raise NotAlike
                times += inside[name]

    def check_layers(self) -> None:
        """What is made or read before the loop belongs to layers in front of it, what is behind it to later ones."""
        at_loop = {(at.slot, at.which): at.layer for n in (*self.made, *self.taken) if (at := self.short.places[n])}
        earlier = {**_makers(self.before), **_readers(self.before)}
        later = {**_makers(self.behind), **_readers(self.behind)}.keys() - {*self.made, *self.read}
        for names, is_later in ((earlier.keys(), False), (later, True)):
            for at in filter(None, map(self.short.places.__getitem__, names)):
                middle = at_loop.get((at.slot, at.which))
                is_in_place = (at.layer >= HEAD) == is_later if middle is None else (at.layer > middle) == is_later
                if not is_in_place or at.layer == middle:
                    raise NotAlike

    # --- names ------------------------------------------------------------------------------------------------------

    def name_in_next(self, name: str) -> str:
        """What is in the next layer of the few what this is here."""
        return self.short.name_of(name, 1)

    def name_behind(self, name: str) -> str:
        """What an input that steps behind the loop read is called among those of all layers."""
        at = self.short.places[name]
        if at is None or name in self.read or name in self.made or name not in self.program.inputs:
            return name
        return self.short.name_at(at.slot, at.which, at.layer + self.short.left_out)

    # --- what leaves ------------------------------------------------------------------------------------------------

    def results(self) -> tuple[list[HostStep], list[HostStep], tuple[GraphOutput, ...]]:
        """Views for the caller, of what the loop makes and of the rest, and the results."""
        short = self.short
        outputs, views = short.outputs()
        wanted = {o for o in outputs if isinstance(o, str)} | {v.source for v in views}
        seen_here = {v.name for v in views}
        if any(v.source in seen_here for v in views):
            raise NotAlike
        # By what things are called in the graph of all layers, the variable in which they are, or what they are called
        # in the loop, and which time.
        variables, times = {name: name for name in _makers(self.before)}, dict[str, tuple[str, int]]()
        for name in _makers(self.behind):
            at = short.places[name]
            whole = name if at is None else short.name_at(at.slot, at.which, at.layer + short.left_out)
            variables[whole] = name
        for name in (*self.made, *self.taken):
            each = short.each(name)
            if not wanted.isdisjoint(each):
                times |= {whole: (name, time) for time, whole in enumerate(each)}
        inside: dict[str, dict[int, list[View]]] = {}
        behind: list[HostStep] = []
        for view in views:
            if view.source in times:
                name, time = times[view.source]
                inside.setdefault(name, {}).setdefault(time, []).append(view)
            else:
                behind.append(MakeView(view.name, view.type, variables.get(view.source, view.source), view.offset))
                variables[view.name] = view.name
        seen = [self.seen(name, by_time) for name, by_time in inside.items()]
        for _, named in seen:
            times |= named
        values = tuple(self.leaving(o, times, variables) if isinstance(o, str) else o for o in outputs)
        if any(names != set(values) & names for names in map(set, self.kept.values())):
            raise NotAlike  # only some of them leave
        return [step for steps, _ in seen for step in steps], behind, values

    def seen(self, name: str, views: dict[int, list[View]]) -> tuple[list[HostStep], dict[str, tuple[str, int]]]:
        """The views of something that the loop makes, and what they are called each time."""
        steps: list[HostStep] = []
        named: dict[str, tuple[str, int]] = {}
        rows = [views.get(time, []) for time in range(self.short.left_out + 1)]
        if any(len(row) != len(rows[0]) for row in rows):
            raise NotAlike
        for like in zip(*rows, strict=True):
            if any((v.type, v.offset) != (like[0].type, like[0].offset) for v in like):
                raise NotAlike
            local = f"{like[0].name} seen"
            steps.append(MakeView(local, like[0].type, name, like[0].offset))
            named |= {view.name: (local, time) for time, view in enumerate(like)}
        return steps, named

    def leaving(self, name: str, times: dict[str, tuple[str, int]], variables: dict[str, str]) -> str:
        """What the program returns for something that is called so in the graph of all layers."""
        if name not in times:
            return variables.get(name, name)
        local, time = times[name]
        if local not in self.kept:
            self.kept[local] = tuple(f"{local} {k}" for k in range(self.short.left_out + 1))
        return self.kept[local][time]


def _told(step: HostStep, lines: Lines) -> HostStep:
    """A step with the lines of the model that it comes from, whose places in the graph are each layer's own."""
    match step:
        case Launch() | CallLibrary():
            return replace(step, comment=with_lines(step.comment, lines))
    return step


def _readers(steps: Iterable[HostStep]) -> Counter[str]:
    """How often steps look at what is called so. Arguments that are alike give the same sizes, whichever is asked."""
    return Counter(n for s in steps if not isinstance(s, (Free, BindSize)) for n in s.facts.needs)


def _makers(steps: Iterable[HostStep]) -> dict[str, None]:
    """What steps set."""
    return dict.fromkeys(n for s in steps for n in s.facts.makes)
