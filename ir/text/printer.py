"""``show``: the IR as a script in Python syntax, one statement a line; ``parser.parse`` reads it back.

A nest::

    @nest(outputs=["out0"])
    def add_gelu(in0: float32[s0, 128], out0: float32[s0, 128]):
        s0 = size(lower=2)
        for b0_i0 in parallel(s0):
            for b0_i1 in vectorized(128):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    i1 = spatial(128, b0_i1)
                    out0[i0, i1] = add(in0[i0, i1], float32(1.0))

A graph::

    @graph
    def main(x: float32[s0, 128]):
        s0 = size(lower=2)
        y = compute(float32[s0, 128], lambda i0, i1: exp(x[i0, i1]))
        z, = reduce(sum, [float32[s0]], [128], lambda i0, r0: (y[i0, r0],))
        w = scatter(sum, float32[9], lambda i0: float32(0.0), [s0], lambda r0: (z[r0], labels[r0]))
        return (z,)

What library calls name of the model stands above the nodes of a graph: ``constant('m', int64[2], [3, 4])``, a large
tensor by its digest ``constant('m', int64[900], sha256='…')``, what is no tensor by its Python type
``constant('f', 'GraphModule')``.
A region, which a graph calls again and again: ``repeat(region, times, carried, taken, shared)``::

        @graph
        def layer(x: float32[4, 8], w: float32[8, 8]):
            y, = library("aten::mm.default", [float32[4, 8]], (x, w), "")
            return (y,)
        z, = repeat(layer, 3, [x], [[w0, w1, w2]])

A tensor function, whose outputs are parameters that it writes::

    @function
    def softmax(in0: float32[4, 128], out0: output(float32[4, 128])):
        i0 = row(4)
        r0 = inner(128)
        t0, t1 = reduce(logsumexp, rows, inner, (in0[i0, r0], float32(1.0)))
        t2 = compute(points, div(exp(sub(in0[i0, r0], t0[i0])), t1[i0]))
        t3, = scan(sum, points, (t2[i0, r0],))
        out0[i0, r0] = t2

``rows`` are the axes of results once a row and ``points`` those of results at every element of it; others are listed,
as dimensions that are ``extra`` are: ``reduce(sum, [i0, r0], [x0], …)``. ``role=`` is what a stage does for the whole.
``scatter(sum, t0, [x0], value, (place,))`` combines into a result that leaves the function.

An axis of a nest is a row of its function, unless it says otherwise: ``r0 = reduction(128, b0_r0, dim=inner)``.

Names ``_t0``, ``_t1``, … above a statement stand for parts of its expression that occur twice or nest deep; naming a
part says nothing about when it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from ..expr.monoid import Monoid
from ..expr.origin import Origin
from ..expr.symbols import SymbolTable
from ..expr.value import EXPR_TYPES, Expr
from ..function.function import Stage, TensorFunction
from ..graph.constants import elements_of
from ..graph.graph import (
    CallRegion,
    CallTensor,
    Compute,
    Constant,
    Graph,
    GraphOutput,
    Input,
    IRModule,
    Library,
    Node,
    Reduction,
    Scan,
    Scatter,
    SizeInput,
    TensorType,
    View,
)
from ..nest.hints import Annotations
from ..nest.loops import Block, DimKind, LoopNest, Scope, Store, Update
from ..nest.loops import Node as LoopNode
from .printer_expr import (
    LIBRARY_MARKS,
    MARK,
    UNMARK,
    ExprText,
    argument,
    buffer_text,
    index_text,
    listing,
    literal,
    names,
    tensor_text,
)


def show(obj: IRModule | Graph | TensorFunction | LoopNest | Expr | sympy.Expr, culprit: object = None) -> str:
    """The script of a module, graph, tensor function, nest or expression.

    ``culprit`` is a part of ``obj`` (the very object: a node, stage, loop, block, statement, expression, buffer, axis)
    to underline.
    """
    script = Script(culprit)
    match obj:
        case IRModule():
            script.module(obj)
        case Graph():
            script.graph(obj, obj.name)
        case TensorFunction():
            script.function(obj, obj.name)
        case LoopNest():
            script.nest(obj, obj.name)
        case sympy.Expr():
            script.line(index_text(obj))
        case _ if isinstance(obj, EXPR_TYPES):
            text = ExprText(None, culprit)
            last = text.text(obj)
            script.lines_of(text, last)
        case _:
            raise TypeError(
                f"show takes a module, graph, tensor function, nest or expression, not {type(obj).__name__}"
            )
    return "\n".join(script.lines) + "\n"


class Script:
    """Lines of script; the culprit is underlined where it stands first."""

    def __init__(self, culprit: object = None) -> None:
        self.lines: list[str] = []
        self.culprit = culprit
        self._depth = 0
        self._found = False

    def line(self, text: str = "", subject: object = None, note: str = "") -> None:
        """One statement; ``subject`` is the object that it prints, ``note`` a comment after it."""
        if subject is not None and subject is self.culprit:
            text = MARK + text.replace(MARK, "").replace(UNMARK, "") + UNMARK
        text = "    " * self._depth + text if text else ""
        begin, end = text.find(MARK), text.find(UNMARK)
        plain = text.replace(MARK, "").replace(UNMARK, "")
        self.lines.append(plain + (f"  # {note}" if note else ""))
        if begin >= 0 and not self._found:
            self._found = True
            # Nested marks of one culprit cannot be: it is not inside itself.
            self.lines.append(" " * begin + "^" * max(1, end - begin - 1) + " here")

    def lines_of(self, exprs: ExprText, text: str, subject: object = None, note: str = "") -> None:
        """The names that an expression needs, then its statement."""
        for let in exprs.take_lets():
            self.line(let)
        self.line(text, subject, note)

    def module(self, module: IRModule) -> None:
        self.line(f"module(main={module.main!r})")
        for key, function in module.functions.items():
            self.line()
            match function:
                case Graph():
                    self.graph(function, key)
                case TensorFunction():
                    self.function(function, key)
                case LoopNest():
                    self.nest(function, key)

    def _sizes(self, table: SymbolTable) -> None:
        for s in table.sizes:
            parts = [
                *([f"lower={s.lower}"] if s.lower else []),
                *([f"upper={s.upper}"] if s.upper is not None else []),
                *([f"divisor={s.divisor}"] if s.divisor != 1 else []),
                *([f"hint={s.hint}"] if s.hint is not None else []),
            ]
            self.line(f"{s.symbol.name} = size({', '.join(parts)})", s)

    # --- nests ------------------------------------------------------------------------------------------------------

    def nest(self, nest: LoopNest, key: str) -> None:
        extra = f", annotations={_dict(nest.annotations)}" if nest.annotations else ""
        extra += f", key={key!r}" if key != nest.name else ""
        self.line(f"@nest(outputs={list(nest.outputs)!r}{extra})")
        mark = ExprText({}, self.culprit).marked
        params = [mark(b, f"{b.name}: {buffer_text(b, Scope.GLOBAL)}") for b in nest.params]
        self.line(f"def {nest.name}({', '.join(params)}):", nest)
        self._depth += 1
        self._sizes(nest.symbols)
        for b in nest.locals:
            self.line(f"{b.name} = local({buffer_text(b, Scope.LOCAL)})", b)
        dtypes = {b.name: b.dtype for b in (*nest.params, *nest.locals)}
        self._body(nest.body, ExprText(dtypes, self.culprit))
        self._depth -= 1

    def _body(self, nodes: tuple[LoopNode, ...], exprs: ExprText) -> None:
        for node in nodes:
            if isinstance(node, Block):
                self._block(node, exprs)
                continue
            extra = f", annotations={_dict(node.annotations)}" if node.annotations else ""
            self.line(f"for {node.var.name} in {node.kind.name.lower()}({index_text(node.extent)}{extra}):", node)
            self._depth += 1
            self._body(node.body, exprs)
            self._depth -= 1
        if not nodes:
            self.line("pass")

    def _block(self, block: Block, exprs: ExprText) -> None:
        extra = f", role={block.role.value}" if block.role is not None else ""
        extra += f", annotations={_dict(block.annotations)}" if block.annotations else ""
        self.line(f"with block({block.name!r}{extra}):", block)
        self._depth += 1
        for k, axis in enumerate(block.axes):
            given = [index_text(axis.extent), *map(index_text, block.bindings[k : k + 1])]
            given += [f"dim={axis.dim.value}"] if axis.dim is not DimKind.ROW else []
            self.line(f"{axis.var.name} = {axis.kind.value}({', '.join(given)})", axis)
        for bound in block.predicate:
            self.line(f"where({index_text(bound.lhs)} < {index_text(bound.rhs)})", bound)
        for s in block.body:
            self._statement(s, exprs)
        if not block.body:
            self.line("pass")
        self._depth -= 1

    def _statement(self, s: Store | Update, exprs: ExprText) -> None:
        if isinstance(s, Store):
            self.lines_of(exprs, f"{s.buffer}[{exprs.indices(s.indices)}] = {exprs.text(s.value)}", s)
            return
        targets = [exprs.marked(t, f"{t.buffer}[{exprs.indices(t.indices)}]") for t in s.targets]
        values = [exprs.text(v) for v in s.values]
        left = targets[0] if len(targets) == 1 else f"({names(targets)})"
        values += [] if s.begins else ["begins=False"]
        self.lines_of(exprs, f"{left} = {_monoid(s.monoid, exprs)}.update({', '.join(values)})", s)

    # --- tensor functions -------------------------------------------------------------------------------------------

    def function(self, function: TensorFunction, key: str) -> None:
        options = ["table=True"] if function.table else []
        options += [f"key={key!r}"] if key != function.name else []
        self.line(f"@function({', '.join(options)})" if options else "@function")
        mark = ExprText({}, self.culprit).marked
        params = [mark(b, f"{b.name}: {buffer_text(b, Scope.GLOBAL)}") for b in function.inputs]
        params += [
            mark(b, f"{b.name}: output({buffer_text(b, Scope.GLOBAL)})")
            for b in function.params[len(function.inputs) :]
        ]
        self.line(f"def {function.name}({', '.join(params)}):", function)
        self._depth += 1
        self._sizes(function.symbols)
        for kind, dims in function.dims_by_kind.items():
            for d in dims:
                self.line(f"{d.var.name} = {kind.value}({index_text(d.extent)})", d)
        dtypes = {b.name: b.dtype for b in function.inputs}
        exprs = ExprText(dtypes, self.culprit)
        for stage in function.stages:
            self.lines_of(exprs, _stage(stage, exprs), stage, _note(stage.origins))
            dtypes.update({r: v.dtype for r, v in zip(stage.results, stage.values)})
        for o in function.outputs:
            self.line(f"{o.buffer.name}[{exprs.indices(o.indices)}] = {o.result}", o)
        if not function.outputs:
            self.line("pass")
        self._depth -= 1

    # --- graphs -----------------------------------------------------------------------------------------------------

    def graph(self, graph: Graph, key: str, around: str | None = None) -> None:
        """A graph; of a region, ``around`` is the usual device of the graph around it, which has its sizes."""
        device = _usual_device(graph) if around is None else around
        options = (
            []
            if around is not None
            else [
                *([f"device={device!r}"] if device != "cpu" else []),
                *([f"key={key!r}"] if key != graph.name else []),
            ]
        )
        self.line(f"@graph({', '.join(options)})" if options else "@graph")
        mark = ExprText({}, self.culprit).marked
        params = [mark(i, f"{i.name}: {_input(i, device)}") for i in graph.inputs]
        self.line(f"def {graph.name}({', '.join(params)}):", graph)
        self._depth += 1
        if around is None:
            self._sizes(graph.symbols)
            for name, constant in graph.constants.items():
                self.line(f"constant({', '.join([repr(name), *_constant(constant, device)])})", constant)
        dtypes = {i.name: i.type.dtype for i in graph.inputs if isinstance(i, Input)}
        exprs = ExprText(dtypes, self.culprit)
        for node in graph.nodes:
            if isinstance(node, CallRegion):
                self.graph(node.region, node.region.name, device)
            self.lines_of(exprs, self._node(node, exprs, device), node, _note(node.origins))
            dtypes.update({n: t.dtype for n, t in zip(node.names, node.types, strict=False) if t is not None})
        self.line(f"return ({names(map(_output, graph.outputs))})")
        self._depth -= 1

    def _node(self, node: Node, exprs: ExprText, device: str) -> str:
        def types(kinds: tuple[TensorType | None, ...]) -> str:
            return f"[{', '.join(tensor_text(k, device) for k in kinds)}]"

        left = names(node.names) if not isinstance(node, (Compute, Scatter, View)) else node.name
        match node:
            case Compute():
                body = f"{tensor_text(node.type, device)}, {_lambda(node.axes)} {exprs.text(node.value)}"
                return f"{left} = compute({body})"
            case Reduction():
                values = names([exprs.text(v) for v in node.values])
                over = f"{_lambda((*node.axes, *node.reduce_axes))} ({values})"
                how = _monoid(node.monoid, exprs)
                return f"{left} = reduce({how}, {types(node.types)}, {listing(node.reduce_shape)}, {over})"
            case Scan():
                values = names([exprs.text(v) for v in node.values])
                along = f"{node.scan_axis.name}, {_lambda(node.axes)} ({values})"
                return f"{left} = scan({_monoid(node.monoid, exprs)}, {types(node.types)}, {along})"
            case Scatter():
                first, *rest = [exprs.text(v) for v in node.values]
                how = "None" if node.monoid is None else _monoid(node.monoid, exprs)
                source = f"{listing(node.source_shape)}, {_lambda(node.source_axes)} ({names(rest)})"
                return (
                    f"{left} = scatter({how}, {tensor_text(node.type, device)}, {_lambda(node.axes)} {first}, {source})"
                )
            case View():
                offset = f", offset={index_text(node.offset)}" if node.offset != 0 else ""
                inside = exprs.indices(node.indices)
                inside = f"({inside}{',' if len(node.indices) == 1 else ''})" if node.indices else "()"
                of = f"{tensor_text(node.type, device)}, {node.source}, {_lambda(node.axes)} {inside}"
                return f"{left} = view({of}{offset})"
            case Library():
                options = "".join(f", {k}={argument(v)}" for k, v in node.kwargs)
                told = f"{argument(node.args)}, {node.reason!r}{_marks(node)}{options}"
                text = f"library({node.target!r}, {types(node.types)}, {told})"
                return f"{left} = {text}" if left else text
            case CallTensor():
                sizes = f", sizes={listing(node.sizes)}" if node.sizes else ""
                into = f", into=[{', '.join(map(str, node.into))}]" if node.into else ""
                count = f", count={node.count}" if node.count > 1 else ""
                given = f"{node.function!r}, {types(node.types)}, [{', '.join(node.args)}]"
                return f"{left} = call({given}{sizes}{into}{count})"
            case CallRegion():
                rows = [list(node.carried), *([[*map(_row, node.taken)]] if node.taken or node.shared else [])]
                rows += [list(node.shared)] if node.shared else []
                text = f"repeat({node.region.name}, {node.times}, {', '.join(map(_row, rows))})"
                return f"{left} = {text}" if left else text
        raise TypeError(f"a graph has no nodes like {type(node).__name__}")


def _marks(node: Library) -> str:
    return "".join(f", {m}" for m in sorted(LIBRARY_MARKS) if getattr(node, m))


def _row(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


def _stage(stage: Stage, exprs: ExprText) -> str:
    """A stage as an assignment of its results; a scatter has none."""
    values = [exprs.text(v) for v in stage.values]
    how = "None" if stage.monoid is None else _monoid(stage.monoid, exprs)
    points = stage.inner and (stage.monoid is None or stage.scan)
    axes = ("points" if points else "rows") if stage.axes is None else listing(stage.axes)
    role = [f"role={stage.role.value}"] if stage.role is not None else []
    if stage.into:
        return f"scatter({', '.join([how, stage.into, axes, values[0], f'({names(values[1:])})', *role])})"
    if stage.monoid is None:
        return f"{', '.join(stage.results)} = compute({', '.join([axes, *values, *role])})"
    over = [] if stage.scan else ["inner" if stage.over is None else listing(stage.over)]
    given = [how, axes, *over, f"({names(values)})", *role]
    return f"{names(stage.results)} = {'scan' if stage.scan else 'reduce'}({', '.join(given)})"


def _note(origins: tuple[Origin, ...]) -> str:
    """The ops and lines that something comes from."""
    return ", ".join(dict.fromkeys(f"{o.op} {o.source}".strip() for o in origins)).replace("\n", " ")


def _monoid(monoid: Monoid, exprs: ExprText) -> str:
    """The name of a monoid, or the definition of a user's."""
    if not monoid.definition:
        return monoid.name
    return f"associative({', '.join([exprs.text(e) for e in monoid.definition])})"


