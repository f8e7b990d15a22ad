"""Parts of a concat are written where they belong, by the kernels that make them.

A ``cat`` or ``stack`` of what several kernels have made is a copy of theirs, since no two kernels are one just because
somebody puts their results side by side. Where such a function has nothing to do for a result but to copy parts
(``functions/concat.py``), those kernels write slices of the result, and the copy is left out. Others that read a part
read it there. Inductor's ConcatKernel does so for outputs of one layout; here strides are those that a part has in the
concat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Load, cast, is_value, rename_loads, symbol, walk
from ...ir.function.function import Stage, TensorFunction
from ...ir.graph.facts import names_in, places_of, users_of
from ...ir.graph.graph import CallTensor, Graph, Library, Node, Ref, TensorType, View, size_makers
from ...ir.graph.slices import JOINED, MEMORY
from ...ir.nest.loops import PARAM_ALIGN
from ..context import PassContext
from ..cost.calls import LEAST_RUN, WIDE_RUN
from ..functions.concat import ConcatPart, joins_of
from ..functions.function_table import FunctionTable
from ..functions.lower import collapse, substitute_single_uses
from ..fusion.fusion import Fusion
from ..passes.canonical.names import fresh_name
from .memory_order import Held


def write_slices(fusion: Fusion, context: PassContext) -> Fusion:
    """Let kernels write the parts of concats into slices, where all parts of a concat are such.

    All of a concat is held from its first part on: those whose parts are made far from each other are copied where
    that would raise the peak.
    """
    graph, functions = fusion.graph, fusion.functions
    found = {n.function: joins_of(functions[n.function]) for n in graph.nodes if isinstance(n, CallTensor)}
    if not any(found.values()):
        return fusion
    return fusion.having(*_SliceWriter(graph, FunctionTable(functions), found).write_all())


@dataclass(slots=True)
class _SliceWriter:
    graph: Graph
    table: FunctionTable
    # The concats of each function, by result, and the copied parts of each.
    found: dict[str, dict[int, list[ConcatPart]]]
    types: dict[str, TensorType] = field(default_factory=dict)
    # The nodes as they are by now, at the positions that they had: None where nothing is left to do.
    nodes: list[Node | None] = field(default_factory=list)
    # What stands before each of them that was not there.
    before: dict[int, list[Node]] = field(default_factory=dict)
    makers: Mapping[str, int] = field(default_factory=dict)
    readers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    # Concats that are none of any kernel's results by now, and parts that lie in them.
    settled: set[str] = field(default_factory=set)
    # By position, the results that tell sizes which data decide.
    decided: dict[sympy.Symbol, int] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    runs: dict[TensorFunction, int] = field(default_factory=dict)

    def write_all(self) -> tuple[Graph, dict[str, TensorFunction]]:
        graph, held = self.graph, Held.of(self.graph)
        self.types, self.nodes = graph.types(), list(graph.nodes)
        self.makers, self.readers, self.taken = places_of(graph), users_of(graph), set(names_in(graph))
        self.leaving = {o for o in graph.outputs if isinstance(o, str)}
        self.decided = {size: self.makers[name] for size, name in size_makers(graph).items()}
        for at, node in enumerate(graph.nodes):
            for name in [node.names[k] for k in self.concats(node)] if isinstance(node, CallTensor) else ():
                concat = self.concat(at, name)
                if concat is not None and held.join(name, concat.parts):
                    self.write(concat)
        if not self.settled:
            return graph, dict(self.table.functions)
        nodes = [n for k, node in enumerate(self.nodes) for n in (*self.before.get(k, ()), node) if n is not None]
        return replace(graph, nodes=tuple(nodes)), self.table.used(nodes)

    def concats(self, call: CallTensor) -> dict[int, list[ConcatPart]]:
        """The concats that a call copies."""
        if call.function not in self.found:
            self.found[call.function] = joins_of(self.table.functions[call.function])
        return self.found[call.function] if call.count == 1 and not call.into else {}

    def concat(self, at: int, name: str) -> _Concat | None:
        """A concat and all calls that have to do with its parts; None where a part is no kernel's to write, or
        something else wants it as it is."""
        # The call may have lost another concat, or have a part of whose arguments elsewhere by now.
        call = self.nodes[at]
        copied = self.concats(call).get(call.names.index(name)) if isinstance(call, CallTensor) else None
        if copied is None:
            return None
        assert isinstance(call, CallTensor)
        sizes = dict(zip(self.table.functions[call.function].symbols.symbols, call.sizes, strict=True))
        parts = {}
        for part in copied:
            arg = call.args[part.given]
            if arg not in self.makers or arg in self.settled or arg in self.leaving or arg in parts:
                return None
            kind = self.types[arg]
            if kind.device != self.types[name].device:
                return None
            strides = tuple(s.xreplace(sizes) for s in part.strides)
            parts[arg] = part.offset.xreplace(sizes), replace(kind, strides=strides)
        concat = _Concat(at, name, self.types[name], parts)
        return concat if self.may_be(concat) else None

    def may_be(self, concat: _Concat) -> bool:
        """Look for all calls that make or read parts; whether each can be changed."""
        touched = {k for name in concat.parts for k in (self.makers[name], *self.readers[name])}
        begin = min(touched)
        if any(self.decided[s] >= begin for s in concat.sizes & self.decided.keys()):
            return False  # data decide, behind the first part, how much memory there is to be
        for k in sorted(touched):
            node = self.nodes[k]
            if not isinstance(node, CallTensor) or node.count != 1 or any(t in concat.parts for t in node.into):
                return False
            function = self.table.functions[node.function]
            changed = self.changed(concat, node, function)
            if changed is None or not all(
                self.may_lie(concat, n, node, function) for n in node.names if n in concat.parts
            ):
                return False
            if not function.extra and self.run(changed[1]) < min(self.run(function), WIDE_RUN):
                return False
            concat.touched[k] = changed
        return True

    def may_lie(self, concat: _Concat, name: str, call: CallTensor, function: TensorFunction) -> bool:
        """Whether a kernel may as well write a part where it is to be: elements lie together, and in the order in which
        it makes them unless that is by tiles."""
        hint, before, (_, after) = self.graph.symbols.hint, call.types[call.names.index(name)], concat.parts[name]
        sizes = [tuple(map(hint, d)) for d in zip(before.shape, before.strides, after.strides, strict=True)]
        dims = sorted((d for d in sizes if d[0] > 1), key=lambda d: d[2])
        if not function.extra and dims != sorted(dims, key=lambda d: d[1]):
            return False
        run = 1
        for extent, _, stride in dims:
            run *= extent if stride == run else 1
        return run * before.dtype.itemsize >= LEAST_RUN or run == math.prod(d[0] for d in dims)

    def run(self, function: TensorFunction) -> int:
        """Bytes of the largest array that the innermost loop over it passes side by side, where dimensions that all
        accesses cross as one are one."""
        if function not in self.runs:
            merged = collapse(substitute_single_uses(function))
            hint, extents = merged.symbols.hint, {d.var: d.extent for d in merged.dims}
            arrays = {b.name: b for b in merged.params}
            sites = [(o.buffer, o.indices) for o in merged.outputs]
            sites += [(arrays[e.buffer], e.indices) for s in merged.stages for v in s.values for e in walk(v)
                      if isinstance(e, Load) and e.buffer in arrays and not any(map(is_value, e.indices))]  # fmt: skip
            buffer, indices = max(sites, key=lambda site: hint(site[0].numel) * site[0].dtype.itemsize)
            steps = sympy.expand(buffer.offset(indices))
            run = max((hint(e) for v, e in extents.items() if steps.coeff(v) == 1), default=1)
            self.runs[function] = run * buffer.dtype.itemsize
        return self.runs[function]

    def changed(
        self, concat: _Concat, call: CallTensor, function: TensorFunction
    ) -> tuple[CallTensor, TensorFunction] | None:
        """A call that writes and reads parts where they are now, and its function."""
        if function.scatters or any(o.buffer in function.inputs for o in function.outputs):
            return None
        call, function, sizes = self.with_sizes(concat, call, function)
        inputs, outputs = list(function.inputs), list(function.outputs)
        types, into = list(call.types), list(call.into or (None,) * len(call.names))
        for name in dict.fromkeys(n for n in (*call.names, *call.args) if n in concat.parts):
            offset, kind = concat.parts[name]
            strides = tuple(s.xreplace(sizes) for s in kind.strides)
            first = offset * kind.dtype.itemsize
            align = math.gcd(PARAM_ALIGN, int(first)) if first.is_Integer else kind.dtype.itemsize
            for k, arg in enumerate(call.args):
                if arg == name:
                    inputs[k] = replace(inputs[k], strides=strides, align=align)
            if name in call.names:
                k = call.names.index(name)
                if into[k] is not None:
                    return None
                types[k], into[k] = kind, name
                outputs[k] = replace(outputs[k], buffer=replace(outputs[k].buffer, strides=strides, align=align))
        written = tuple(into) if any(t is not None for t in into) else ()
        return (
            replace(call, types=tuple(types), into=written),
            replace(function, inputs=tuple(inputs), outputs=tuple(outputs)),
        )

    def with_sizes(
        self, concat: _Concat, call: CallTensor, function: TensorFunction
    ) -> tuple[CallTensor, TensorFunction, dict[sympy.Symbol, sympy.Expr]]:
        """A call that is given all sizes that strides of parts have, its function, and what those are called in it."""
        known = {given: own for own, given in zip(function.symbols.symbols, call.sizes, strict=True) if given.is_Symbol}
        names = {*call.names, *call.args}
        wanted = {
            s for name in names & concat.parts.keys() for e in concat.parts[name][1].strides for s in e.free_symbols
        }
        table, taken = list(function.symbols.sizes), {s.name for s in function.symbols.symbols}
        more = [z for z in self.graph.symbols.sizes if z.symbol in wanted - known.keys()] if wanted else []
        for size in more:
            known[size.symbol] = symbol(fresh_name(f"s{len(table)}", taken))
            table.append(replace(size, symbol=known[size.symbol]))
        call = replace(call, sizes=(*call.sizes, *(z.symbol for z in more)))
        return call, replace(function, symbols=SymbolTable(tuple(table))), known

    def write(self, concat: _Concat) -> None:
        """Let the kernels write the slices."""
        call = self.nodes[concat.at]
        assert isinstance(call, CallTensor)
        whole = fresh_name(f"{concat.name}_memory", self.taken)
        slices = {name: fresh_name(f"{name}_slice", self.taken) for name in concat.parts}
        views = [View(slices[n], t, whole, (), (), offset, call.origins) for n, (offset, t) in concat.parts.items()]
        memory = Library((whole,), (concat.kind,), MEMORY, (), (), "", call.origins)
        self.before.setdefault(min(concat.touched), []).extend((memory, *views))
        for k, (changed, function) in concat.touched.items():
            into = tuple(slices.get(t, t) if t is not None else None for t in changed.into)
            node = replace(changed, into=into)
            if k == concat.at:
                node, function = without(node, function, concat.name)
                refs = (Ref(whole), *map(Ref, concat.parts))
                name = Library((concat.name,), (concat.kind,), JOINED, refs, (), "", call.origins)
                self.before.setdefault(k, []).append(name)
            self.nodes[k] = replace(node, function=self.table.enter(function)) if node.names else None
        self.types.update((n, t) for n, (_, t) in concat.parts.items())
        self.settled |= {concat.name, *concat.parts}


@dataclass(slots=True)
class _Concat:
    """A result that is a concat, where the call stands that copies it, and its parts in sizes of the graph, by name:
    how many elements behind the begin of the concat each begins, and its type there."""

    at: int
    name: str
    kind: TensorType
    parts: dict[str, tuple[sympy.Expr, TensorType]]
    # Calls with parts among their results or arguments as they will be, by position.
    touched: dict[int, tuple[CallTensor, TensorFunction]] = field(default_factory=dict)

    @property
    def sizes(self) -> set[sympy.Symbol]:
        """All that its memory and the slices of it are made of."""
        told = (e for offset, t in self.parts.values() for e in (offset, *t.strides))
        return {s for e in (*self.kind.shape, *self.kind.strides, *told) for s in e.free_symbols}


def without(call: CallTensor, function: TensorFunction, name: str) -> tuple[CallTensor, TensorFunction]:
    """The call that copied a concat, without that, and reading it for what else it makes of it."""
    result = call.names.index(name)
    out = function.outputs[result]
    outputs = tuple(o for k, o in enumerate(function.outputs) if k != result)
    whole = replace(out.buffer, name="whole")
    stages: list[Stage] = []
    needed = {o.result for o in outputs}
    for stage in reversed(function.stages):
        if needed.isdisjoint(stage.results):
            continue
        if out.result in stage.results:
            value = cast(Load(whole.name, out.indices, whole.dtype), stage.values[0].dtype)
            stage = replace(stage, values=(value,))
        stages.insert(0, stage)
        needed |= {e.buffer for v in stage.values for e in walk(v) if isinstance(e, Load)}
    given = [(b, a) for b, a in ((whole, name), *zip(function.inputs, call.args, strict=True)) if b.name in needed]
    renamed = {b.name: f"in{k}" for k, (b, _) in enumerate(given)}
    inputs = tuple(replace(b, name=renamed[b.name]) for b, _ in given)
    stages = [replace(s, values=tuple(rename_loads(v, renamed) for v in s.values)) for s in stages]
    names = tuple(n for k, n in enumerate(call.names) if k != result)
    types = tuple(t for k, t in enumerate(call.types) if k != result)
    into = tuple(t for k, t in enumerate(call.into) if k != result)
    return (
        replace(call, names=names, types=types, args=tuple(a for _, a in given), into=into),
        replace(function, inputs=inputs, outputs=outputs, stages=tuple(stages)),
    )
