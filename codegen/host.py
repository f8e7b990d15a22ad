"""The host program: what runs between the kernels of one graph, as steps that print as Python.

Sizes are bound from the arguments, results allocated when they are first needed and freed after their last use, kernels
launched and libraries called in the order of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy

from ..ir.graph import (
    CallTensor,
    Compute,
    Graph,
    GraphOutput,
    Input,
    Library,
    Origin,
    Reduction,
    SizeInput,
    TensorType,
    View,
    uses,
)
from .kernel import EmitError

# Ops whose results have the strides that their fake versions promise; the others are looked at after each call.
SURE = frozenset(
    {"aten::mm.default", "aten::addmm.default", "aten::bmm.default", "aten::baddbmm.default",
     "aten::embedding_dense_backward.default", "mlc::seeds", "mlc::constant", "aten::sym_size.int"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How calls of a tensor function reach compiled code.

    ``kernel`` is the variable of the code (equal functions share one), ``sizes`` which of the call's sizes it takes, in
    its order. Code is called with an address for each tensor, then the sizes; or, where not ``by_pointer`` (GPU
    kernels, and ATen ops in a kernel's place), with the tuple of tensors and that of sizes.
    """

    kernel: str
    sizes: tuple[int, ...]
    by_pointer: bool = True


@dataclass(frozen=True, slots=True)
class BindSize:
    """``symbol`` is dimension ``dim`` of the tensor ``source``, or its stride where ``stride``; or the integer
    ``source``."""

    symbol: sympy.Symbol
    source: str
    dim: int | None = None
    stride: bool = False
    # The value read is ``scale * symbol + shift``.
    scale: int = 1
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory for a result, not initialised."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Reuse:
    """``name`` takes over the memory of ``source``, which nobody reads any more and whose type is the same."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel: ``tensors`` are inputs then outputs."""

    use: KernelUse
    tensors: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]
    device: str
    comment: str = ""


@dataclass(frozen=True, slots=True)
class CallLibrary:
    """Call an op (``target`` as in ``Library``) and bind its results."""

    node: Library
    comment: str = ""


@dataclass(frozen=True, slots=True)
class CheckLayout:
    """Bring a library's result into the layout that the graph was compiled for, should it have another."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class MakeView:
    """``name`` looks at the memory of ``source`` from ``offset`` elements in."""

    name: str
    type: TensorType
    source: str
    offset: sympy.Expr


@dataclass(frozen=True, slots=True)
class Free:
    """Forget tensors; their memory goes with the last name for it."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """The results."""

    values: tuple[GraphOutput, ...]


Step: TypeAlias = BindSize | Allocate | Reuse | Launch | CallLibrary | CheckLayout | MakeView | Free | Return


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The steps of one graph. ``arguments`` are the names of the caller's arguments, ``inputs`` those that are tensors.

    ``peaks`` are sizes in bytes of what the steps hold at once beyond the inputs: the greatest of them is the peak.
    """

    name: str
    arguments: tuple[str, ...]
    inputs: Mapping[str, TensorType]
    steps: tuple[Step, ...]
    symbols: tuple[sympy.Symbol, ...] = ()
    peaks: tuple[sympy.Expr, ...] = ()

    @property
    def launches(self) -> int:
        return sum(isinstance(s, Launch) for s in self.steps)

    @property
    def library_calls(self) -> int:
        return sum(isinstance(s, CallLibrary) for s in self.steps)

    @property
    def peak_bytes(self) -> sympy.Expr:
        """The most memory held at once beyond the inputs, in size symbols; workspaces inside libraries not counted."""
        return sympy.Max(*self.peaks) if self.peaks else sympy.S.Zero


def build_host_program(graph: Graph, uses_of: Mapping[str, KernelUse]) -> HostProgram:
    """The program of a fused graph; ``uses_of`` gives the compiled code of each tensor function.

    Raises EmitError where a size can be read from no argument.
    """
    return _Builder(graph, uses_of).build()


