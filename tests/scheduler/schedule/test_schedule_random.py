"""Random legal schedules of random small nests compute what the nest did before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import BLOCK_KINDS, AxisKind, Loop, LoopKind, LoopNest, Node, blocks, map_nodes
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace


def nest_of(n: str, m: str, locals_: str, *stages: str) -> LoopNest:
    """A nest over sizes ``n`` and ``m`` (numbers or names) of blocks in short form, ``loops: statement``."""
    sizes = "".join(f"    {s} = size()\n" for s in dict.fromkeys((n, m)) if not s.isdigit())
    text = [f"def nest(in0: float32[{n}, {m}], in1: float32[{m}, {n}], in2: float32[{m}], out0: float32[{n}, {m}],"]
    text += [f"         out1: float32[{n}], out2: float32[{m}]):\n{sizes}{locals_}"]
    for k, stage in enumerate(stages):
        loops, statement = stage.split(": ")
        axes = [axis.split("<") for axis in loops.split()]
        for d, (axis, extent) in enumerate(axes):
            text.append(f"{'    ' * (d + 1)}for b{k}_{axis} in serial({extent}):")
        text.append(f"{'    ' * (len(axes) + 1)}with block('b{k}'):")
        for axis, extent in axes:
            kind = "reduction" if axis.startswith("r") and ".update" in statement else "spatial"
            text.append(f"{'    ' * (len(axes) + 2)}{axis} = {kind}({extent}, b{k}_{axis})")
        text.append(f"{'    ' * (len(axes) + 2)}{statement}")
    body = "\n".join(text)
    outputs = [f"out{k}" for k in range(3) if f"out{k}[" in body]
    unused = [f"out{k}" for k in range(3) if f"out{k}[" not in body]
    nest = parse(f"@nest(outputs={outputs!r})\n{body}\n")
    assert isinstance(nest, LoopNest)
    return replace(nest, params=tuple(p for p in nest.params if p.name not in unused))


def local(name: str, *shape: str) -> str:
    return f"    {name} = local(float32[{', '.join(shape)}])\n"


Make = Callable[[str, str], LoopNest]


def chain(n: str, m: str) -> LoopNest:
    ij = f"i<{n} j<{m}"
    return nest_of(
        n, m, local("t0", n, m) + local("t1", n, m),
        f"{ij}: t0[i, j] = mul(in0[i, j], float32(2.0))",
        f"{ij}: t1[i, j] = add(t0[i, j], in2[j])",
        f"{ij}: out0[i, j] = mul(t1[i, j], t0[i, j])",
    )  # fmt: skip


def softmax(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", n, m) + local("t1", n) + local("t2", n, m) + local("t3", n),
        f"i<{n} r<{m}: t0[i, r] = mul(in0[i, r], float32(0.5))",
        f"i<{n} r<{m}: t1[i] = max.update(t0[i, r])",
        f"i<{n} r<{m}: t2[i, r] = exp(sub(t0[i, r], t1[i]))",
        f"i<{n} r<{m}: t3[i] = sum.update(t2[i, r])",
        f"i<{n} r<{m}: out0[i, r] = div(t2[i, r], t3[i])",
    )  # fmt: skip


def siblings(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", n) + local("t1", n),
        f"i<{n} r<{m}: t0[i] = sum.update(in0[i, r])",
        f"i<{n} r<{m}: t1[i] = max.update(in0[i, r])",
        f"i<{n}: out1[i] = sub(t1[i], t0[i])",
        f"i<{n} r<{m}: out0[i, r] = sub(in0[i, r], t0[i])",
    )  # fmt: skip


def columns(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", m),
        f"i<{m} r<{n}: t0[i] = sum.update(mul(in0[r, i], in1[i, r]))",
        f"i<{m}: out2[i] = mul(t0[i], float32(3.0))",
    )  # fmt: skip


def transposed(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", m, n),
        f"i<{m} j<{n}: t0[i, j] = add(in1[i, j], in2[i])",
        f"i<{n} j<{m}: out0[i, j] = add(in0[i, j], t0[j, i])",
    )  # fmt: skip


def broadcast(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", m) + local("t1", n),
        f"j<{m}: t0[j] = exp(in2[j])",
        f"i<{n} r<{m}: t1[i] = sum.update(mul(in0[i, r], t0[r]))",
        f"i<{n} j<{m}: out0[i, j] = add(mul(t0[j], in0[i, j]), t1[i])",
    )  # fmt: skip


def outer_product(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", n) + local("t1", m),
        f"i<{n}: t0[i] = add(cast(index(i, int64), float32), float32(1.0))",
        f"j<{m}: t1[j] = add(in2[j], float32(1.0))",
        f"i<{n} j<{m}: out0[i, j] = mul(t0[i], t1[j])",
    )  # fmt: skip


def flattened(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", f"{n}*{m}"),
        f"i<{n} j<{m}: t0[i * {m} + j] = neg(in0[i, j])",
        f"i<{n} j<{m}: out0[i, j] = add(t0[i * {m} + j], in2[j])",
    )  # fmt: skip


def neighbours(n: str, m: str) -> LoopNest:
    return nest_of(
        n, m, local("t0", n, f"{m} + 2"),
        f"i<{n} j<{m}+2: t0[i, j] = mul(cast(index(j, int64), float32), cast(index(i, int64), float32))",
        f"i<{n} j<{m}: out0[i, j] = sub(t0[i, j + 2], t0[i, j])",
    )  # fmt: skip


def two_reductions(n: str, m: str) -> LoopNest:
    """A reduction of reductions, over both dimensions in turn."""
    return nest_of(
        n, m, local("t0", n) + local("t1", "1"),
        f"i<{n} r<{m}: t0[i] = sum.update(in0[i, r])",
        f"r<{n}: t1[0] = max.update(t0[r])",
        f"i<{n}: out1[i] = sub(t0[i], t1[0])",
    )  # fmt: skip


NESTS: tuple[Make, ...] = (
    chain, softmax, siblings, columns, transposed, broadcast, outer_product, flattened, neighbours, two_reductions,
)  # fmt: skip


# --- schedules --------------------------------------------------------------------------------------------------------


FACTORS = ([None, 4], [None, 2], [3, None], [None, 2, 2], [16], [2, 4, None])


@dataclass
class Player:
    """Draws primitives for a schedule; what is refused leaves it as it was."""

    draw: Callable[..., object]
    schedule: Schedule

    def loops(self) -> list[str]:
        return list(dict.fromkeys(lp for b in self.schedule.get_blocks() for lp in self.schedule.get_loops(b)))

    def pick(self, items: list[str]) -> str:
        return self.draw(st.sampled_from(items))  # type: ignore[return-value]

    def some_loops(self) -> list[str]:
        """A run of nested loops."""
        loops = self.schedule.get_loops(self.pick(self.schedule.get_blocks()))
        first = self.draw(st.integers(0, max(len(loops) - 2, 0)))
        return loops[first : first + 3]  # type: ignore[operator]

    def step(self) -> None:
        s = self.schedule
        every = self.loops()
        if not every:
            return
        match self.draw(st.integers(0, 12)):
            case 0 | 1:
                s.split(self.pick(every), self.draw(st.sampled_from(FACTORS)))  # type: ignore[arg-type]
            case 2:
                s.fuse(*self.some_loops()[:2])
            case 3:
                s.reorder(*self.draw(st.permutations(self.some_loops())))  # type: ignore[misc]
            case 4 | 5:
                s.merge(self.pick(every), self.pick(every))
            case 6 | 7:
                s.compute_at(self.pick(s.get_blocks()), self.pick(every))
            case 8:
                s.reverse_compute_at(self.pick(s.get_blocks()), self.pick(every))
            case 9:
                s.compute_inline(self.pick(s.get_blocks()))
            case 10:
                s.rfactor(self.pick(every))
            case 11:
                self.pick_kind(self.pick(every))
            case 12:
                s.parallel(s.get_loops(self.pick(s.get_blocks()))[0])

    def pick_kind(self, loop: str) -> None:
        match self.draw(st.integers(0, 3)):
            case 0:
                self.schedule.vectorize(loop)
            case 1:
                self.schedule.unroll(loop)
            case 2:
                self.schedule.bind(loop, "threadIdx.x")
            case 3:
                self.schedule.bind(loop, self.pick(["blockIdx.x", "blockIdx.y"]))


def inputs_of(nest: LoopNest, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Small whole numbers: their sums do not depend on order."""
    rng = np.random.default_rng(seed)
    found = {}
    for p in nest.params:
        if p.name not in nest.outputs:
            shape = [int(e.xreplace({s: sizes[s.name] for s in e.free_symbols})) for e in p.shape]
            found[p.name] = rng.integers(-3, 4, shape).astype(DType.FLOAT32.numpy)
    return found


