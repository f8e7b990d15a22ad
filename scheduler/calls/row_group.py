"""Calls that share their rows as one tensor function: rows are its only common dimension, all others are its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import sympy

from ...ir.expr.monoid import SUM
from ...ir.expr.role import Role
from ...ir.expr.value import Expr, Index, Load, call, cast, is_value, rewrite, symbol
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.graph.facts import names_in
from ...ir.graph.graph import CallTensor, Graph, Library, TensorType, View, uses
from ...ir.nest.loops import Buffer
from ..facts.row_products import RowProduct, row_product
from ..functions.rows_as_one import rows_as_one
from ..fusion.outlined import Parameters, function_name
from ..passes.canonical.names import fresh_name

ROW = symbol("i0")


class Unfit(Exception):
    """These calls are no group: some row needs another one."""


@dataclass(frozen=True, slots=True)
class _RowResult:
    """A result of the group: the stage result that it is, by the columns of its tensor."""

    result: str
    axes: tuple[sympy.Symbol, ...]
    columns: tuple[sympy.Symbol, ...]


@dataclass(slots=True)
class RowGroupWriter:
    """Writes the function of calls at ``positions``. ``base`` sees through views; ``kept`` are results that leave the
    group."""

    graph: Graph
    types: Mapping[str, TensorType]
    functions: Mapping[str, TensorFunction]
    positions: tuple[int, ...]
    base: Callable[[str], str]
    kept: Collection[str]
    products: dict[str, RowProduct] = field(default_factory=dict)
    made: dict[str, _RowResult] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    extents: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    axes: dict[str, tuple[sympy.Symbol, ...]] = field(default_factory=dict)
    rows: set[sympy.Expr] = field(default_factory=set)
    reads: dict[str, int] = field(default_factory=dict)
    # Tensors by shapes in which rows are one dimension: views of what is read, and what results are views of.
    before: dict[tuple[str, tuple[sympy.Expr, ...]], View] = field(default_factory=dict)
    behind: list[View] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    all_types: dict[str, TensorType] = field(default_factory=dict)
    parameters: Parameters = field(init=False)

    def __post_init__(self) -> None:
        self.all_types, self.taken = dict(self.types), set(names_in(self.graph))
        self.parameters = Parameters(self.graph, self.all_types)

    def collect(self) -> None:
        """Look at all calls. Raises Unfit."""
        nodes = [self.graph.nodes[k] for k in self.positions]
        self.reads = {n: 0 for node in nodes for n in node.names}
        self.rows = {p.rows for node in nodes if isinstance(node, Library) and (p := row_product(self.graph, node))}
        for k in self.positions:
            node = self.graph.nodes[k]
            for name in {self.base(u) for u in uses(node)} & self.reads.keys():
                self.reads[name] += 1
            if isinstance(node, Library):
                product = row_product(self.graph, node)
                assert product is not None
                self.products[node.names[0]] = product
                self._add_product(node, product)
            elif isinstance(node, CallTensor):
                self._add_function(node)

    def between(self) -> dict[str, tuple[int, bool]]:
        """Of results that the group reads itself: how often, and whether others need them."""
        return {n: (count, n in self.kept) for n, count in self.reads.items() if count}

    def write(self) -> tuple[CallTensor, TensorFunction]:
        """The function, and the call that takes the place of all."""
        nodes = [self.graph.nodes[k] for k in self.positions]
        origins = tuple(dict.fromkeys(o for n in nodes for o in getattr(n, "origins", ())))
        sizes, table = self.parameters.sizes()
        rows = self.parameters.canonical(next(iter(self.products.values())).rows)
        extra = tuple(Dim(v, e) for v, e in self.extents.items())
        inputs = self.parameters.inputs
        name = function_name("blocks", origins, words=4)
        function = TensorFunction(
            name, (Dim(ROW, rows),), (), tuple(inputs.values()), tuple(self.outputs), tuple(self.stages), table, extra
        )
        types = tuple(self.all_types[n] for n in self.names)
        return CallTensor(tuple(self.names), types, function.name, tuple(inputs), sizes, origins), function

    # --- members ------------------------------------------------------------------------------------------------------

    def _dim(self, extent: sympy.Expr) -> sympy.Symbol:
        var = symbol(f"x{len(self.extents)}")
        self.extents[var] = extent
        return var

    def _result(self) -> str:
        return f"t{sum(len(s.results) for s in self.stages)}"

    def _add_product(self, node: Library, product: RowProduct) -> None:
        if any(self.base(n) in self.reads for n in (product.right, product.added) if n is not None):
            raise Unfit
        canonical = self.parameters.canonical
        column, over = self._dim(canonical(product.columns)), self._dim(canonical(product.depth))
        left = self._element(product.left, (ROW, over))
        right = Load(self.parameters.input(product.right), (over, column), product.type.dtype)
        total, axes = self._result(), (ROW, column)
        self.stages.append(
            Stage(
                (total,), (call("mul", left, right),), True, SUM, node.origins, axes, (over,), role=Role.LIBRARY_PRODUCT
            )
        )
        if product.added is not None:
            kind = self.types[product.added]
            shape = zip(reversed(axes), reversed(kind.shape), strict=False)
            indices = tuple(reversed([sympy.S.Zero if e == 1 else a for a, e in shape]))
            added = Load(self.parameters.input(product.added), indices, kind.dtype)
            value = call("add", Load(total, axes, product.type.dtype), cast(added, product.type.dtype))
            total = self._result()
            self.stages.append(Stage((total,), (value,), True, None, node.origins, axes))
        name = node.names[0]
        self.made[name] = _RowResult(total, axes, (column,))
        if name in self.kept:
            out = self.parameters.buffer(f"out{len(self.outputs)}", self.types[name])
            self.outputs.append(Output(out, total, axes))
            self.names.append(name)

    def _element(self, name: str, indices: tuple[Index, ...]) -> Load:
        """An element of a matrix, in the group or outside of it."""
        kind = self.types[name]
        if self.base(name) not in self.reads:
            return Load(self.parameters.input(name), indices, kind.dtype)
        made = self.made.get(self.base(name))
        if made is None or len(made.columns) != len(indices) - 1 or indices[0] != ROW:
            raise Unfit
        at = dict(zip(made.columns, indices[1:], strict=True))
        return Load(made.result, tuple(ROW if a == ROW else at[a] for a in made.axes), kind.dtype)

    # --- functions ----------------------------------------------------------------------------------------------------

    def _add_function(self, node: CallTensor) -> None:
        function = self._by_rows(node)
        inputs = {b.name: (arg, b) for b, arg in zip(function.inputs, node.args, strict=True)}
        dims = self._dims(function, inputs)
        names: dict[str, str] = {}
        for stage in function.stages:
            for r in stage.results:
                names[r] = f"t{sum(len(s.results) for s in self.stages) + len(names)}"

        def index(i: sympy.Expr) -> sympy.Expr:
            return self.parameters.canonical(i.xreplace(dims)) if i.free_symbols else i

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load):
                return None
            if e.buffer in names:
                return Load(names[e.buffer], e.indices, e.dtype)
            arg, buffer = inputs[e.buffer]
            if self.base(arg) in self.reads:
                return cast(self._element(arg, e.indices), e.dtype)
            return Load(self._input(arg, buffer), e.indices, e.dtype)

        kinds = {r: v.dtype for s in function.stages for r, v in zip(s.results, s.values, strict=True)}
        for stage in function.stages:
            axes = tuple(dims[d.var] for d in function.axes_of(stage))
            over = tuple(dims[d.var] for d in function.over_of(stage))
            self.stages.append(
                replace(
                    stage, results=tuple(names[r] for r in stage.results), inner=True, axes=axes,
                    values=tuple(rewrite(v, leaf, index) for v in stage.values),
                    over=over if stage.monoid is not None else None,
                )
            )  # fmt: skip
            self.axes.update((names[r], axes) for r in stage.results)
        for name, output in zip(node.names, function.outputs, strict=True):
            indices, result = tuple(map(index, output.indices)), names[output.result]
            axes = self.axes[result]
            if indices and indices[0] == ROW and set(indices) == set(axes) and len(indices) == len(axes):
                if kinds[output.result] is output.buffer.dtype:
                    self.made[name] = _RowResult(result, axes, indices[1:])
            if name in self.kept:
                self._leaves(name, output.buffer, result, indices)

    def _by_rows(self, node: CallTensor) -> TensorFunction:
        """The function of a call in sizes of the graph, with the group's rows as its first dimension. Raises Unfit."""
        function = self.functions[node.function]
        overwrites = any(o.buffer in function.inputs for o in function.outputs)
        if function.table or function.extra or function.scatters or overwrites:
            raise Unfit
        found = rows_as_one(_in_sizes(function, node.sizes), next(iter(self.rows)))
        if found is None:
            raise Unfit
        function = found
        row = function.rows[0]
        for stage in function.stages:
            attends = stage.role is not None and stage.role.is_of_attention
            if stage.scan or attends or row not in function.axes_of(stage) or row in function.over_of(stage):
                raise Unfit
        return function

    def _dims(
        self, function: TensorFunction, inputs: Mapping[str, tuple[str, Buffer]]
    ) -> dict[sympy.Symbol, sympy.Symbol]:
        """What the dimensions of a function are called here: columns of what the group has made by the same name."""
        row, *others = function.dims
        dims, extents = {row.var: ROW}, {d.var: self.parameters.canonical(d.extent) for d in others}
        for load in function.loads:
            made = self.made.get(self.base(inputs[load.buffer][0])) if load.buffer in inputs else None
            if made is None or len(made.columns) != len(load.indices) - 1:
                continue
            for column, i in zip(made.columns, load.indices[1:], strict=True):
                if not is_value(i) and i in extents and i not in dims and column not in dims.values():
                    if self.extents[column] == extents[i]:
                        dims[i] = column
        for d in others:
            if d.var not in dims:
                dims[d.var] = self._dim(extents[d.var])
        return dims

    def _input(self, arg: str, buffer: Buffer) -> str:
        """The parameter for a tensor of the graph, with the shape in which a function reads it."""
        kind = self.types[arg]
        if buffer.shape == kind.shape:
            return self.parameters.input(arg)
        key = (arg, buffer.shape)
        if key not in self.before:
            name = fresh_name(f"{arg}_rows", self.taken)
            self.all_types[name] = replace(kind, shape=buffer.shape, strides=buffer.strides)
            self.before[key] = View(name, self.all_types[name], arg, (), ())
        return self.parameters.input(self.before[key].name)

    def _leaves(self, name: str, buffer: Buffer, result: str, indices: tuple[sympy.Expr, ...]) -> None:
        kind = self.types[name]
        if buffer.shape != kind.shape:
            whole = fresh_name(f"{name}_rows", self.taken)
            self.all_types[whole] = replace(kind, shape=buffer.shape, strides=buffer.strides)
            self.behind.append(View(name, kind, whole, (), ()))
            name = whole
        out = self.parameters.buffer(f"out{len(self.outputs)}", self.all_types[name])
        self.outputs.append(Output(out, result, indices))
        self.names.append(name)


def _in_sizes(function: TensorFunction, sizes: tuple[sympy.Expr, ...]) -> TensorFunction:
    """A function with the sizes of a call in the place of its own."""
    env = dict(zip(function.symbols.symbols, sizes, strict=True))
    if not env:
        return function

    def index(e: sympy.Expr) -> sympy.Expr:
        return e.xreplace(env)

    def dims(given: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(Dim(d.var, index(d.extent)) for d in given)

    def buffer(b: Buffer) -> Buffer:
        return replace(b, shape=tuple(map(index, b.shape)), strides=tuple(map(index, b.strides)))

    return replace(
        function, rows=dims(function.rows), inner=dims(function.inner), inputs=tuple(map(buffer, function.inputs)),
        outputs=tuple(
            replace(o, buffer=buffer(o.buffer), indices=tuple(map(index, o.indices))) for o in function.outputs
        ),
        stages=tuple(
            replace(s, values=tuple(rewrite(v, lambda _: None, index) for v in s.values)) for s in function.stages
        ),
    )  # fmt: skip


__all__ = ["RowGroupWriter", "Unfit"]
