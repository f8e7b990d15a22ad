"""What a converter sees of the graph being imported: operands, the types of the results, and builders for nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from ...ir.errors import IRError
from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import Monoid
from ...ir.expr.value import Const, Expr, Index, Load, call, const, is_value, symbol
from ...ir.graph.graph import Compute, Graph, Library, Node, Origin, Reduction, Ref, TensorType, View
from ...ir.nest.loops import contiguous_strides
from ...ir.target import TargetOf, has_kernels, usual_target
from ...scheduler.decisions import Decider
from ...scheduler.numerics import EAGER, ROUNDING, Numerics
from .registry import NoConversion
from .sizes import SizeMap, size_value
from .terms import axes, convert

Scalar: TypeAlias = bool | int | float | sympy.Expr


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor operand: the name that loads use, and its type."""

    name: str
    type: TensorType

    @property
    def shape(self) -> tuple[sympy.Expr, ...]:
        return self.type.shape

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def device(self) -> str:
        return self.type.device


@dataclass(frozen=True, slots=True)
class ReductionSpace:
    """The iteration space of a reduction over dims of a shape.

    ``indices`` has one index per dim of the shape: ``i0…`` for the kept dims in order, ``r0…`` for the reduced ones,
    zero for reduced dims of extent one.
    """

    indices: tuple[sympy.Expr, ...]
    kept: tuple[sympy.Expr, ...]
    axes: tuple[sympy.Symbol, ...]
    reduce_shape: tuple[sympy.Expr, ...]

    @property
    def kept_axes(self) -> tuple[sympy.Symbol, ...]:
        return axes(len(self.kept))

    @property
    def count(self) -> sympy.Expr:
        """Elements that are combined into one."""
        return sympy.Mul(*self.reduce_shape)


# What a node of FX notes where its readers must see the half type that it is rounded to, and not what it is made of.
KEEPS_ROUNDING = "mlc_keeps_rounding"
# What it keeps of eager's numerics where others do not.
KEEPS = "mlc_keeps"


