"""Results that are copied over an input of the graph are written there at once, where nobody can tell.

A step of an optimizer is then one pass over its parameters and state instead of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import sympy

from ...ir.expr.value import Call, Expr, Load, is_checked, is_value, walk
from ...ir.function.function import Output, Stage, TensorFunction
from ...ir.graph.copies import COPY, is_copy
from ...ir.graph.facts import Aliases, aliases_of, places_of
from ...ir.graph.graph import CallTensor, Graph, Library, Node, TensorType, View
from ...ir.target import raises_errors
from ..context import PassContext
from ..functions.function_table import FunctionTable
from ..functions.scalars import is_elementwise
from .fusion import Fusion
from .narrow_writes import narrowed
from .outlined import without_idle_views
from .scatter import scattered_over


def write_in_place(fusion: Fusion, context: PassContext) -> Fusion:
    """Leave out those copies that a kernel can make unnecessary.

    A result ``v`` that is copied over an input ``p`` of the same type goes straight into its memory if nothing reads
    that memory later, ``v`` itself does not leave the graph, and the kernel that makes it reads ``p`` only at the very
    element that it writes, or not at all. A kernel that tells at its end that data are wrong has written all the same:
    eager raises before it writes, so the copy stays, which such a kernel keeps from being reached.
    """
    graph = fusion.graph
    return fusion.having(*_InPlace(graph, dict(fusion.functions)).run())


@dataclass(slots=True)
class _InPlace:
    graph: Graph
    functions: dict[str, TensorFunction]
    types: dict[str, TensorType] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    # Functions of calls that changed, by position.
    changed: dict[int, TensorFunction] = field(default_factory=dict)
    # Outcomes of ``overwritten`` by function object, output and input; objects are kept, so that ids stay their own.
    known: dict[tuple[int, int, int], tuple[TensorFunction, TensorFunction | None]] = field(default_factory=dict)
    # Functions in which data may be an error, by name.
    raising: dict[str, bool] = field(default_factory=dict)

    def run(self) -> tuple[Graph, dict[str, TensorFunction]]:
        copies = [k for k, n in enumerate(self.graph.nodes) if is_copy(n)]
        if not copies:
            return self.graph, self.functions
        self.types = self.graph.types()
        self.given = {i.name for i in self.graph.inputs}
        nodes: list[Node | None] = list(self.graph.nodes)
        # What a copy returns is what it wrote to.
        returned: dict[object, str] = {}
        for k in copies:
            node = self.graph.nodes[k]
            assert isinstance(node, Library)
            target, value = node.args[0].name, self.behind(node.args[1].name)
            made = nodes[self.makers[value]] if value in self.makers else None
            if not isinstance(made, CallTensor) or not self.is_safe(k, node, target, value):
                continue
            changed = self.written(made, target, value)
            if changed is not None:
                nodes[self.makers[value]], nodes[k] = changed, None
                returned.update(dict.fromkeys(node.names, target))
        table = FunctionTable(self.functions)
        for k, function in self.changed.items():
            call = nodes[k]
            assert isinstance(call, CallTensor)
            nodes[k] = replace(call, function=table.enter(function))
        graph = replace(self.graph, outputs=tuple(returned.get(o, o) for o in self.graph.outputs))
        kept = without_idle_views([n for n in nodes if n is not None], graph)
        return replace(graph, nodes=kept), table.used(kept)

    @property
    def makers(self) -> Mapping[str, int]:
        return places_of(self.graph)

    @property
    def aliases(self) -> Aliases:
        return aliases_of(self.graph)

    def behind(self, name: str) -> str:
        """The tensor that a view shows as it is."""
        while name in self.makers and isinstance(view := self.graph.nodes[self.makers[name]], View):
            if view.type != self.types[view.source] or view.offset != 0:
                break
            name = view.source
        return name

    def is_safe(self, at: int, node: Library, target: str, value: str) -> bool:
        """Whether it makes no difference to the rest of the graph when the value arrives early."""
        kind = self.types[target]
        if self.types[value] != kind or target not in self.given:
            return False
        if any(s == 0 and n != 1 for s, n in zip(kind.strides, kind.shape, strict=True)):
            return False
        if value in self.aliases.leaving or any(n in self.aliases.readers for n in node.names):
            return False
        made = self.makers[value]
        if any(k > made and k != at for k in self.aliases.readers.get(target, ())):
            return False
        # A library that keeps or changes what it is given must not be given the input's memory in the value's place.
        return not any(
            isinstance(n := self.graph.nodes[k], Library) and k != at and _keeps(n)
            for k in self.aliases.readers.get(value, ())
        )

    def written(self, call: CallTensor, target: str, value: str) -> CallTensor | None:
        """The call with the value's memory given; None where its kernel would read what it has overwritten."""
        k = call.names.index(value)
        into = list(call.into or (None,) * len(call.names))
        # A value that is copied over two inputs has the memory of the first.
        if into[k] is not None or any(target in self.aliases[a] and a != target for a in call.args):
            return None
        if raises_errors(call.types[k].device) and self.may_raise(call):
            return None
        into[k] = target
        if target not in call.args:
            return replace(call, into=tuple(into))
        at = self.makers[value]
        before, given = self.changed.get(at, self.functions[call.function]), call.args.index(target)
        if (id(before), k, given) not in self.known:
            self.known[id(before), k, given] = before, overwritten(before, k, given)
        _, function = self.known[id(before), k, given]
        if function is None:
            return None
        self.changed[at] = function
        return replace(call, into=tuple(into))

    def may_raise(self, call: CallTensor) -> bool:
        """Whether data may be an error in a kernel before eager would begin to write. Places that a scatter writes to
        are none: it looks at them one by one, as eager does."""
        if call.function not in self.raising:
            stages = self.functions[call.function].stages
            checked = (_is_checked(v, s.into != "" and k > 0) for s in stages for k, v in enumerate(s.values))
            self.raising[call.function] = any(checked)
        return self.raising[call.function]


