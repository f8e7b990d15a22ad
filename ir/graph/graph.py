"""Graphs of tensor functions and library calls, and the module that holds them.

A graph node defines one or more tensors. Before fusion the nodes are ``Compute``, ``Reduction``, ``Scan`` and
``Scatter`` (what each element is, as a value expression over the node's axes), ``View`` (an index map that costs
nothing) and ``Library`` (a call of an ATen op). Fusion replaces the first four by ``CallTensor`` of a function of the
module. Layers that repeat are a ``CallRegion``, which calls a graph of its own again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

from ..expr.dtypes import DType
from ..expr.monoid import Monoid
from ..expr.origin import Origin
from ..expr.symbols import SymbolTable
from ..expr.value import Expr, Index, IndexValue, free_symbols, is_value, loads
from ..function.function import TensorFunction
from ..nest.loops import LoopNest
from .constants import digest_of


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and strides in elements, element type, and device ("cpu", "cuda:0"). A materialised value has these
    strides."""

    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    dtype: DType
    device: str = "cpu"

    @property
    def numel(self) -> sympy.Expr:
        return _product(self.shape)

    @property
    def nbytes(self) -> sympy.Expr:
        return _product((*self.shape, self.dtype.itemsize))


@lru_cache(maxsize=8192)
def _product(sizes: tuple[sympy.Expr | int, ...]) -> sympy.Expr:
    # Every pass asks for the bytes of every result, and layers that repeat have the same few shapes.
    return sympy.Mul(*sizes)


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the caller gives. ``static`` marks parameters and buffers, whose address does not change."""

    name: str
    type: TensorType
    static: bool = False


@dataclass(frozen=True, slots=True)
class SizeInput:
    """An integer that the caller gives, and the symbol that it binds (an expression where the caller passes a
    derived size)."""

    name: str
    value: sympy.Expr


@dataclass(frozen=True, slots=True)
class Compute:
    """``name[axes] = value``: ``axes[k]`` runs over ``type.shape[k]``; loads name other nodes."""

    name: str
    type: TensorType
    axes: tuple[sympy.Symbol, ...]
    value: Expr
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def types(self) -> tuple[TensorType, ...]:
        return (self.type,)


@dataclass(frozen=True, slots=True)
class Reduction:
    """``names[k][axes] = combine over reduce_axes of values[k]``, one result per component of the monoid.

    ``values`` are lifted states; results are the raw state, which a following ``Compute`` projects.
    """

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    axes: tuple[sympy.Symbol, ...]
    reduce_axes: tuple[sympy.Symbol, ...]
    reduce_shape: tuple[sympy.Expr, ...]
    monoid: Monoid
    values: tuple[Expr, ...]
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Scan:
    """``names[k][axes] = combine over all positions of scan_axis up to here of values[k]``, in order, the element here
    included; one result per component of the monoid, each of the whole shape.

    ``values`` are lifted states; results are the raw state, which a following ``Compute`` projects. ``scan_axis`` is
    one of ``axes``. Source: Blelloch 1990, "Prefix sums and their applications" (inclusive scans).
    """

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    axes: tuple[sympy.Symbol, ...]
    scan_axis: sympy.Symbol
    monoid: Monoid
    values: tuple[Expr, ...]
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Scatter:
    """``name[axes] = initial``, then for each point of ``source_axes`` over ``source_shape``, in their order:
    ``name[positions] = combine(name[positions], value)``, or just ``value`` without a monoid.

    ``values`` are the initial value, over ``axes``, and over ``source_axes`` the value and then a position for each
    dimension of the result, as integer values: data decide them, or they are an ``IndexValue``. The monoid has one
    component. A position out of range is an error of the program that runs it, and changes no element.
    """

    name: str
    type: TensorType
    axes: tuple[sympy.Symbol, ...]
    source_axes: tuple[sympy.Symbol, ...]
    source_shape: tuple[sympy.Expr, ...]
    monoid: Monoid | None
    values: tuple[Expr, ...]
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def types(self) -> tuple[TensorType, ...]:
        return (self.type,)

    @property
    def initial(self) -> Expr:
        return self.values[0]

    @property
    def value(self) -> Expr:
        return self.values[1]

    @property
    def positions(self) -> tuple[Index, ...]:
        """Where a point goes, an index for each dimension of the result: an expression where data have no say."""
        return tuple(p.index if isinstance(p, IndexValue) else p for p in self.values[2:])


@dataclass(frozen=True, slots=True)
class View:
    """``name[axes] = source[indices]``, without a copy: the same memory at ``type.strides`` from ``offset`` elements
    in."""

    name: str
    type: TensorType
    source: str
    axes: tuple[sympy.Symbol, ...]
    indices: tuple[Index, ...]
    offset: sympy.Expr = sympy.S.Zero
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def types(self) -> tuple[TensorType, ...]:
        return (self.type,)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument of a library call."""

    name: str