def shuffled(nest: LoopNest) -> LoopNest:
    """Lanes and tile axes that carry no reduction as loops that the oracle may run backwards."""
    carried = {
        s
        for b, _ in blocks(nest)
        for a, e in zip(b.axes, b.bindings, strict=True)
        if a.kind is not AxisKind.SPATIAL
        for s in e.free_symbols
    }

    def visit(node: Node) -> Node | None:
        together = (LoopKind.VECTORIZED, LoopKind.THREAD_X)
        if isinstance(node, Loop) and node.kind in together and node.var not in carried:
            return replace(node, kind=LoopKind.PARALLEL)
        return None

    return replace(nest, body=map_nodes(nest.body, visit))


def check(before: LoopNest, schedule: Schedule, sizes: dict[str, int]) -> None:
    """The nest is sound, computes what it did, in any order of what runs side by side, and its trace replays."""
    after = schedule.nest
    told = f"{schedule.trace}\n{show(before)}\n{show(after)}\n{sizes}"
    verify(after)
    inputs = inputs_of(before, sizes, len(told))
    expected = run_nest(before, inputs, sizes)
    for nest, backward in ((after, False), (shuffled(after), True)):
        for name, value in run_nest(nest, inputs, sizes, backward=backward).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5, err_msg=told)
    assert replay(Trace.from_json(schedule.trace.to_json()), before).nest == after, told


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, str, dict[str, int]]:
    """Sizes of a nest as text, and what the symbols among them are."""
    n = draw(st.sampled_from(["s0", "4", "5", "1", "8"]))
    m = draw(st.sampled_from(["s1", "6", "3", "8", "7"]))
    return n, m, {s: draw(st.sampled_from([4, 1, 7, 2, 9, 0])) for s in (n, m) if not s.isdigit()}