def _is_checked(value: Expr, is_place: bool) -> bool:
    """Whether a value is made of something that is checked; of a place, what its own bounds check does not count."""
    if is_place:
        made = list(walk(value))
        read = [i for e in made if isinstance(e, Load) for i in e.indices if is_value(i)]
        divided = any(isinstance(e, Call) and e.fn == "check_divisor" for e in made)
        return divided or any(_is_checked(i, False) for i in read)
    return is_checked(value)


def _keeps(node: Library) -> bool:
    op = node.target.split("::")[-1].split(".")[0]
    return node.target != COPY and (op.endswith("_") or node.target.startswith("hop::"))


def overwritten(function: TensorFunction, output: int, given: int) -> TensorFunction | None:
    """The function that writes one output over one of its inputs; None where a point would read another point's.

    The value must be computed from the element that it replaces: then it cannot be there before that has been read.
    """
    old, buffer = function.outputs[output], function.inputs[given]
    if any(o.buffer == buffer for o in function.outputs):
        return None
    if function.scatters:
        return scattered_over(function, given)
    if function.extra:
        return None
    if (old.buffer.shape, old.buffer.strides, old.buffer.dtype) != (buffer.shape, buffer.strides, buffer.dtype):
        return None
    mentioned = {s for i in old.indices for s in i.free_symbols}
    if {d.var for d in function.rows if d.extent != 1} - mentioned:
        return None
    reads: dict[str, set[str]] = {}
    for s in function.stages:
        found: set[str] = set()
        for e in (e for v in s.values for e in walk(v) if isinstance(e, Load)):
            found |= {e.buffer} | reads.get(e.buffer, set())
            if e.buffer == buffer.name and not _same(e.indices, old.indices):
                return None
        # Once a row, and never for the elements of it or what is combined over them.
        if buffer.name in found and not _once_a_row(function, s):
            return None
        reads.update(dict.fromkeys(s.results, found))
    if buffer.name not in reads[old.result]:
        return None
    others = [o for o in function.outputs if buffer.name in reads[o.result] and o is not old]
    if others and not is_elementwise(function):
        return None
    outputs = list(function.outputs)
    outputs[output] = Output(buffer, old.result, old.indices)
    return narrowed(replace(function, outputs=tuple(outputs)))


def _once_a_row(function: TensorFunction, stage: Stage) -> bool:
    return stage.monoid is None and stage.axes is None and not (stage.inner and function.inner)


def _same(a: tuple[object, ...], b: tuple[sympy.Expr, ...]) -> bool:
    return len(a) == len(b) and all(x == y for x, y in zip(a, b, strict=True))
