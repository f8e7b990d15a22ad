"""The kernels of a graph: begun all together, finished, loaded, and named in its host program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ...codegen.host.steps.kernel_use import KernelUse
from ...codegen.kernel import KernelSource
from ...ir.function.function import Callee, TensorFunction
from ...ir.graph.graph import CallTensor, Origin, every_node
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...ir.text.structure import structural_key
from ...runtime.compile.compilers import Compilers
from ...runtime.compile.fallback import AtenKernel
from ...runtime.compile.kernels import KernelStore, LoadedKernel, kernel_use, source_use
from ...runtime.counters import counters
from ...runtime.gpu.checks import launches_checked
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...runtime.timing import PhaseTimer
from ...runtime.tuning.ranks import Ranks
from ...scheduler.fusion.fusion import Fusion
from ...scheduler.schedule.trace import Trace
from .kernels import KernelBuild, KernelPlan, StartedKernel, is_by_hand, lowered, start_kernel
from .tuning import ByRules, ChosenBy, Tuning, tuning_costs, tuning_of

# Seconds beyond its budget that a rank of a job waits for what others have found.
PATIENCE = 60.0
# By the function that they are the code of.
Kernels: TypeAlias = Mapping[str, KernelBuild] | Mapping[str, StartedKernel]


def called(fusion: Fusion) -> Counter[str]:
    """How often each function is called."""
    found: Counter[str] = Counter()
    for node, times in every_node(fusion.graph):
        if isinstance(node, CallTensor):
            found[node.function] += times
    return found


def tuning_for(
    fusion: Fusion, options: Options, timer: PhaseTimer, may_measure: bool, by_rules: ByRules | None = None
) -> Tuning:
    """Where the schedules of a graph's kernels come from; ``by_rules`` are those that its plan has already."""
    calls = called(fusion)
    costs = tuning_costs({name: f for name, f in fusion.functions.items() if name in calls}, calls)
    return tuning_of(options, timer, costs, may_measure=may_measure, calls=calls, by_rules=by_rules)


def start_kernels(fusion: Fusion, plan: KernelPlan, compilers: Compilers) -> dict[str, StartedKernel]:
    """The code of every function that the graph calls, found or begun."""
    options = plan.options
    wanted: dict[str, tuple[Callee, Target, tuple[Origin, ...]]] = {}
    for node, _ in every_node(fusion.graph):
        if isinstance(node, CallTensor) and node.function not in wanted:
            target = target_for(
                node.types[0].device, options.target, options.threads, options.cpu_products, options.libraries
            )
            function = fusion.functions.get(node.function) or fusion.given[node.function]
            wanted[node.function] = function, target, node.origins
        elif isinstance(node, CallTensor):
            counters.add("kernels_shared")
    if plan.tuning.budget is not None:
        _tune([(f, t) for f, t, _ in wanted.values()], plan, Ranks.of_job(options.tune_budget + PATIENCE))
    return {name: start_kernel(f, t, plan, origins, compilers) for name, (f, t, origins) in wanted.items()}


def _tune(functions: Sequence[tuple[Callee, Target]], plan: KernelPlan, ranks: Ranks | None) -> None:
    """Tune the kernels of a graph together. In a job each is tuned by one rank, and all ranks take what it has
    found."""
    tuning = plan.tuning
    nests: dict[Target, dict[str, tuple[str, LoopNest]]] = {}
    for function, target in functions:
        # A nest has its schedule, and so has what a person has scheduled.
        if isinstance(function, TensorFunction) and not is_by_hand(function, target, plan):
            try:
                nest = lowered(function, target, plan)
            except Exception:  # ``start_kernel`` meets it too, and says what becomes of the kernel
                continue
            nests.setdefault(target, {}).setdefault(structural_key(nest), (function.name, nest))
    every = [(name, nest, t) for t, by_workload in nests.items() for name, nest in by_workload.values()]
    if ranks is None:
        tuning.tune(every)
        return
    for target, by_workload in nests.items():
        tuned = [*by_workload.values()]

        def prepare(numbers: list[int], target: Target = target, tuned: list[tuple[str, LoopNest]] = tuned) -> None:
            tuning.tune([(*tuned[k], target) for k in numbers])

        def decide(number: int, target: Target = target, tuned: list[tuple[str, LoopNest]] = tuned) -> Trace | None:
            name, nest = tuned[number]
            schedule = tuning.schedule(name, nest, target)
            return None if tuning.choices[name].source is ChosenBy.DEFAULT else schedule.trace

        agreed = ranks.agreed(target, [*by_workload], decide, prepare)
        tuning.agreed.update({(target, key): trace for key, trace in zip(by_workload, agreed, strict=True)})


def loaded_kernels(kernels: Mapping[str, KernelBuild], options: Options, store: KernelStore) -> dict[str, LoadedKernel]:
    """What runs, by the variable of the host program."""
    variables, checked = variables_of(kernels), launches_checked(options.verify)
    early = options.early_launches
    return {
        variables[b.key]: LoadedKernel(AtenKernel(b.definition), None, b.function.name)
        if b.code is None
        else store.load(b.code, checked=checked, early=early)
        for b in kernels.values()
    }


def variables_of(kernels: Kernels) -> dict[str, str]:
    """The variable of each distinct kernel in the host program."""
    return {key: f"k{n}_" for n, key in enumerate(dict.fromkeys(b.key for b in kernels.values()))}


def uses_of(kernels: Kernels) -> dict[str, KernelUse]:
    """How the host program calls each function."""
    variables = variables_of(kernels)
    return {function: _use(b, variables[b.key]) for function, b in kernels.items()}


def _use(kernel: KernelBuild | StartedKernel, variable: str) -> KernelUse:
    names, table = [s.name for s in kernel.function.symbols.symbols], kernel.function.table
    match kernel:
        case StartedKernel(build=None, source=KernelSource() as source):
            return source_use(source, variable, tuple(names.index(s) for s in source.symbols), table=table)
        case StartedKernel(build=KernelBuild(code=code)) | KernelBuild(code=code):
            if code is not None:
                return kernel_use(code, variable, tuple(names.index(s) for s in code.symbols), table=table)
    return KernelUse(variable, tuple(range(len(names))), by_pointer=False, table=table)


def is_other(build: KernelBuild, started: StartedKernel) -> bool:
    """Whether a kernel became something else than what was begun: ATen ops, or code with other tiles."""
    return started.build is None and (build.code is None or build.source is not started.source)


def overridden(kernels: Mapping[str, KernelBuild]) -> tuple[str, ...]:
    """The user's schedules that were taken."""
    return tuple(str(b.override) for b in kernels.values() if b.override is not None)