@dataclass(frozen=True, slots=True)
class ConstantRef:
    """A library argument that is ``Graph.constants[name]``: a sub-graph, a tensor of the module, a generator."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """An object of the model that library calls name.

    ``kind`` is the type of a tensor, and of anything else the name of its Python type. ``value`` is None where a text
    told of the object and could not hold it; ``digest`` then says what is in a tensor, "" where that is left open.
    Constants of one kind with the same elements are equal, and of objects that are no tensors those of one type.
    """

    kind: TensorType | str
    value: Any = field(default=None, repr=False)
    digest: str = ""

    @staticmethod
    def of(value: Any, kind: TensorType | None = None) -> Constant:
        """That of an object, which is a tensor where a ``kind`` is given."""
        return Constant(type(value).__name__ if kind is None else kind, value)

    @property
    def contents(self) -> str:
        """The digest of a tensor's elements (``digest_of``); "" where nobody can tell."""
        held = self.value is not None and isinstance(self.kind, TensorType)
        return digest_of(self.value) if held else self.digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and (
            self is other or (self.kind == other.kind and self.contents == other.contents)
        )

    def __hash__(self) -> int:
        return hash(self.kind)


@dataclass(frozen=True, slots=True)
class ArgumentRef:
    """A library argument that the caller of the graph gives and that is no tensor and no size: a group of processes."""

    name: str


@dataclass(frozen=True, slots=True)
class OpRef:
    """A library argument that is an op itself, by its full name."""

    name: str


@dataclass(frozen=True, slots=True)
class Library:
    """A call of an ATen op, by its full name ("aten::addmm.default"); ``args`` hold Refs, numbers, sizes and torch
    constants.

    ``types[k]`` is None for a result that is no tensor. ``reason`` says why it is a library call, for the report. Who
    reads results that are ``rounded`` sees them in their types, also where loops take the call's place.
    Of a ``refused`` call torch raises, for the type of its elements: it runs though nobody reads what it gives.
    """

    names: tuple[str, ...]
    types: tuple[TensorType | None, ...]
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    reason: str = field(default="", compare=False)
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    rounded: bool = False
    refused: bool = False
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class CallTensor:
    """A call of a fused function of the module, destination passing: ``args`` are its inputs, ``names`` the results.

    ``sizes[k]`` is the value, at this call, of the k-th size symbol of the function. Where ``into[k]`` names a tensor,
    the k-th result is written into its memory; where that tensor is also an argument, the function reads each element
    of it before it writes it. A function over a table does the work of ``count`` calls at once: names, types, args,
    sizes and ``into`` are then those of the calls one after the other.
    """

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    function: str
    args: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...] = ()
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    into: tuple[str | None, ...] = ()
    count: int = 1
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    @property
    def fresh(self) -> tuple[bool, ...]:
        """Of each result, whether it needs memory of its own."""
        return tuple(t is None for t in self.into) if self.into else (True,) * len(self.names)

    def calls(self) -> tuple[CallTensor, ...]:
        """The calls that a call over a table stands for, one function each; itself otherwise."""
        if self.count == 1:
            return (self,)
        parts = [_parts(x, self.count) for x in (self.names, self.types, self.args, self.sizes, self.into)]
        return tuple(
            CallTensor(n, t, self.function, a, s, self.origins, i) for n, t, a, s, i in zip(*parts, strict=True)
        )


