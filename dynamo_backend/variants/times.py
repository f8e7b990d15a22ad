"""What a planned graph is predicted to take at some sizes, whichever sizes it was planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.symbols import SymbolTable
from ...ir.function.function import Callee, TensorFunction
from ...ir.graph.by_size import call_at
from ...ir.graph.effects import LINEAR
from ...ir.graph.graph import CallRegion, CallTensor, Graph, Library, Node, Ref
from ...ir.machine import Machine
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...runtime.targets import target_for
from ...scheduler.cost.begun import Times
from ...scheduler.cost.products.contraction_cpu import onednn_times, weight_reading
from ...scheduler.tuning.loop_times import loops_time
from ..compiling.job import Job
from ..compiling.kernels import KernelPlan, scheduled
from ..compiling.plans import Plan
from ..compiling.tuning import Tuning

# Products of matrices in libraries, whose last operand, or of oneDNN the second, is the weight.
_PRODUCTS = frozenset((LINEAR, "aten::mm.default", "aten::addmm.default"))
Sizes = Mapping[sympy.Symbol, int]


@dataclass(slots=True)
class PlanTimes:
    """The predicted times of one plan: kernels by the loops that they are scheduled to, library calls by their bytes
    and operations."""

    job: Job
    plan: Plan
    _nests: dict[tuple[str, Target], LoopNest] = field(default_factory=dict)
    _known: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        """The machine that does most of it: a GPU where there is one."""
        devices = self.job.devices
        return self._target(next((d for d in devices if d != "cpu"), "cpu")).machine

    def at(self, sizes: Sizes) -> float:
        """Nanoseconds of a run at some sizes; what they do not name has its typical size. Infinity where there are no
        such sizes: something is divided by what is nothing there."""
        try:
            return self._of_graph(self.plan.fusion.graph, sizes)
        except ZeroDivisionError:
            return inf

    def _of_graph(self, graph: Graph, sizes: Sizes) -> float:
        graph = replace(graph, symbols=_typical(graph.symbols, sizes))
        found = 0.0
        for node in graph.nodes:
            match node:
                case CallRegion():
                    found += node.times * self._of_graph(node.region, sizes)
                case _:
                    found += self._of_node(node, graph)
        return found

    def _of_node(self, node: Node, graph: Graph) -> float:
        """Nanoseconds of a call at the typical sizes of a graph."""
        fusion = self.plan.fusion
        match node:
            case CallTensor():
                called = fusion.functions.get(node.function) or fusion.given[node.function]
                target, hint = self._target(node.types[0].device), graph.symbols.hint
                return sum(self._of_kernel(called, tuple(map(hint, c.sizes)), target) for c in node.calls())
            case Library() if device := next((t.device for t in node.types if t is not None), ""):
                machine, node = self._target(device).machine, call_at(node, graph.symbols.hint)
                times = Times(graph, {**fusion.functions, **fusion.given}, machine)
                return times.of(node) + _of_product(node, graph, machine)
        return 0.0

    def _of_kernel(self, function: Callee, sizes: tuple[int, ...], target: Target) -> float:
        key = function.name, sizes
        if key not in self._known:
            nest = self._nest(function, target)
            named = dict(zip(function.symbols.symbols, sizes, strict=True))
            self._known[key] = loops_time(replace(nest, symbols=_typical(nest.symbols, named)), target)
        return self._known[key]

    def _nest(self, function: Callee, target: Target) -> LoopNest:
        if not isinstance(function, TensorFunction):
            return function
        key = function.name, target
        if key not in self._nests:
            job = self.job
            by_rules = Tuning(None, None, job.timer, by_rules=self.plan.by_rules)
            made_by = KernelPlan(job.options, job.settings, job.store, job.timer, by_rules, job.run, job.fresh)
            self._nests[key] = scheduled(function, target, made_by)
        return self._nests[key]

    def _target(self, device: str) -> Target:
        options = self.job.options
        return target_for(device, options.target, options.threads, options.cpu_products, options.libraries)


def _of_product(node: Library, graph: Graph, machine: Machine) -> float:
    """Nanoseconds that a product of float32 in a CPU's library takes beyond what its bytes or operations do; of other
    calls none."""
    if node.target not in _PRODUCTS or machine.is_gpu:
        return 0.0
    types, hint = graph.types(), graph.symbols.hint
    weight = node.args[1] if node.target == LINEAR else node.args[-1]
    out = types[node.names[0]]
    if not isinstance(weight, Ref) or weight.name not in types or out.dtype is not DType.FLOAT32:
        return 0.0
    kind, columns = types[weight.name], hint(out.shape[-1])
    rows = hint(out.numel) // max(columns, 1)
    reading = weight_reading(rows, hint(kind.nbytes), node.target == LINEAR, machine)
    if node.target != LINEAR:
        return reading
    found = onednn_times(rows, hint(kind.numel) // max(columns, 1), columns, machine)
    return reading + (found[1] if found is not None else 0.0)


def _typical(table: SymbolTable, sizes: Sizes) -> SymbolTable:
    return SymbolTable(tuple(replace(s, hint=sizes.get(s.symbol, s.hint)) for s in table.sizes))
