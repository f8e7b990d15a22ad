"""Control flow of an exported program: bodies are functions inside of the library, which steps call.

A body is planned like any program. Its results are written where its caller says, and all else lies in an arena, for
which the caller has a place in its own as long as the call lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.graph.graph import ConstantRef, GraphInput, Input, Library, Node, Ref, TensorType
from ....ir.graph.rename import Naming
from ...kernel import EmitError
from ..memory.liveness import polynomial, storage_bytes
from ..steps.lines import Lines
from ..steps.program import HostProgram
from ..steps.step import Allocate, BindSize, CallLibrary, CheckLayout, Facts, Free, HostStep, Repeat
from .results import CopyOver, lies_as, row_major

COND, WHILE = "hop::cond", "hop::while_loop"
_FLAG = TensorType((), (), DType.BOOL, "cpu")


@dataclass(frozen=True, slots=True)
class InnerFunction:
    """A body of control flow as a function of the library, planned.

    It is given ``arguments`` and writes ``results``, of these types. ``bindings`` tell off which arguments it reads
    sizes, and ``made`` what others are that it makes of these. ``lines`` are those of its graph.
    """

    program: HostProgram
    arguments: tuple[GraphInput, ...]
    results: tuple[TensorType, ...]
    bindings: tuple[BindSize, ...]
    made: Mapping[sympy.Symbol, sympy.Expr] = field(compare=False)
    lines: Lines = field(repr=False, compare=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its tensors."""
        return tuple(i.name for i in self.arguments if isinstance(i, Input))

    @property
    def scratch(self) -> sympy.Expr:
        """The bytes of its arena, in its own sizes."""
        return sympy.S.Zero if self.program.arena is None else self.program.arena.size


NO_BODIES: Mapping[str, InnerFunction] = {}


@dataclass(frozen=True, slots=True)
class InnerCall:
    """A call of a body with ``tensors``, and ``sizes``, what it reads its own off, in those of the caller."""

    function: InnerFunction
    tensors: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]

    def renamed(self, name: Naming) -> InnerCall:
        return replace(self, tensors=tuple(map(name, self.tensors)))