@dataclass(slots=True)
class _Builder:
    graph: Graph
    uses_of: Mapping[str, KernelUse]
    steps: list[Step] = field(default_factory=list)
    # The name whose object owns the memory that a name looks at.
    owner: dict[str, str] = field(default_factory=dict)
    # Dead memory by type, allocated by us and shared with nobody.
    spare: dict[TensorType, list[str]] = field(default_factory=dict)
    ours: dict[str, TensorType] = field(default_factory=dict)
    memory: _Memory = field(default_factory=lambda: _Memory())
    # Symbols that no argument gives: sizes decided by data, read from the results of the calls that decide them.
    unbound: set[sympy.Symbol] = field(default_factory=set)

    def build(self) -> HostProgram:
        graph = self.graph
        tensors = {i.name: i.type for i in graph.inputs if isinstance(i, Input)}
        bound = self.bind_sizes()
        last = self.last_uses()
        kept = {o for o in graph.outputs if isinstance(o, str)}
        self.owner = {name: name for name in tensors}
        unused = tuple(n for n in tensors if n not in last and n not in kept)
        if unused:
            self.steps.append(Free(unused))
        for at, node in enumerate(graph.nodes):
            self.node(node)
            names = [n for n in dict.fromkeys((*uses(node), *node.names)) if last.get(n, at) == at and n not in kept]
            self.free([n for n in names if n in self.owner])
        self.steps.append(Return(graph.outputs))
        missing = self.unbound & _mentioned(graph)
        if missing:
            lost = ", ".join(sorted(s.name for s in missing))
            raise EmitError(f"{graph.name}: no argument and no result gives the size {lost}")
        return HostProgram(
            graph.name, tuple(i.name for i in graph.inputs), tensors, tuple(self.steps), bound, self.memory.peaks()
        )

    def last_uses(self) -> dict[str, int]:
        """The position of the last node that reads each name."""
        last: dict[str, int] = {}
        for at, node in enumerate(self.graph.nodes):
            last.update(dict.fromkeys(uses(node), at))
        return last

    def bind_sizes(self) -> tuple[sympy.Symbol, ...]:
        """Read every symbol from an argument: an integer that is the symbol, a dimension, or a linear form of it."""
        wanted = {s for s in self.graph.symbols.symbols if not _decided_inside(self.graph, s)}
        found: dict[sympy.Symbol, BindSize] = {}
        places: list[tuple[sympy.Expr, str, int | None, bool]] = []
        for i in self.graph.inputs:
            match i:
                case SizeInput(name, value):
                    places.append((value, name, None, False))
                case Input(name, kind):
                    places += [(e, name, d, False) for d, e in enumerate(kind.shape)]
                    places += [(e, name, d, True) for d, e in enumerate(kind.strides)]
        # Plain symbols of integers first, then of dimensions, then forms that have to be solved.
        places.sort(key=lambda p: (not p[0].is_Symbol, p[3], p[2] is not None))
        for value, name, dim, stride in places:
            solved = _solve(value, wanted - found.keys())
            if solved is not None:
                symbol, scale, shift = solved
                found[symbol] = BindSize(symbol, name, dim, stride, scale, shift)
        self.unbound = wanted - found.keys()
        order = [s for s in self.graph.symbols.symbols if s in found]
        self.steps += [found[s] for s in order]
        return tuple(order)

    def node(self, node: Any) -> None:
        comment = origin_text(node.origins)
        match node:
            case CallTensor(names, types, function, args, sizes):
                use = self.uses_of[function]
                for name, kind in zip(names, types, strict=True):
                    self.allocate(name, kind)
                taken = tuple(sizes[k] for k in use.sizes)
                self.steps.append(Launch(use, (*args, *names), taken, types[0].device, comment))
            case Library():
                self.steps.append(CallLibrary(node, comment))
                for used in uses(node):
                    # An op may return or keep what it is given, so memory that a library saw is not used again.
                    self.ours.pop(self.owner.get(used, used), None)
                for name, result in zip(node.names, node.types, strict=True):
                    if result is not None:
                        self.owner[name] = name
                        self.memory.add(name, result.nbytes)
                        self.bind_result(name, result)
                        if node.target not in SURE:
                            self.steps.append(CheckLayout(name, result))
            case View(name, kind, source, _, _, offset):
                self.steps.append(MakeView(name, kind, source, offset))
                self.owner[name] = self.owner[source]
                self.memory.share(name, source)
            case Compute() | Reduction():
                raise EmitError(f"{self.graph.name}: {node.names[0]} was not fused into any function")

    def bind_result(self, name: str, kind: TensorType) -> None:
        """Read the sizes that a result is the first to tell."""
        for dim, extent in enumerate(kind.shape):
            if extent in self.unbound:
                self.unbound.discard(extent)
                self.steps.append(BindSize(extent, name, dim))

    def allocate(self, name: str, kind: TensorType) -> None:
        spare = self.spare.get(kind)
        if spare:
            self.steps.append(Reuse(name, spare.pop()))
        else:
            self.steps.append(Allocate(name, kind))
        self.owner[name] = name
        self.ours[name] = kind
        self.memory.add(name, kind.nbytes)

    def free(self, names: list[str]) -> None:
        gone = []
        for name in names:
            owner = self.owner.pop(name)
            self.memory.drop(name)
            kind = self.ours.get(owner)
            if owner == name and kind is not None and owner not in self.owner.values() and self.wanted(kind):
                # The name stays bound until its memory is taken over.
                self.spare.setdefault(kind, []).append(name)
                del self.ours[name]
                continue
            gone.append(name)
        if gone:
            self.steps.append(Free(tuple(gone)))

    def wanted(self, kind: TensorType) -> bool:
        """Whether the very next allocations include one of this type, so that keeping it raises no peak."""
        for node in self.graph.nodes[self.position() : self.position() + 1]:
            if isinstance(node, CallTensor) and kind in node.types:
                return len(self.spare.get(kind, ())) < node.types.count(kind)
        return False

    def position(self) -> int:
        return sum(isinstance(s, (Launch, CallLibrary, MakeView)) for s in self.steps)


