"""The arena of a host program: what lies in it, where, that it is proved apart, and how the text speaks of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv

from torch_mlc.codegen.host.build import build_host_program
from torch_mlc.codegen.host.memory.liveness import storages
from torch_mlc.codegen.host.memory.plan_memory import MOST, SLACK, ArenaError, check_arena, plan_memory
from torch_mlc.codegen.host.python.text import print_host
from torch_mlc.codegen.host.steps.kernel_use import KernelUse
from torch_mlc.codegen.host.steps.program import HostProgram
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, Library, Ref, SizeInput, TensorType, View

N, M, I0 = symbol("s0"), symbol("s1"), symbol("i0")
SYMBOLS = SymbolTable((Size(N, lower=2, hint=40), Size(M, hint=30)))
USE = {"f": KernelUse("k0_", ())}


def of(count: sympy.Expr | int) -> TensorType:
    return TensorType((sympy.sympify(count),), (sympy.S.One,), DType.FLOAT32)


def call(name: str, *args: str, n: sympy.Expr | int = N) -> CallTensor:
    return CallTensor((name,), (of(n),), "f", args)


def program(nodes: tuple[object, ...], *outputs: str) -> HostProgram:
    inputs = (SizeInput("n", N), SizeInput("m", M), Input("x", of(N)))
    return build_host_program(Graph("g", inputs, nodes, outputs, SYMBOLS), USE)  # type: ignore[arg-type]


# At its end a large tensor of a library's is held, beside which an arena of the others raises no peak.
CHAIN = (
    call("a", "x", n=16 * N), call("b", "a", n=16 * M), call("c", "b", n=16 * N + 16), call("d", "c"),
    Library(("big",), (of(100 * N + 100 * M),), "aten::sin.default", (Ref("d"),)),
)  # fmt: skip


def numbers(p: HostProgram, n: int, m: int) -> dict[str, tuple[int, int, int, int]]:
    """First byte, last byte, first step and last step of every tensor in the arena."""
    assert p.arena is not None
    at = {N: sympy.Integer(n), M: sympy.Integer(m)}
    found = {}
    for s in storages(p):
        if s.name in p.arena.offsets:
            begin = int(p.arena.offsets[s.name].xreplace(at))
            found[s.name] = (begin, begin + int(s.type.nbytes.xreplace(at)), s.begin, s.end)
    return found


def apart(p: HostProgram, n: int, m: int) -> None:
    """Nothing that lives together shares a byte, by numbers."""
    assert p.arena is not None
    places = list(numbers(p, n, m).values())
    size = int(p.arena.size.xreplace({N: sympy.Integer(n), M: sympy.Integer(m)}))
    for k, (a, b, first, last) in enumerate(places):
        assert a >= 0 and b <= size and a % 64 == 0
        for c, d, begin, end in places[:k]:
            assert b <= c or d <= a or last < begin or end < first


def test_dead_memory_is_taken_again_for_all_sizes() -> None:
    p = plan_memory(program(CHAIN, "d"))
    assert p.arena is not None and set(p.arena.offsets) == {"a", "b", "c"}
    # a and c never live together, and both are beside b.
    assert sympy.expand(p.arena.size - 64 * N - 64 - 64 * M) == 0
    assert p.arena.offsets["a"] == p.arena.offsets["c"]
    check_arena(p)
    for n, m in ((2, 0), (2, 500), (3, 1), (97, 5)):
        apart(p, n, m)


def test_what_is_returned_or_wanted_as_a_tensor_is_not_in_it() -> None:
    library = Library(("r",), (of(N),), "aten::sin.default", (Ref("b"),))
    nodes = (call("a", "x"), call("b", "a"), library, call("c", "a"), call("d", "c", "r", n=M), call("e", "d", n=8 * N))
    p = plan_memory(program(nodes, "d", "e"))
    assert p.arena is not None and set(p.arena.offsets) == {"a", "c"}


def test_one_tensor_is_no_arena() -> None:
    assert plan_memory(program((call("a", "x"), call("b", "a")), "b")).arena is None


def test_an_arena_never_raises_the_peak() -> None:
    # a and e are far apart in time, and an arena of both would lie beside the large result in between.
    big = Library(("m",), (of(1 << 20),), "aten::sin.default", (Ref("b"),))
    nodes = (
        call("a", "x", n=4096),
        call("b", "a", n=16),
        big,
        call("c", "m", n=8),
        call("d", "c", n=4096),
        call("e", "d"),
    )
    before = program(nodes, "e")
    p = plan_memory(before)
    assert max(map(SYMBOLS.hint, p.peaks)) <= max(map(SYMBOLS.hint, before.peaks)) + SLACK
    assert p.arena is None or "a" not in p.arena.offsets


def test_an_arena_is_no_larger_than_malloc_keeps() -> None:
    nodes = (call("a", "x", n=MOST), call("b", "a"), call("c", "b"), call("d", "c", n=2 * MOST))
    p = plan_memory(program(nodes, "d"))
    assert p.arena is not None and set(p.arena.offsets) == {"b", "c"}


def test_gaps_between_elements_count() -> None:
    padded = TensorType((sympy.Integer(10), sympy.Integer(3)), (sympy.Integer(100), sympy.S.One), DType.FLOAT32)
    nodes = (CallTensor(("a",), (padded,), "f", ("x",)), call("b", "a"), call("c", "b", n=4000))
    p = plan_memory(program(nodes, "c"))
    assert p.arena is not None
    a = next(s for s in storages(p) if s.name == "a")
    assert a.nbytes == 4 * 903
    check_arena(p)


def test_sizes_that_may_be_negative_or_are_not_known_yet_are_not_in_it() -> None:
    u = symbol("u0")
    found = Library(("i", "u0"), (of(u), None), "aten::nonzero.default", (Ref("x"),))
    odd = 4 * FloorDiv(N - 3, sympy.Integer(2)) + 4
    nodes = (
        call("a", "x", n=odd),
        call("b", "a"),
        found,
        call("c", "i", "b", n=u),
        call("d", "c", n=2 * N),
        call("e", "d", n=u),
    )
    inputs = (SizeInput("n", N), Input("x", of(N)))
    table = SymbolTable((Size(N, lower=2, hint=40), Size(u)))
    p = plan_memory(build_host_program(Graph("g", inputs, nodes, ("e",), table), USE))
    assert p.arena is not None and set(p.arena.offsets) == {"b", "d"}


def test_the_text_passes_addresses() -> None:
    view = View("v", of(N), "a", (I0,), (I0,), N)
    nodes = (call("a", "x", n=2 * N), view, call("b", "v"), call("c", "b"))
    text = print_host(resolve(plan_memory(program(nodes, "c")))).text
    lines = [line.strip() for line in text.splitlines()[6:]]
    assert "arena = block_cpu_((n0_,), (1,), torch.uint8, rounded=True)" in lines
    assert "arena_at = arena.data_ptr()" in lines
    assert "k0_(x.data_ptr(), a)" in lines
    assert "k0_(v, b)" in lines and "k0_(b, c.data_ptr())" in lines
    assert any(line.startswith("v = a + ") for line in lines)
    assert lines[-2:] == ["del arena", "return (c,)"]


def test_the_checker_finds_what_is_wrong() -> None:
    p = plan_memory(program(CHAIN, "d"))
    assert p.arena is not None
    wrong = {
        "share memory": {**p.arena.offsets, "b": sympy.Integer(128)},
        "is not in": {**p.arena.offsets, "c": p.arena.offsets["c"] + 64 * M + 64},
        "never allocated": {**p.arena.offsets, "z": sympy.S.Zero},
    }
    for words, offsets in wrong.items():
        with pytest.raises(ArenaError, match=words):
            check_arena(replace(p, arena=replace(p.arena, offsets=offsets)))
    with pytest.raises(ArenaError, match="longer than the arena"):
        check_arena(replace(p, arena=replace(p.arena, end=p.arena.begin)))


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_are_proved_and_apart(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [N, M, 16 * N, 16 * M, 48 * N + 16, N * M, N + M, 3 * N * M + 5, sympy.Integer(7), sympy.Integer(1000)]
    sizes += [sympy.floor(1)] if draw.random() < 0.5 else []
    half = FloorDiv(N * M + N + 1, N)  # a quotient whose bytes are rounded up to a line, so a quotient of it
    sizes += [half, 2 * half, FloorDiv(half + M, N), CeilDiv(N, sympy.Integer(3))] if seed % 2 else []
    nodes: list[object] = []
    names = ["x"]
    for k in range(draw.randint(3, 25)):
        reads = draw.sample(names[-6:], min(len(names[-6:]), draw.randint(1, 3)))
        name = f"t{k}"
        if draw.random() < 0.15:
            nodes.append(Library((name,), (of(draw.choice(sizes)),), "aten::sin.default", (Ref(reads[0]),)))
        else:
            nodes.append(call(name, *reads, n=draw.choice(sizes)))
        names.append(name)
    p = plan_memory(program(tuple(nodes), names[-1], draw.choice(names[1:])))
    if p.arena is not None:
        check_arena(p)
        for n, m in ((2, 0), (2, 1), (5, 3), (64, 64), (3, 1000), (1000, 2)):
            apart(p, n, m)


def on(device: str, name: str, *args: str, n: sympy.Expr | int) -> CallTensor:
    return CallTensor((name,), (replace(of(n), device=device),), "f", args)


def test_an_arena_on_a_gpu() -> None:
    """The device with most tensors has it, at places that suit it, of any size that is a number."""
    huge = 4 * MOST
    nodes = (
        on("cpu", "h", "x", n=24), on("cuda:0", "a", "h", n=huge), on("cuda:0", "b", "a", n=100),
        on("cuda:0", "c", "b", n=huge + 1), on("cuda:0", "d", "c", n=70), on("cpu", "e", "d", n=24),
        on("cpu", "f", "e", n=3),
    )  # fmt: skip
    p = plan_memory(program(nodes, "f"))
    assert p.arena is not None and p.arena.device == "cuda:0" and set(p.arena.offsets) == {"a", "b", "c", "d"}
    assert all(int(o) % 256 == 0 for o in p.arena.offsets.values()) and p.arena.bound == p.arena.size > MOST
    check_arena(p)
    with pytest.raises(ArenaError, match="e is on cpu, and the arena on cuda:0"):
        check_arena(replace(p, arena=replace(p.arena, offsets={"e": sympy.S.Zero}, begin=0, end=99)))
    symbolic = (on("cuda:0", "a", "x", n=MOST * N), on("cuda:0", "b", "a", n=64), on("cuda:0", "c", "b", n=64))
    q = plan_memory(program((*symbolic, on("cuda:0", "d", "c", n=9 * MOST)), "d"))
    assert q.arena is not None and set(q.arena.offsets) == {"b", "c"}