def _parts(items: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    size = len(items) // count
    return [items[k * size : (k + 1) * size] for k in range(count)]


@dataclass(frozen=True, slots=True)
class CallRegion:
    """``times`` calls of a region, one after the other, each of which is handed what the one before it made.

    The region is a graph with the sizes and constants of the graph around it. Its inputs are what is ``carried`` (here
    by its values before the first call), what each call has for itself (``taken``: one row of ``times`` values for each
    such input) and what is the same for all (``shared``). Its outputs are what is carried on, in the order of these
    inputs, and then what is kept of each call. ``names`` are what is carried after the last call, and then for each
    output that is kept a row of ``times`` values.
    """

    names: tuple[str, ...]
    region: Graph
    times: int
    carried: tuple[str, ...] = ()
    taken: tuple[tuple[str, ...], ...] = ()
    shared: tuple[str, ...] = ()
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    _uses: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    @property
    def types(self) -> tuple[TensorType | None, ...]:
        known = self.region.types()
        found = tuple(known.get(o) if isinstance(o, str) else None for o in self.region.outputs)
        return (*found[: len(self.carried)], *(t for t in found[len(self.carried) :] for _ in range(self.times)))

    @property
    def kept(self) -> tuple[tuple[str, ...], ...]:
        """The values of each output of the region that is kept, call by call."""
        rest = self.names[len(self.carried) :]
        return tuple(rest[k : k + self.times] for k in range(0, len(rest), self.times))

    def given(self, call: int) -> tuple[str, ...]:
        """What one of the calls is given, but for what is carried."""
        return (*(row[call] for row in self.taken), *self.shared)


# The target of library nodes that make a size, which no kernel could, out of others: ``args`` is the expression.
MADE_SIZE = "mlc::size"
# The target of library nodes that give a tensor of the module: ``args`` is its name among the graph's constants.
CONSTANT = "mlc::constant"

Node: TypeAlias = Compute | Reduction | Scan | Scatter | View | Library | CallTensor | CallRegion
GraphInput: TypeAlias = Input | SizeInput
# A name, a size, or nothing.
GraphOutput: TypeAlias = str | sympy.Expr | None


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs in call order, nodes in topological order, outputs in return order.

    ``constants`` holds what library calls name beside tensors of the graph: sub-graphs of higher-order ops, tensors of
    the module. ``known`` are facts that have been asked for (``ir.graph.facts``).
    """

    name: str
    inputs: tuple[GraphInput, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[GraphOutput, ...]
    symbols: SymbolTable = SymbolTable()
    constants: Mapping[str, Constant] = field(default_factory=dict, hash=False)
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _types: dict[str, TensorType] = field(default_factory=dict, init=False, repr=False, compare=False)

    def types(self) -> dict[str, TensorType]:
        """The type of every tensor of the graph."""
        if self._types:  # every pass asks
            return self._types.copy()
        table: dict[str, TensorType] = {i.name: i.type for i in self.inputs if isinstance(i, Input)}
        for n in self.nodes:
            for name, kind in zip(n.names, n.types, strict=True):
                if kind is not None:
                    table[name] = kind
        self._types.update(table)
        return table


@dataclass(frozen=True, slots=True)
class IRModule:
    """Graphs, the tensor functions that they call, and nests where those are lowered; ``main`` names the graph that is
    the entry."""

    functions: Mapping[str, Graph | TensorFunction | LoopNest]
    main: str = "main"

    @property
    def graph(self) -> Graph:
        entry = self.functions[self.main]
        assert isinstance(entry, Graph)
        return entry


def every_node(graph: Graph, times: int = 1) -> Iterator[tuple[Node, int]]:
    """The nodes of a graph, behind each call of a region those of the region, once, and how often each runs."""
    for node in graph.nodes:
        yield node, times
        if isinstance(node, CallRegion):
            yield from every_node(node.region, times * node.times)


def node_values(node: Compute | Reduction | Scan | Scatter) -> tuple[Expr, ...]:
    """The value expressions that define a node."""
    return (node.value,) if isinstance(node, Compute) else node.values


def refs(arg: Any) -> Iterator[str]:
    """The tensors that a library argument names, inside lists too."""
    match arg:
        case Ref(name):
            yield name
        case tuple() | list():
            for a in arg:
                yield from refs(a)
        case dict():
            yield from refs(tuple(arg.values()))


def uses(node: Node) -> tuple[str, ...]:
    """The tensors that a node reads, each once, in order."""
    if not node._uses:  # passes ask again and again, and expressions are long
        object.__setattr__(node, "_uses", tuple(dict.fromkeys(_read(node))))
    return node._uses


def _read(node: Node) -> Iterable[str]:
    match node:
        case Compute() | Reduction() | Scan() | Scatter():
            return (ld.buffer for v in node_values(node) for ld in loads(v))
        case View():
            names = [node.source]
            for i in node.indices:
                if is_value(i):
                    names += [ld.buffer for ld in loads(i)]  # type: ignore[arg-type]
        case Library():
            names = [*refs(node.args), *refs(tuple(v for _, v in node.kwargs))]
        case CallTensor():
            names = [*node.args, *(t for t in node.into if t is not None)]
        case CallRegion():
            names = [*node.carried, *(name for row in node.taken for name in row), *node.shared]
    return names


def size_makers(graph: Graph) -> dict[sympy.Symbol, str]:
    """Sizes that nodes decide, and the first result that tells each: who mentions the size depends on that result.

    A library result of no tensor type that is named like a size is that size; otherwise a result's extent tells it.
    """
    given: set[sympy.Symbol] = set()
    for i in graph.inputs if graph.symbols.sizes else ():
        given.update(_mentioned(i.type.shape + i.type.strides if isinstance(i, Input) else (i.value,)))
    made = {n.names[0] for n in graph.nodes if isinstance(n, Library) and n.target == MADE_SIZE}
    unknown = {s.name: s for s in graph.symbols.symbols if s not in given or s.name in made}
    makers: dict[sympy.Symbol, str] = {}
    for node in graph.nodes if unknown else ():
        if isinstance(node, Library):
            for name, kind in zip(node.names, node.types, strict=True):
                told = [unknown.get(name)] if kind is None else [e for e in kind.shape if e in unknown.values()]
                for s in told:
                    if s is not None:
                        makers.setdefault(s, name)
    return makers


def sizes_read(node: Node) -> set[sympy.Symbol]:
    """Every size symbol, and axis, that a node mentions."""
    found = _mentioned([(t.shape, t.strides) for t in node.types if t is not None])
    match node:
        case Compute() | Reduction() | Scan() | Scatter():
            found |= {s for v in node_values(node) for s in free_symbols(v)}
            found |= _mentioned(node.reduce_shape) if isinstance(node, Reduction) else set()
            found |= _mentioned(node.source_shape) if isinstance(node, Scatter) else set()
        case View():
            found |= _mentioned((node.offset, *(i for i in node.indices if not is_value(i))))
            found |= {s for i in node.indices if is_value(i) for s in free_symbols(i)}
        case Library():
            found |= _mentioned((node.args, [v for _, v in node.kwargs]))
        case CallTensor():
            found |= _mentioned(node.sizes)
        case CallRegion():
            found = found.union(*map(sizes_read, node.region.nodes))
    return found


def _mentioned(value: Any) -> set[sympy.Symbol]:
    if isinstance(value, sympy.Basic):
        return set() if value.is_Integer else set(value.free_symbols)
    return {s for v in value for s in _mentioned(v)} if isinstance(value, (tuple, list)) else set()


__all__ = [
    "CONSTANT", "MADE_SIZE", "ArgumentRef", "CallRegion", "CallTensor", "Compute", "Constant", "ConstantRef", "Graph",
    "GraphInput", "GraphOutput", "IRModule", "Input", "Library", "Node", "OpRef", "Origin", "Reduction", "Ref", "Scan",
    "SizeInput", "TensorType", "View", "every_node", "node_values", "refs", "size_makers", "sizes_read", "uses",
]  # fmt: skip