@dataclass(slots=True)
class _Memory:
    """Bytes held by tensors beyond the inputs, as polynomials of sizes, at each moment that could be the peak."""

    held: dict[str, sympy.Expr] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)
    now: sympy.Expr = sympy.S.Zero
    seen: dict[sympy.Expr, None] = field(default_factory=dict)

    def add(self, name: str, nbytes: sympy.Expr) -> None:
        self.held[name], self.base[name], self.users[name] = nbytes, name, 1
        self.now = self.now + nbytes
        self.seen[self.now] = None

    def share(self, name: str, source: str) -> None:
        base = self.base.get(source)
        if base is not None:
            self.base[name] = base
            self.users[base] += 1

    def drop(self, name: str) -> None:
        base = self.base.pop(name, None)
        if base is None:
            return
        self.users[base] -= 1
        if self.users[base] == 0:
            self.now = self.now - self.held.pop(base)

    def peaks(self) -> tuple[sympy.Expr, ...]:
        """Those moments that no other outgrows for all sizes."""
        kept: list[tuple[sympy.Expr, dict[sympy.Expr, int]]] = []
        for total in self.seen:
            terms = {k: int(v) for k, v in sympy.expand(total).as_coefficients_dict().items() if v.is_Integer}
            if any(_covers(other, terms) for _, other in kept):
                continue
            kept = [(t, other) for t, other in kept if not _covers(terms, other)]
            kept.append((total, terms))
        return tuple(total for total, _ in kept)


def _covers(a: Mapping[sympy.Expr, int], b: Mapping[sympy.Expr, int]) -> bool:
    return all(a.get(k, 0) >= n for k, n in b.items()) and all(n >= 0 or b.get(k, 0) <= n for k, n in a.items())


def _decided_inside(graph: Graph, symbol: sympy.Symbol) -> bool:
    """Whether a node of the graph gives the symbol its value (a size decided by data)."""
    return any(
        isinstance(n, Library) and symbol.name in n.names and n.types[n.names.index(symbol.name)] is None
        for n in graph.nodes
    )


def _solve(value: sympy.Expr, wanted: set[sympy.Symbol]) -> tuple[sympy.Symbol, int, int] | None:
    """The symbol, scale and shift where ``value`` is ``scale * symbol + shift`` of one wanted symbol."""
    if value.is_Symbol:
        return (value, 1, 0) if value in wanted else None
    free = value.free_symbols & wanted
    if len(free) != 1 or len(value.free_symbols) != 1:
        return None
    (symbol,) = free
    shift = value.xreplace({symbol: sympy.S.Zero})
    scale = sympy.expand(value - shift).coeff(symbol)
    if not (scale.is_Integer and shift.is_Integer and scale > 0) or sympy.expand(scale * symbol + shift - value) != 0:
        return None
    return symbol, int(scale), int(shift)


def _mentioned(graph: Graph) -> set[sympy.Symbol]:
    """Every size symbol that the steps will compute with."""
    found: set[sympy.Symbol] = set()

    def look(arg: Any) -> None:
        if isinstance(arg, sympy.Basic):
            found.update(arg.free_symbols)
        elif isinstance(arg, (tuple, list)):
            for a in arg:
                look(a)

    for node in graph.nodes:
        for kind in node.types:
            if kind is not None:
                look((kind.shape, kind.strides))
        match node:
            case Library():
                look((node.args, tuple(v for _, v in node.kwargs)))
            case CallTensor():
                look(node.sizes)
            case View():
                look(node.offset)
    look(graph.outputs)
    return found


def origin_text(origins: Sequence[Origin]) -> str:
    """The model lines of a step on one line: each line once, at most three."""
    lines = list(dict.fromkeys(o.source for o in origins if o.source))
    more = f" … and {len(lines) - 3} more" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more