def play(make: Make, shape: tuple[str, str, dict[str, int]], data: st.DataObject) -> None:
    n, m, sizes = shape
    before = make(n, m)
    schedule = Schedule(before)
    player = Player(data.draw, schedule)
    for _ in range(data.draw(st.integers(1, 10))):
        kept = schedule.nest
        try:
            player.step()
        except ScheduleError:
            assert schedule.nest is kept
    check(before, schedule, sizes)


@settings(max_examples=40)
@given(shapes(), st.data())
@pytest.mark.parametrize("make", NESTS, ids=lambda make: make.__name__)
def test_random_schedules_keep_the_meaning(
    make: Make, shape: tuple[str, str, dict[str, int]], data: st.DataObject
) -> None:
    play(make, shape, data)


@pytest.mark.parametrize("make", NESTS, ids=lambda make: make.__name__)
def test_the_nests_are_what_they_say(make: Make) -> None:
    """Each nest stands on its own legs: it verifies, and its outputs are written."""
    nest = make("s0", "s1")
    verify(nest)
    sizes = {"s0": 3, "s1": 5}
    for value in run_nest(nest, inputs_of(nest, sizes, 0), sizes).values():
        assert np.isfinite(value).all()


def test_kinds_of_the_grid_are_run_backwards_too() -> None:
    """The check would see iterations that need each other."""
    nest = parse(
        "@nest(outputs=['out0'])\n"
        "def f(in0: float32[4], out0: float32[4]):\n"
        "    t0 = local(float32[1])\n"
        "    for a in serial(4):\n"
        "        with block('b0'):\n"
        "            i = spatial(4, a)\n"
        "            t0[0] = in0[i]\n"
        "    for b in serial(4):\n"
        "        with block('b1'):\n"
        "            i = spatial(4, b)\n"
        "            out0[i] = t0[0]\n"
    )
    assert isinstance(nest, LoopNest)
    racing = replace(nest, body=tuple(replace(n, kind=BLOCK_KINDS[0]) for n in nest.body if isinstance(n, Loop)))
    inputs = {"in0": np.arange(4, dtype=np.float32)}
    assert run_nest(racing, inputs, {})["out0"][0] == 3
    assert run_nest(racing, inputs, {}, backward=True)["out0"][0] == 0


def test_an_error_underlines_the_loop_or_the_block() -> None:
    s = Schedule(softmax("4", "6"))
    for primitive, name, line in (
        (lambda: s.parallel("b0_r"), "b0_r", "    for b0_r in serial(6):"),
        (lambda: s.compute_inline("b1"), "b1", "            with block('b1'):"),
    ):
        with pytest.raises(ScheduleError) as caught:
            primitive()
        assert caught.value.reason
        text = str(caught.value).splitlines()
        at = next(k for k, t in enumerate(text) if t.endswith("^ here"))
        assert text[at - 1].endswith(line)
        start = text[at].index("^")
        assert text[at - 1][start : start + len(name)] == name and text[at].count("^") == len(name)
