"""Results that take the place of what they are made of: an intermediate that nobody reads again is written over, and so
is an input that the program has for itself.

A kernel then touches half the memory, which on CPUs is often still in the cache, and the peak is lower.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field, replace

from ...ir.function.function import TensorFunction
from ...ir.graph.facts import Aliases, aliases_of
from ...ir.graph.graph import CONSTANT, CallTensor, Graph, Library, TensorType
from ..context import PassContext
from ..functions.function_table import FunctionTable
from ..fusion.fusion import Fusion
from ..fusion.in_place import overwritten

# Bytes from which an input is written over. To see that nobody else holds it takes 3 us a call.
LEAST_OWNED = 1 << 20


def write_over_dead(fusion: Fusion, context: PassContext) -> Fusion:
    """Let kernels write results over arguments of the same type that die with them.

    The argument must be made in the graph, or be an input that the program owns; share its memory with nothing that
    lives on; and be read by the kernel only at the very element that it writes.
    """
    graph = fusion.graph
    owned = frozenset(context.owned)
    return fusion.having(*_Overwriter(graph, dict(fusion.functions), aliases_of(graph), owned).run())


def taken_inputs(graph: Graph, owned: Collection[str]) -> tuple[int, ...]:
    """The positions of the ``owned`` inputs that a graph of calls writes over."""
    targets = {t for n in graph.nodes if isinstance(n, CallTensor) for one in n.calls() for t in one.into or () if t}
    written = {base for t in targets for base in aliases_of(graph)[t]}
    return tuple(k for k, i in enumerate(graph.inputs) if i.name in owned and i.name in written)


@dataclass(slots=True)
class _Overwriter:
    graph: Graph
    functions: dict[str, TensorFunction]
    aliases: Aliases
    owned: Set[str] = frozenset()
    types: dict[str, TensorType] = field(default_factory=dict)
    # By memory (the name that it was made under): the position of the last node that reads any name for it.
    last: dict[str, int] = field(default_factory=dict)
    # Memory that a result lives in is alive as long as any of its names.
    lasting: set[str] = field(default_factory=set)
    # By result: the owned input whose memory it has.
    taken: dict[str, str] = field(default_factory=dict)
    # Outcomes of ``overwritten`` by function object, output and input; objects are kept, so that ids stay their own.
    known: dict[tuple[int, int, int], tuple[TensorFunction, TensorFunction | None]] = field(default_factory=dict)

    def run(self) -> tuple[Graph, dict[str, TensorFunction]]:
        self.types = self.graph.types()
        self.last = {base: readers[-1] for base, readers in self.aliases.readers.items()}
        self.lasting = {i.name for i in self.graph.inputs if i.name not in self.owned} | self.aliases.leaving
        for node in self.graph.nodes:
            if isinstance(node, Library) and node.target == CONSTANT:  # memory of the module, not of one run
                self.lasting.update(node.names)
        table = FunctionTable(self.functions)
        nodes = list(self.graph.nodes)
        for k, node in enumerate(nodes):
            if isinstance(node, CallTensor) and node.count == 1:
                changed, function = self.overwriting(k, node)
                if changed.into != node.into:
                    nodes[k] = replace(changed, function=table.enter(function))
        return replace(self.graph, nodes=tuple(nodes)), table.used(nodes)

    def overwriting(self, at: int, call: CallTensor) -> tuple[CallTensor, TensorFunction]:
        """The call with every result that may be in the place of an argument there, and its function."""
        function = self.functions[call.function]
        into = list(call.into or (None,) * len(call.names))
        for k, kind in enumerate(call.types):
            for given, arg in enumerate(call.args):
                if into[k] is not None or arg in into or self.types[arg] != kind or not self.is_dead(at, call, arg):
                    continue
                given_for = self.input_of(arg)
                if given_for and not self.may_take(given_for, call.names[k], kind):
                    continue
                changed = self.overwritten(function, k, given)
                if changed is not None:
                    function, into[k] = changed, arg
                    if given_for:
                        self.taken[call.names[k]] = given_for
        return replace(call, into=tuple(into)), function

    def overwritten(self, function: TensorFunction, output: int, given: int) -> TensorFunction | None:
        key = id(function), output, given
        if key not in self.known:
            self.known[key] = function, overwritten(function, output, given)
        return self.known[key][1]

    def input_of(self, name: str) -> str:
        """The owned input in whose memory a tensor lies, "" for none."""
        (base,) = self.aliases[name]
        return base if base in self.owned else self.taken.get(base, "")

    def may_take(self, given: str, result: str, kind: TensorType) -> bool:
        """Whether a result may have the memory of an input. A storage that the caller gets has the size of its tensor,
        and that of an input may be longer where sizes vary."""
        whole = self.types[given].nbytes
        if whole.is_Integer and whole < LEAST_OWNED:
            return False
        return result not in self.aliases.leaving or bool(whole.is_Integer and whole == kind.nbytes)

    def is_dead(self, at: int, call: CallTensor, arg: str) -> bool:
        """Whether the call is the last to read the memory of an argument, which it has by this name alone."""
        bases = self.aliases[arg]
        if len(bases) != 1 or bases & self.lasting:
            return False
        (base,) = bases
        others = (a for a in call.args if a != arg)
        return self.last[base] == at and all(not bases & self.aliases[a] for a in others) and call.args.count(arg) == 1