def _usual_device(graph: Graph) -> str:
    for kind in _types(graph).values():
        return kind.device
    return "cpu"


def _types(graph: Graph) -> dict[str, TensorType]:
    """As ``Graph.types``, but of graphs that are wrong too."""
    table = {i.name: i.type for i in graph.inputs if isinstance(i, Input)}
    for n in graph.nodes:
        table.update({k: t for k, t in zip(n.names, n.types, strict=False) if t is not None})
    return table


def _input(i: Input | SizeInput, device: str) -> str:
    if isinstance(i, SizeInput):
        return f"size({index_text(i.value)})"
    kind = tensor_text(i.type, device)
    return f"static({kind})" if i.static else kind


def _constant(constant: Constant, device: str) -> list[str]:
    """What a constant is, and what is in it: as numbers where those are few, else by its digest."""
    if isinstance(constant.kind, str):
        return [repr(constant.kind)]
    held = elements_of(constant.value) if constant.value is not None else None
    if held is not None:
        return [tensor_text(constant.kind, device), argument(held)]
    digest = constant.contents
    return [tensor_text(constant.kind, device), *([f"sha256={digest!r}"] if digest else [])]


def _output(output: GraphOutput) -> str:
    if output is None or isinstance(output, str):
        return str(output)
    return f"size({index_text(output)})"


def _lambda(axes: tuple[sympy.Symbol, ...]) -> str:
    return f"lambda {', '.join(a.name for a in axes)}:" if axes else "lambda:"


def _dict(annotations: Annotations) -> str:
    return f"{{{', '.join(f'{k!r}: {literal(v)}' for k, v in annotations)}}}"
