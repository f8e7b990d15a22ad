"""The rules of all targets, best first, and what a nest gets by default."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ..error import ScheduleError
from ..schedule.schedule import Schedule
from .cpu.attention import CPU_ATTENTION
from .cpu.attention_rows import CPU_ATTENTION_ROWS
from .cpu.column import CPU_COLUMN_REDUCTION
from .cpu.contraction import CPU_CONTRACTION
from .cpu.cross import CPU_CROSS_REDUCTION
from .cpu.dot_products import CPU_DOT_PRODUCTS
from .cpu.plain import CPU_PLAIN
from .cpu.pointwise import CPU_POINTWISE
from .cpu.product_tiles import CPU_PRODUCT_TILES
from .cpu.row import CPU_ROW_REDUCTION
from .cpu.row_blocks import CPU_ROW_BLOCKS
from .cpu.scan import CPU_SCAN
from .cpu.scatter import CPU_SCATTER
from .cpu.split import CPU_SPLIT_REDUCTION
from .cpu.stencil import CPU_STENCIL
from .gpu.attention import GPU_ATTENTION
from .gpu.attention_bias import GPU_ATTENTION_BIAS
from .gpu.attention_gradients import GPU_ATTENTION_GRADIENTS
from .gpu.column import GPU_COLUMN_REDUCTION
from .gpu.contraction import GPU_CONTRACTION
from .gpu.cross import GPU_CROSS_REDUCTION
from .gpu.filters import GPU_FILTERS
from .gpu.matrix_vector import GPU_MATRIX_VECTOR
from .gpu.online import GPU_ROW_ONLINE
from .gpu.plain import GPU_PLAIN
from .gpu.pointwise import GPU_POINTWISE, GPU_TRANSPOSE
from .gpu.row import GPU_ROW_LOOPED, GPU_ROW_PERSISTENT
from .gpu.scan import GPU_SCAN
from .gpu.scatter import GPU_SCATTER, GPU_SEGMENTS, GPU_SMALL
from .gpu.stencil import GPU_STENCIL
from .registry import Capability, DesignSpace, Rule, Scarce, matching

RULES: tuple[Rule, ...] = (
    CPU_ROW_BLOCKS, CPU_SCATTER, CPU_ATTENTION_ROWS, CPU_ATTENTION, CPU_SCAN, CPU_POINTWISE, CPU_STENCIL,
    CPU_DOT_PRODUCTS, CPU_PRODUCT_TILES, CPU_CONTRACTION, CPU_CROSS_REDUCTION, CPU_COLUMN_REDUCTION,
    CPU_SPLIT_REDUCTION, CPU_ROW_REDUCTION, CPU_PLAIN,
    GPU_SMALL, GPU_SCATTER, GPU_SEGMENTS, GPU_ATTENTION, GPU_ATTENTION_GRADIENTS, GPU_ATTENTION_BIAS, GPU_SCAN,
    GPU_CONTRACTION, GPU_MATRIX_VECTOR, GPU_STENCIL, GPU_FILTERS, GPU_TRANSPOSE, GPU_POINTWISE, GPU_CROSS_REDUCTION,
    GPU_COLUMN_REDUCTION, GPU_ROW_PERSISTENT, GPU_ROW_ONLINE, GPU_ROW_LOOPED, GPU_PLAIN,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UserRule:
    """A rule that a user has registered, before another one, or before all."""

    rule: Rule
    before: str | None


# In the order in which they were registered.
USER_RULES: list[UserRule] = []


def all_rules() -> tuple[Rule, ...]:
    """The rules of users and ours, best first. Where the rule is gone that another was to stand before, it is first."""
    rules = list(RULES)
    for user in tuple(USER_RULES):
        rules.insert(next((k for k, r in enumerate(rules) if r.name == user.before), 0), user.rule)
    return tuple(rules)


def can(target: Target, capability: Capability) -> bool:
    """Whether a target has a rule with a capability."""
    return any(target.kind in rule.kinds and capability in rule.can for rule in all_rules())


def default_schedule(nest: LoopNest, target: Target) -> Schedule:
    """The schedule that the first matching rule gives with its default parameters.

    A rule that turns out not to apply gives way to the next. Raises ScheduleError where all of them do.
    """
    refused: list[str] = []
    space = design_space(nest, target)
    for rule in space.rules:
        schedule = Schedule(nest, rule.name)
        try:
            rule.apply(schedule, target, {k: v[0] for k, v in rule.parameters(nest, target).items()})
        except ScheduleError as error:
            refused.append(f"{rule.name}: {error.reason}")
            continue
        return schedule
    raise ScheduleError("default_schedule", "; ".join(refused), nest)


def lighter_schedules(nest: LoopNest, target: Target, rule: str, scarce: Scarce) -> Iterator[Schedule]:
    """Other schedules by a rule, for where that of its default parameters compiles to more shared memory than the
    target has, or to more registers than a thread: those that take less, the nearest to the default first."""
    space = design_space(nest, target)
    for found in space.rules:
        if found.name == rule:
            for params in found.lighter(found.parameters(nest, target), scarce):
                candidate = space.candidate(found, params)
                if candidate is not None:
                    yield candidate.schedule


def design_space(nest: LoopNest, target: Target) -> DesignSpace:
    """Every schedule that the rules offer for a nest. Raises ScheduleError where no rule matches."""
    return DesignSpace(nest, target, matching(all_rules(), nest, target))


def first_rule(nest: LoopNest, target: Target) -> Rule:
    """The rule that a nest gets, as long as it applies. Raises ScheduleError where none matches."""
    return matching(all_rules(), nest, target)[0]


__all__ = [
    "GPU_COLUMN_REDUCTION", "GPU_ROW_LOOPED", "RULES", "USER_RULES", "Capability", "DesignSpace", "Rule", "Scarce",
    "UserRule", "all_rules", "can", "default_schedule", "design_space", "first_rule", "lighter_schedules",
]  # fmt: skip
