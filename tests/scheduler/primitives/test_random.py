"""Whatever legal schedule is thrown together, the oracle gives the same answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_mlc.ir.nest.hints import NUM_WARPS, OPERANDS, PREFETCH
from torch_mlc.ir.nest.loops import Loop, LoopNest, Update, walk_nodes
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.primitives.reductions.decompose_online import ONLINE
from torch_mlc.scheduler.schedule.schedule import PRIMITIVES, Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

Draw = Callable[[st.SearchStrategy[object]], object]
NAMES = (
    "pointwise", "plane", "transpose", "chain", "softmax", "layer_norm", "column_sum", "argmax", "stencil", "lookup",
    "siblings", "product", "statistics", "attention", "window",
)  # fmt: skip
# Those that move blocks go through more seldom than others, and are drawn more often.
DRAWN = (
    *PRIMITIVES, "rfactor",
    *2 * ("merge", "compute_at", "reverse_compute_at", "compute_inline", "reverse_compute_inline"),
)  # fmt: skip
# What few nests allow, and little else leaves possible, often comes first there.
ALLOWED = {
    "product": "tensorize", "statistics": "decompose_online", "attention": "decompose_online",
    "window": "cache_window", "siblings": "fuse_reductions", "softmax": "powers_of_two",
}  # fmt: skip
# What may become of a dimension: itself, or a quotient and a remainder.
DIGITS = (("{0}",), ("{0} // 2", "{0} % 2"), ("{0} // 4", "{0} % 4"))
# Sizes at which the answers are compared; a product's take long.
EXTENTS = {"product": (1, 3)}
# How often each primitive went through over the whole test: one that never does is not tested.
done: Counter[str] = Counter()


def _step(s: Schedule, data: st.DataObject, choices: tuple[str, ...]) -> None:
    """One primitive on loops and blocks that exist; most that make no sense are not tried."""
    loops = [n.var.name for n, _ in walk_nodes(s.nest.body) if isinstance(n, Loop)]
    blocks = s.get_blocks()
    one_loop, one_block = st.sampled_from(loops), st.sampled_from(blocks)
    primitive = data.draw(st.sampled_from(choices), label="primitive")
    match primitive:
        case "split":
            factors = data.draw(st.sampled_from(([None, 2], [None, 4], [3, None], [None, 2, 2], [2, None, 3])))
            s.split(data.draw(one_loop), factors, data.draw(st.sampled_from(("predicate", "predicate", "perfect"))))
        case "fuse" | "reorder":
            chain = s.get_loops(data.draw(one_block))
            start = data.draw(st.integers(0, max(len(chain) - 2, 0)))
            count = data.draw(st.integers(2, 3))
            part = chain[start : start + count]
            if len(part) < 2:
                return
            if primitive == "fuse":
                s.fuse(*part)
            else:
                s.reorder(*data.draw(st.permutations(part)))
        case "merge":
            siblings = [
                [n.var.name for n in body if isinstance(n, Loop)]
                for body in (s.nest.body, *(n.body for n, _ in walk_nodes(s.nest.body) if isinstance(n, Loop)))
            ]
            several = [x for x in siblings if len(x) > 1]
            if several:
                body = data.draw(st.sampled_from(several))
                k = data.draw(st.integers(0, len(body) - 2))
                s.merge(body[k], body[data.draw(st.integers(k + 1, min(k + 2, len(body) - 1)))])
        case "partition":
            loop = data.draw(one_loop)
            last = s.extent(loop) - 1
            s.partition(loop, [data.draw(st.sampled_from([1, 2, last]))])
        case "bind":
            s.bind(data.draw(one_loop), data.draw(st.sampled_from(("blockIdx.x", "blockIdx.y", "threadIdx.x"))))
        case "parallel" | "vectorize" | "unroll" | "rfactor":
            getattr(s, primitive)(data.draw(one_loop))
        case "compute_inline" | "reverse_compute_inline":
            getattr(s, primitive)(data.draw(one_block))
        case "cache_read" | "cache_write":
            block = data.draw(one_block)
            sites = s.block(block).reads if primitive == "cache_read" else s.block(block).writes
            buffers = sorted({site.buffer for site in sites})
            if buffers and len(s.nest.locals) < 8:
                scope = data.draw(st.sampled_from(("local", "shared")))
                getattr(s, primitive)(block, data.draw(st.sampled_from(buffers)), scope)
        case "transform_layout" | "pad" | "pipeline" | "sample_perfect_tile" | "sample_categorical":
            _layouts_and_decisions(s, primitive, data, one_loop)
        case "decompose_reduction":
            block = data.draw(one_block)
            if chain := s.get_loops(block):
                s.decompose_reduction(block, data.draw(st.sampled_from(chain)))
        case "fuse_reductions":
            reductions = [b for b in blocks if s.block(b).is_reduction]
            if len(reductions) > 1:
                first, second = data.draw(st.permutations(reductions))[:2]
                for a, b in zip(s.get_loops(first), s.get_loops(second), strict=False):
                    if a != b:
                        s.merge(a, b)
                s.fuse_reductions(first, second)
        case "blockize":
            if data.draw(st.booleans()):  # it leaves little to do
                s.blockize(data.draw(one_loop))
        case "tensorize":
            s.tensorize(data.draw(one_block), "dot")
        case "powers_of_two":
            s.powers_of_two(data.draw(one_block), data.draw(st.sampled_from(("exp2", "exp2_approx"))))
        case "compute_at" | "reverse_compute_at":
            getattr(s, primitive)(data.draw(one_block), data.draw(one_loop), data.draw(st.booleans()))
        case "decompose_online":
            online = [b for b in blocks if any(isinstance(u, Update) and u.monoid in ONLINE for u in s.block(b).body)]
            block = data.draw(st.sampled_from(online or blocks))
            around = s.get_loops(block) or loops
            s.decompose_online(block, data.draw(st.sampled_from(around)), data.draw(st.booleans()))
        case "pack":
            block = data.draw(one_block)
            reads = [ld for ld in s.block(block).reads if ld.buffer not in {b.name for b in s.nest.locals}]
            if reads and len(s.nest.locals) < 8:
                load = data.draw(st.sampled_from(reads))
                axes = {str(v) for i in load.indices if isinstance(i, sympy.Expr) for v in i.free_symbols}
                axes &= {a.var.name for a in s.block(block).axes}
                s.pack(block, load.buffer, data.draw(st.permutations(sorted(axes))))
        case "cache_window":
            block = data.draw(one_block)
            if (reads := s.block(block).reads) and len(s.nest.locals) < 8:
                axes = data.draw(st.permutations([str(a.var) for a in s.block(block).axes]))
                s.cache_window(block, data.draw(st.sampled_from(reads)).buffer, axes[: max(len(axes) - 1, 1)])
        case "reorder_storage":
            if s.nest.locals:
                buffer = data.draw(st.sampled_from(s.nest.locals))
                s.reorder_storage(buffer.name, data.draw(st.permutations(range(len(buffer.shape)))))
        case "annotate":
            marks = [
                ("", NUM_WARPS, 8),
                *((lp, PREFETCH, 64) for lp in loops),
                *((b, OPERANDS, "int8") for b in blocks),
            ]
            s.annotate(*data.draw(st.sampled_from(marks)))
        case "set_scope":
            if s.nest.locals:
                buffer = data.draw(st.sampled_from([b.name for b in s.nest.locals]))
                s.set_scope(buffer, data.draw(st.sampled_from(("local", "global"))))


def _layouts_and_decisions(s: Schedule, primitive: str, data: st.DataObject, one_loop: st.SearchStrategy[str]) -> None:
    match primitive:
        case "transform_layout":
            if s.nest.locals:
                buffer = data.draw(st.sampled_from(s.nest.locals))
                names = [f"d{k}" for k in range(len(buffer.shape))]
                new = data.draw(
                    st.permutations([p.format(d) for d in names for p in data.draw(st.sampled_from(DIGITS))])
                )
                s.transform_layout(buffer.name, f"{', '.join(names)} -> {', '.join(new)}")
        case "pad":
            s.pad(data.draw(one_loop), data.draw(st.sampled_from((2, 4, 5))))
        case "pipeline":
            s.pipeline(data.draw(one_loop), data.draw(st.integers(2, 4)))
        case "sample_perfect_tile":
            loop = data.draw(one_loop)
            s.split(loop, s.sample_perfect_tile(loop, data.draw(st.integers(2, 3)), 4))
        case "sample_categorical":
            s.split(data.draw(one_loop), [None, s.sample_categorical([2, 3, 4])])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_legal_schedule_keeps_the_answer(
    name: str, data: st.DataObject, nests: Mapping[str, LoopNest], unchanged: Callable[..., None]
) -> None:
    nest = nests[name]
    s = Schedule(nest)
    for k in range(data.draw(st.integers(1, 12), label="steps")):
        seldom = name in ALLOWED and k == 0 and data.draw(st.integers(0, 3)) < 3
        before = s.nest
        steps = len(s.trace.steps)
        try:
            _step(s, data, (ALLOWED[name],) if seldom else DRAWN)
        except ScheduleError as error:
            assert error.reason and (s.nest is before or len(s.trace.steps) > steps)
        done.update(step.primitive for step in s.trace.steps[steps:])
    verify(s.nest)
    unchanged(nest, s.nest, EXTENTS.get(name, (1, 5, 8)))
    assert replay(Trace.from_json(s.trace.to_json()), nest).nest == s.nest


def test_every_primitive_went_through() -> None:
    if not done:
        pytest.skip("the random schedules did not run")
    # ``atomic`` is for scatters alone, of which there are none here.
    assert not {p: done[p] for p in PRIMITIVES if done[p] < 3 and p != "atomic"}