@dataclass(frozen=True, slots=True)
class Branch(HostStep):
    """One of two bodies writes ``results``: the first where the condition holds, a tensor of one element by its name
    and type, or a comparison of sizes. ``scratch`` is memory for the arena of either, "" for none."""

    condition: str | sympy.Basic
    kind: DType
    calls: tuple[InnerCall, InnerCall]
    results: tuple[str, ...]
    scratch: str
    comment: str = ""

    def told(self) -> Facts:
        named = (self.condition,) if isinstance(self.condition, str) else ()
        compared = () if named else (self.condition,)
        return _facts(self.calls, (*named, *self.results, self.scratch), compared)

    def renamed(self, name: Naming) -> HostStep:
        condition = name(self.condition) if isinstance(self.condition, str) else self.condition
        first, second = (c.renamed(name) for c in self.calls)
        return replace(
            self, condition=condition, calls=(first, second), results=tuple(map(name, self.results)),
            scratch=self.scratch and name(self.scratch),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn(HostStep):
    """A body makes ``values``, of these types, anew as long as another, the ``condition``, says so of them, which
    writes one byte to ``flag``.

    Turns read ``values`` and write to ``others`` and the other way round; in the end ``values`` are the last ones. Both
    bodies take these first. ``scratch`` is as in ``Branch``.
    """

    condition: InnerCall
    body: InnerCall
    values: tuple[str, ...]
    others: tuple[str, ...]
    types: tuple[TensorType, ...]
    flag: str
    scratch: str
    comment: str = ""

    def told(self) -> Facts:
        named = (*self.values, *self.others, self.flag, self.scratch)
        return _facts((self.condition, self.body), named, tuple(n for t in self.types for n in (*t.shape, *t.strides)))

    def renamed(self, name: Naming) -> HostStep:
        return replace(
            self, condition=self.condition.renamed(name), body=self.body.renamed(name),
            values=tuple(map(name, self.values)), others=tuple(map(name, self.others)), flag=name(self.flag),
            scratch=self.scratch and name(self.scratch),
        )  # fmt: skip


def _facts(calls: Iterable[InnerCall], named: Sequence[str], sizes: Sequence[sympy.Basic]) -> Facts:
    reads = dict.fromkeys((*(t for c in calls for t in c.tensors), *filter(None, named)))
    return Facts(reads=tuple(reads), sizes=(*(s for c in calls for s in c.sizes), *sizes))


def bodies_of(node: Node) -> tuple[str, ...]:
    """The bodies that a branch or a loop calls, by the names that the graph has for them; none of other nodes."""
    if not isinstance(node, Library) or node.target not in (COND, WHILE):
        return ()
    given = node.args[1:3] if node.target == COND else node.args[:2]
    return tuple(a.name for a in given if isinstance(a, ConstantRef))


def write_control(
    program: HostProgram, types: Mapping[str, TensorType], bodies: Mapping[str, InnerFunction]
) -> HostProgram:
    """The program with branches and loops whose ``bodies`` are there as steps of their own.

    Raises EmitError for what a body is given and has no place for.
    """
    if not bodies:
        return program
    made: set[str] = set()

    def written(step: HostStep) -> list[HostStep]:
        match step:
            case Repeat():
                return [replace(step, steps=tuple(s for inner in step.steps for s in written(inner)))]
            case CallLibrary(node) if (names := bodies_of(node)) and all(n in bodies for n in names):
                made.update(node.names)
                writer = _ControlWriter(program.name, node, types, step.comment)
                return (writer.branch if node.target == COND else writer.loop)([bodies[n] for n in names])
            case CheckLayout(name) if name in made:
                return []  # it lies as bodies write it
        return [step]

    return replace(program, steps=tuple(s for step in program.steps for s in written(step)))


@dataclass(slots=True)
class _ControlWriter:
    """The steps of one node: what comes before its call and behind it, with memory that only the call needs."""

    program: str
    node: Library
    types: Mapping[str, TensorType]
    comment: str
    before: list[HostStep] = field(default_factory=list)
    behind: list[HostStep] = field(default_factory=list)
    spent: list[str] = field(default_factory=list)
    # What was brought into another layout.
    copies: dict[tuple[str, tuple[sympy.Expr, ...]], str] = field(default_factory=dict)

    def branch(self, bodies: Sequence[InnerFunction]) -> list[HostStep]:
        condition, _, _, operands = (*self.node.args, ())[:4]
        calls = [self.call(body, operands) for body in bodies]
        results = tuple(self.result(n, t) for n, t in zip(self.node.names, self.node.types, strict=True))
        kind = DType.BOOL
        if isinstance(condition, Ref):
            kind, condition = self.types[condition.name].dtype, condition.name
        scratch = self.scratch([self.seen(b, c, b.scratch) for b, c in zip(bodies, calls, strict=True)])
        first, second = calls
        return self.steps(Branch(condition, kind, (first, second), results, scratch, self.comment))

    def loop(self, bodies: Sequence[InnerFunction]) -> list[HostStep]:
        condition, body = bodies
        carried, additional = (*self.node.args[2:4], ())[:2]
        given = [self.begun(a, name, body.arguments[k], body, (*carried, *additional))
                 for k, (a, name) in enumerate(zip(carried, self.node.names, strict=True))]  # fmt: skip
        values = tuple(name for name, _ in given)
        kinds = tuple(kind for _, kind in given)
        others = tuple(self.memory(f"{n} next", kind) for n, kind in zip(self.node.names, kinds, strict=True))
        types = {**self.types, **dict(given)}
        calls = [self.call(b, (*map(Ref, values), *additional), types) for b in (condition, body)]
        if calls[0].tensors != calls[1].tensors or calls[0].tensors[: len(values)] != values:
            raise EmitError(
                f"{self.program}: the condition and the body of a loop were traced with layouts that differ"
            )
        flag = self.memory(f"{self.node.names[0]} flag", _FLAG)
        scratch = self.scratch([self.seen(b, c, b.scratch) for b, c in zip(bodies, calls, strict=True)])
        for name, value, kind, wanted in zip(self.node.names, values, kinds, self.node.types, strict=True):
            assert wanted is not None
            if value != name:
                self.behind += [Allocate(f"{name} made", wanted), CopyOver(name, f"{name} made", value, wanted, kind)]
                self.behind.append(Free((f"{name} made",)))
        return self.steps(Turn(calls[0], calls[1], values, others, kinds, flag, scratch, self.comment))

    def steps(self, call: HostStep) -> list[HostStep]:
        free = [Free(tuple(self.spent))] if self.spent else []
        return [*self.before, call, *self.behind, *free]

    def begun(
        self, given: Any, name: str, argument: GraphInput, body: InnerFunction, everything: Sequence[Any]
    ) -> tuple[str, TensorType]:
        """Memory with the first of the values that are carried under a name, as the body takes them; the result itself
        where that is asked for in this layout."""
        assert isinstance(given, Ref) and isinstance(argument, Input)
        source, known = self.types[given.name], self.known(body, everything, self.types)
        kind = replace(source, strides=tuple(sympy.expand(s.xreplace(known)) for s in argument.type.strides))
        wanted = self.node.types[self.node.names.index(name)]
        assert wanted is not None
        if sympy.expand(storage_bytes(kind) - kind.nbytes) != 0:
            raise EmitError(
                f"{self.program}: a loop carries {given.name} of {list(kind.shape)}, whose elements have gaps or "
                "overlap in memory: clone it before the loop"
            )
        if lies_as(wanted, kind.strides):
            self.before += [Allocate(f"{name} begun", kind), CopyOver(name, f"{name} begun", given.name, kind, source)]
            self.before.append(Free((f"{name} begun",)))
            return name, kind
        value = self.memory(f"{name} turned", kind)
        self.before += [CopyOver(f"{value} first", value, given.name, kind, source), Free((f"{value} first",))]
        return value, kind

    def call(
        self, body: InnerFunction, given: Sequence[Any], types: Mapping[str, TensorType] | None = None
    ) -> InnerCall:
        """A call with the tensors in the layouts that the body takes, copied where they lie otherwise."""
        types = self.types if types is None else types
        known, tensors = self.known(body, given, types), []
        for argument, value in zip(body.arguments, given, strict=True):
            if not isinstance(argument, Input):
                continue
            kind = types[value.name]
            strides = tuple(sympy.expand(s.xreplace(known)) for s in argument.type.strides)
            tensors.append(value.name if lies_as(kind, strides) else self.copied(value.name, kind, strides))
        return InnerCall(body, tuple(tensors), tuple(self.reads(body, given, types)))

    def known(
        self, body: InnerFunction, given: Sequence[Any], types: Mapping[str, TensorType]
    ) -> dict[sympy.Symbol, sympy.Expr]:
        """The sizes of a body in those of the caller."""
        return self.solved(body, self.reads(body, given, types))

    def solved(self, body: InnerFunction, reads: Iterable[sympy.Expr]) -> dict[sympy.Symbol, sympy.Expr]:
        known: dict[sympy.Symbol, sympy.Expr] = {}
        for b, read in zip(body.bindings, reads, strict=True):
            parts = sympy.expand((read - b.shift) / b.scale)
            whole = all(c.is_Integer for c in parts.as_coefficients_dict().values())
            known[b.symbol] = parts if whole else FloorDiv(read - b.shift, sympy.Integer(b.scale))
        for size, expr in body.made.items():
            known[size] = expr.xreplace(known)
        return known

    def reads(self, body: InnerFunction, given: Sequence[Any], types: Mapping[str, TensorType]) -> list[sympy.Expr]:
        """What a body reads its sizes off: dimensions and strides of tensors, and numbers."""
        values = dict(zip((a.name for a in body.arguments), given, strict=True))
        found = []
        for b in body.bindings:
            value = values[str(b.source)]
            if b.dim is None:
                found.append(sympy.sympify(value))
            else:
                kind = types[value.name]
                found.append((kind.strides if b.stride else kind.shape)[b.dim])
        return found

    def seen(self, body: InnerFunction, call: InnerCall, size: sympy.Expr) -> sympy.Expr:
        return sympy.expand(size.xreplace(self.solved(body, call.sizes)))

    def result(self, name: str, kind: TensorType | None) -> str:
        """Memory for a result of a body, which writes it row-major."""
        assert kind is not None
        if lies_as(kind, row_major(kind.shape)):
            self.before.append(Allocate(name, kind))
            return name
        rows = replace(kind, strides=row_major(kind.shape))
        self.behind += [Allocate(f"{name} made", kind), CopyOver(name, f"{name} made", f"{name} rows", kind, rows)]
        self.behind.append(Free((f"{name} made",)))
        return self.memory(f"{name} rows", rows)

    def copied(self, name: str, kind: TensorType, strides: tuple[sympy.Expr, ...]) -> str:
        if (name, strides) not in self.copies:
            wanted = replace(kind, strides=strides)
            memory = self.memory(f"{self.node.names[0]} given {len(self.copies)}", wanted)
            self.copies[name, strides] = copy = f"{memory} now"
            self.before.append(CopyOver(copy, memory, name, wanted, kind))
            self.spent.append(copy)
        return self.copies[name, strides]

    def scratch(self, sizes: Sequence[sympy.Expr]) -> str:
        """Memory that is no smaller than any of some sizes."""
        terms: dict[sympy.Expr, int] = {}
        for size in sizes:
            for monomial, count in polynomial(size).items():
                terms[monomial] = max(terms.get(monomial, 0), count)
        most = sympy.Add(*(m * c for m, c in terms.items()))
        if most == 0:
            return ""
        return self.memory(f"{self.node.names[0]} scratch", TensorType((most,), (sympy.S.One,), DType.UINT8, "cpu"))

    def memory(self, name: str, kind: TensorType) -> str:
        """Memory that is there until the call has ended."""
        self.before.append(Allocate(name, kind))
        self.spent.append(name)
        return name