class ImportContext:
    """State of one import. ``node`` and ``val`` are those of the call being converted."""

    def __init__(
        self,
        names: set[str],
        sizes: SizeMap,
        *,
        fallback_random: bool,
        numerics: Numerics,
        libraries: bool = True,
        bodies: Callable[[fx.Node], Graph] | None = None,
        decider: Decider | None = None,
        target_of: TargetOf = usual_target,
    ) -> None:
        self.nodes: list[Node] = []
        self.sizes = sizes
        self.fallback_random = fallback_random
        self.given_numerics = numerics
        self._libraries = libraries
        self.decider = decider
        self.target_of = target_of
        self.node: fx.Node
        self.val: Any = None
        # What the result is called: the node's own name, except for parts of a node.
        self.result = ""
        self.origins: tuple[Origin, ...] = ()
        # Streams of random numbers and copies between devices, once for each.
        self.seeds: dict[str, list[str]] = {}
        self.copies: dict[tuple[str, str], Tensor] = {}
        # The node that each name was made for which is no node's own.
        self.called_after: dict[str, str] = {}
        self._names = names
        self._bodies = bodies
        self._given: Expr | None = None
        self._drawn: list[Expr] = []

    def enter(self, node: fx.Node, origins: tuple[Origin, ...]) -> None:
        """Make ``node`` the one being converted."""
        self.node, self.val, self.origins = node, node.meta.get("val"), origins
        self.result = node.name

    @property
    def numerics(self) -> Numerics:
        """Those of the graph, or eager's, where the current node keeps its rounding."""
        return EAGER if ROUNDING in self.node.meta.get(KEEPS, ()) else self.given_numerics

    def calls_libraries(self, device: str) -> bool:
        """Whether a library may compute on a device what kernels could: elsewhere than on CPUs and GPUs always."""
        return self._libraries or not has_kernels(device)

    @contextmanager
    def result_of(self, k: int) -> Iterator[None]:
        """While inside, the ``k``-th result of the current node is the one being made, as if by a node of its own."""
        val, result = self.val, self.result
        self.val, self.result = val[k], self.unique(f"{result}_{k}")
        try:
            yield
        finally:
            self.val, self.result = val, result

    def least(self, size: sympy.Expr) -> int:
        """What a size is at least, as far as its symbols tell."""
        try:
            return self.sizes.table().bounds(size)[0]
        except IRError:
            return 0

    # --- types and names --------------------------------------------------------------------------------------------

    def own_places(self) -> None:
        """Raises NoConversion where elements of the result share memory, as those of a copy with an overlapping
        tensor's strides do: a kernel that computes each by itself would let any of them win."""
        kind, reach = self.type(), 0
        dims = [(self.sizes.hint(s), self.sizes.hint(n)) for s, n in zip(kind.strides, kind.shape, strict=True)]
        for stride, extent in sorted(d for d in dims if d[1] > 1):
            if stride <= reach:
                raise NoConversion("elements of the result that share memory")
            reach += stride * (extent - 1)

    def fresh(self, suffix: str) -> str:
        """A name, not yet used, that begins with the name of the current node."""
        return self.unique(f"{self.result}_{suffix}")

    def unique(self, name: str) -> str:
        base, k = name, 0
        while name in self._names:
            k += 1
            name = f"{base}_{k}"
        self._names.add(name)
        self.called_after[name] = self.node.name
        return name

    def type(self, k: int | None = None) -> TensorType:
        """The type of the current node's result (its ``k``-th where it has several)."""
        return self.sizes.tensor_type(self.val if k is None else self.val[k])

    def name(self, k: int | None = None) -> str:
        return self.result if k is None else self.fresh(str(k))

    def used(self) -> set[int]:
        """Which results of a node with several are read."""
        read = [u for u in self.node.users if u.target.__name__ == "getitem" and u.users]  # type: ignore[union-attr]
        return {u.args[1] for u in read}  # type: ignore[misc]

    def contiguous(self, shape: Sequence[sympy.Expr], dtype: DType, device: str) -> TensorType:
        """A row-major type, for values in between."""
        return TensorType(tuple(shape), contiguous_strides(tuple(shape)), dtype, device)

    # --- values -----------------------------------------------------------------------------------------------------

    def load(self, x: Tensor, indices: Sequence[Index], dtype: DType | None = None) -> Expr:
        """``x`` at ``indices``, which are those of the result: broadcast by the trailing dims, dims of extent one at
        zero.

        In the type in which it is computed (float32 for halves), or in ``dtype``.
        """
        skip = len(indices) - x.rank
        at = tuple(
            sympy.S.Zero if extent is sympy.S.One and not is_value(i) else i
            for i, extent in zip(indices[skip:], x.shape)
        )
        return self.at(x, at, dtype)

    def at(self, x: Tensor, indices: Sequence[Index], dtype: DType | None = None) -> Expr:
        """``x`` at exactly these indices."""
        value = Load(x.name, tuple(indices), x.dtype)
        return convert(value, x.dtype.compute if dtype is None else dtype)

    def value(self, x: Tensor | Scalar, indices: Sequence[Index], dtype: DType) -> Expr:
        """An operand that may be a Python number or a size, in ``dtype``."""
        if isinstance(x, Tensor):
            return self.load(x, indices, dtype)
        return self.scalar(x, dtype)

    def scalar(self, x: Scalar, dtype: DType) -> Expr:
        """A number or size as a literal of ``dtype``."""
        if isinstance(x, sympy.Basic):
            return convert(size_value(x), dtype)
        if dtype.is_complex or isinstance(x, complex):
            raise NoConversion("complex numbers")
        return (
            Const(float(x), dtype) if dtype.is_float and not dtype.is_half else convert(const(x, dtype.compute), dtype)
        )

    # --- nodes ------------------------------------------------------------------------------------------------------

    def compute(self, value: Expr, type: TensorType | None = None, name: str | None = None) -> Tensor:
        """A ``Compute`` of ``value``, cast to the type; the result of the current node if no type is given."""
        if type is None:
            type = self.type()
        if name is None:
            name = self.result
        if sympy.S.Zero in type.shape:  # what no element has need not be worked out, or scheduled
            value = const(0, type.dtype.compute)
        value = convert(value, type.dtype)
        if type.dtype.is_half and self.node.meta.get(KEEPS_ROUNDING):
            value = call("bitcast", value, dtype=type.dtype)
        self.nodes.append(Compute(name, type, axes(len(type.shape)), value, self.origins))
        return Tensor(name, type)

    def temporary(self, value: Expr, like: TensorType, suffix: str, dtype: DType | None = None) -> Tensor:
        """A ``Compute`` of the shape of ``like`` that no user of the node sees."""
        kind = like if dtype in (None, like.dtype) else TensorType(like.shape, like.strides, dtype, like.device)
        return self.compute(value, kind, self.fresh(suffix))

    def pointwise(
        self, fn: Callable[..., Expr], *operands: Tensor | Scalar, dtype: DType | None = None, k: int | None = None
    ) -> Tensor:
        """``fn`` of the operands, each broadcast to the result and in ``dtype`` (the result's compute type if None)."""
        out = self.type(k)
        kind = out.dtype.compute if dtype is None else dtype
        at = axes(len(out.shape))
        operands = tuple(self.local(x, out.device) if isinstance(x, Tensor) else x for x in operands)
        return self.compute(fn(*(self.value(x, at, kind) for x in operands)), out, self.name(k))

    def local(self, x: Tensor, device: str) -> Tensor:
        """``x`` on ``device``: a scalar tensor on the CPU may be an operand of a kernel on the GPU."""
        if x.device == device:
            return x
        known = self.copies.get((x.name, device))
        if known is not None:
            return known
        kind = TensorType(x.type.shape, x.type.strides, x.dtype, device)
        name = self.fresh("on_device")
        self.nodes.append(
            Library(
                (name,),
                (kind,),
                "aten::_to_copy.default",
                (Ref(x.name),),
                (("device", torch.device(device)),),
                "copy between devices",
                self.origins,
            )
        )
        self.copies[x.name, device] = Tensor(name, kind)
        return self.copies[x.name, device]

    def undo(self, mark: int) -> None:
        """Drop the nodes after the first ``mark``: a converter declined half-way."""
        dropped = {name for n in self.nodes[mark:] for name in n.names}
        del self.nodes[mark:]
        if dropped:
            self.copies = {key: t for key, t in self.copies.items() if t.name not in dropped}
        for streams in self.seeds.values():
            while streams and streams[-1] == self.node.name:
                streams.pop()

    def view(
        self,
        x: Tensor,
        indices: Sequence[Index],
        type: TensorType | None = None,
        name: str | None = None,
        offset: sympy.Expr = sympy.S.Zero,
    ) -> Tensor:
        """A ``View``: ``result[i0, …] = x[indices]``."""
        kind = self.type() if type is None else type
        name = self.result if name is None else name
        self.nodes.append(View(name, kind, x.name, axes(len(kind.shape)), tuple(indices), offset, self.origins))
        return Tensor(name, kind)

    def domain(self, shape: Sequence[sympy.Expr], dims: Sequence[int]) -> ReductionSpace:
        """The space of a reduction of ``shape`` over ``dims`` (non-negative)."""
        reduced = set(dims)
        kept: list[sympy.Expr] = []
        names: list[sympy.Symbol] = []
        extents: list[sympy.Expr] = []
        indices: list[sympy.Expr] = []
        for d, extent in enumerate(shape):
            if d not in reduced:
                indices.append(symbol(f"i{len(kept)}"))
                kept.append(extent)
            elif extent is sympy.S.One:
                indices.append(sympy.S.Zero)
            else:
                indices.append(symbol(f"r{len(names)}"))
                names.append(symbol(f"r{len(names)}"))
                extents.append(extent)
        return ReductionSpace(tuple(indices), tuple(kept), tuple(names), tuple(extents))

    def reduce(
        self,
        monoid: Monoid,
        domain: ReductionSpace,
        values: Sequence[Expr],
        device: str,
        suffix: str = "",
        types: Sequence[TensorType] | None = None,
        names: Sequence[str] | None = None,
    ) -> tuple[Tensor, ...]:
        """A ``Reduction`` over ``domain``; results have the kept shape and the values' types."""
        if types is None:
            types = [self.contiguous(domain.kept, v.dtype, device) for v in values]
        if names is None:
            names = [self.fresh(suffix or c.name) for c in monoid.components]
        if domain.axes and sympy.S.Zero not in domain.kept:
            self.nodes.append(
                Reduction(
                    tuple(names),
                    tuple(types),
                    domain.kept_axes,
                    domain.axes,
                    domain.reduce_shape,
                    monoid,
                    tuple(values),
                    self.origins,
                )
            )
            return tuple(Tensor(n, t) for n, t in zip(names, types))
        # Nothing is combined, the lifted state is the result; or there is none.
        return tuple(self.compute(v, t, n) for v, t, n in zip(values, types, names))

    def finish(
        self, value: Tensor | Expr, dims: Sequence[int], device: str, *, keepdim: bool, k: int | None = None
    ) -> Tensor:
        """The current node's result out of a value over the kept dims: cast, and ones put back for ``keepdim``."""
        out = self.type(k)
        kept_dims = [d for d in range(len(out.shape)) if d not in dims] if keepdim else list(range(len(out.shape)))
        squeezed = TensorType(
            tuple(out.shape[d] for d in kept_dims), tuple(out.strides[d] for d in kept_dims), out.dtype, out.device
        )
        add_ones = keepdim and bool(dims)
        if not (isinstance(value, Tensor) and (value.type == squeezed or (value.dtype is out.dtype and add_ones))):
            if isinstance(value, Tensor):
                value = self.at(value, axes(value.rank))
            name = self.fresh("value") if add_ones else self.name(k)
            value = self.compute(value, squeezed, name)
        if not add_ones:
            return value
        return self.view(value, [axes(len(out.shape))[d] for d in kept_dims], out, self.name(k))

    def body(self) -> Graph:
        """The graph of the function that is the first argument of the current node."""
        function = self.node.args[0]
        if self._bodies is None or not isinstance(function, fx.Node):
            raise NoConversion("a function that is no graph")
        return self._bodies(function)

    def seed(self, device: str) -> Expr:
        """The seed of a new random stream, as an int64 value."""
        if self._given is not None:
            return self._given
        streams = self.seeds.setdefault(device, [])
        streams.append(self.node.name)
        drawn = Load(self.seeds_name(device), (sympy.Integer(len(streams) - 1),), DType.INT64)
        self._drawn.append(drawn)
        return drawn

    @contextmanager
    def drawing(self, seed: Expr | None = None) -> Iterator[list[Expr]]:
        """While inside, ``seed`` is the seed of every stream, where it is given. Gives the seeds drawn inside."""
        before = self._given, self._drawn
        self._given, self._drawn = seed, []
        try:
            yield self._drawn
        finally:
            self._given, self._drawn = before

    @staticmethod
    def seeds_name(device: str) -> str:
        return f"seeds_{device.replace(':', '')}"
