"""``parse(show(x)) == x`` for whatever can be built, and the script is what a person wants to read."""

import math
import random
from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import LOGSUMEXP, MONOIDS, SUM
from torch_mlc.ir.expr.ops import OPS
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, Var, call, const, symbol
from torch_mlc.ir.graph.constants import digest_of
from torch_mlc.ir.graph.graph import (
    CallTensor,
    Compute,
    Constant,
    Graph,
    Input,
    IRModule,
    Library,
    Origin,
    Reduction,
    Ref,
    SizeInput,
    TensorType,
    View,
)
from torch_mlc.ir.nest.hints import HINTS, Annotations, Place
from torch_mlc.ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Bound,
    Buffer,
    Loop,
    LoopKind,
    LoopNest,
    Scope,
    Store,
    Update,
    contiguous_strides,
)
from torch_mlc.ir.text.parser import ParseError, parse
from torch_mlc.ir.text.printer import show

F32 = DType.FLOAT32
n, i0, i1, r0 = (symbol(s) for s in ("s0", "i0", "i1", "r0"))
SYMBOLS = [symbol(s) for s in ("s0", "s1", "i0", "i1", "r0", "odd name", "lambda")]


def small(*shape: sympy.Expr | int, dtype: DType = F32, device: str = "cpu") -> TensorType:
    extents = tuple(map(sympy.sympify, shape))
    return TensorType(extents, contiguous_strides(extents), dtype, device)


def test_a_nest_reads_like_a_program(golden: Callable[[str, str], None]) -> None:
    x = Buffer("in0", (n, sympy.Integer(128)), (sympy.Integer(128), sympy.S.One), F32)
    out = Buffer("out0", (n,), (sympy.S.One,), DType.BFLOAT16, align=16)
    m, s = (Buffer(k, (n,), (sympy.S.One,), F32, Scope.LOCAL) for k in "ms")
    a, b, c = (symbol(k) for k in ("b0_i0", "b0_r0", "b1_i0"))
    targets = (Access("m", (i0,)), Access("s", (i0,)))
    stats = Block("b0", (Axis(i0, n), Axis(r0, sympy.Integer(128), AxisKind.REDUCTION)), (a, b),
                  (Update(LOGSUMEXP, targets, LOGSUMEXP.lift(Load("in0", (i0, r0), F32))),))  # fmt: skip
    answer = LOGSUMEXP.project((Load("m", (i0,), F32), Load("s", (i0,), F32)))[0]
    last = Block(
        "b1", (Axis(i0, n),), (c * 4,), (Store("out0", (i0,), Cast(answer, DType.BFLOAT16)),), (Bound(c * 4, n),)
    )
    loops = (
        Loop(a, n, (Loop(b, sympy.Integer(128), (stats,), LoopKind.VECTORIZED),), LoopKind.PARALLEL),
        Loop(c, n, (last,)),
    )
    table = SymbolTable((Size(n, 2, 4096, 8, hint=64),))
    nest = LoopNest("lse", (x, out), ("out0",), loops, (m, s), table, (("num_warps", 4),))
    text = show(nest)
    golden("nest", text)
    assert parse(text) == nest
    assert parse(text).symbols.sizes[0].hint == 64


def test_a_module_reads_like_a_program(golden: Callable[[str, str], None]) -> None:
    gpu = "cuda:0"
    table = SymbolTable((Size(n),))
    add = Compute("add", small(n, 8, device=gpu), (i0, i1), call("add", Load("x", (i0, i1), F32), const(math.nan, F32)),
                  (Origin("aten.add.Tensor", "model.py:3 in forward: x + nan"),))  # fmt: skip
    total = Reduction(
        ("t",), (small(n, device=gpu),), (i0,), (r0,), (sympy.Integer(8),), SUM, (Load("add", (i0, r0), F32),)
    )
    flip = View(
        "v", TensorType((sympy.Integer(8), n), (sympy.S.One, sympy.Integer(8)), F32, gpu), "add", (i0, i1), (i1, i0)
    )
    mm = Library(("p", "q"), (small(8, 8, device="cpu"), None), "aten::mm.default",
                 (Ref("v"), [Ref("x"), None, 1.5, -math.inf, n + 1, sympy.Integer(3), True, "a", torch.float16]),
                 (("device", torch.device(gpu)), ("layout", torch.strided), ("format", torch.channels_last),
                  ("z", 1 + 2j), ("one", (slice(None, 2, None),)), ("d", {"k": (1,)})), "matrix product")  # fmt: skip
    made = CallTensor(("c",), (small(n, device=gpu),), "fused_0", ("t", "x"), (n * 2,))
    inputs = (Input("x", small(n, 8, device=gpu), True), SizeInput("length", n * 2))
    main = Graph("main", inputs, (add, total, flip, mm, made), ("c", "v", n * 8, None), table)
    callee = Graph("fused_0", (), (), (), SymbolTable())
    module = IRModule({"main": main, "other_key": callee})
    text = show(module)
    golden("module", text)
    assert parse(text) == module


def test_the_culprit_is_underlined() -> None:
    inner = call("exp", Load("x", (i0,), F32))
    g = Graph("g", (Input("x", small(4)),), (Compute("y", small(4), (i0,), call("neg", inner)),), ("y",))
    lines = show(g, inner).split("\n")
    at = next(k for k, line in enumerate(lines) if line.endswith(" here"))
    begin, end = lines[at].index("^"), lines[at].rindex("^") + 1
    assert lines[at - 1][begin:end] == "exp(x[i0])"
    assert "^" not in show(g, object())


def test_parts_that_occur_twice_are_named_once() -> None:
    value: Expr = Load("x", (i0,), F32)
    for _ in range(64):  # as a tree this has 2**64 leaves
        value = call("add", value, value)
    g = Graph("g", (Input("x", small(4)),), (Compute("y", small(4), (i0,), value),), ("y",))
    text = show(g)
    assert len(text) < 4000
    back = parse(text).nodes[0].value
    for _ in range(63):
        assert back.args[0] is back.args[1]
        back = back.args[0]


def test_deep_expressions() -> None:
    value: Expr = Load("x", (i0,), F32)
    for _ in range(100):
        value = call("neg", value)
    g = Graph("g", (Input("x", small(4)),), (Compute("y", small(4), (i0,), value),), ("y",))
    assert parse(show(g)) == g


@pytest.mark.parametrize(
    "text, says",
    [
        ("def f(): pass", "under @graph, @function or @nest"),
        ("@graph\ndef f(x): return ()", "a parameter with its type"),
        ("@graph\ndef f(x: float31[3]):\n    return (x,)", "line 2, column 10: expected one of float64"),
        (
            "@graph\ndef f(x: float32[3]):\n    y = compute(float32[3], lambda i0: exp(z[i0]))\n    return (y,)",
            "defined above",
        ),
        (
            "@graph\ndef f(x: float32[3]):\n    y = compute(float32[3], lambda i0: foo(x[i0]))\n    return (y,)",
            "function of the",
        ),
        ("@graph\ndef f(x: float32[3]):\n    y = 3\n    return (y,)", "line 3, column 9: expected a call"),
        ("@nest(outputs=[])\ndef f():\n    for i in sideways(3):\n        pass", "one of serial, parallel"),
        ("@nest(outputs=[])\ndef f():\n    x = x = 3", "a loop or a block"),
        ("@graph\ndef f(", "no Python syntax"),
        ("__import__('os').system('true')", "under @graph, @function or @nest"),
    ],
)
def test_what_is_no_script_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert says in str(caught.value)


# --- random objects ---------------------------------------------------------------------------------------------------


_FORMS = (
    lambda a, b, c, by, to: a + b,
    lambda a, b, c, by, to: a - 3 * b,
    lambda a, b, c, by, to: a * b,
    lambda a, b, c, by, to: a**2,
    lambda a, b, c, by, to: sympy.Mul(a, b + c, evaluate=False),
    lambda a, b, c, by, to: sympy.Add(a, b, evaluate=False),
    lambda a, b, c, by, to: FloorDiv(a, by),
    lambda a, b, c, by, to: PythonMod(a, by),
    lambda a, b, c, by, to: Mod(by, to),
    lambda a, b, c, by, to: ModularIndexing(a, by, to),
    lambda a, b, c, by, to: ModularIndexing(a, 1, to),
    lambda a, b, c, by, to: CleanDiv(a * by, by),
    lambda a, b, c, by, to: Max(by, to),
    lambda a, b, c, by, to: Min(by, a),
    lambda a, b, c, by, to: sympy.Min(by, to),
)


def make_indices(count: int) -> list[sympy.Expr]:
    """Expressions grown at random from one seed: sympy is too slow to build them anew in every example."""
    rng = random.Random(0)
    sizes: list[sympy.Expr] = [*SYMBOLS[:2], sympy.Integer(4), sympy.Integer(7)]
    pool: list[sympy.Expr] = [*SYMBOLS, *map(sympy.Integer, (-5, -1, 0, 1, 2, 64))]
    while len(pool) < count:
        a, b, c = rng.choices(pool, k=3)
        by, to = rng.choices(sizes, k=2)
        new = rng.choice(_FORMS)(a, b, c, by, to)
        if sympy.count_ops(new) < 12 and not new.has(sympy.nan, sympy.zoo, sympy.oo):
            pool.append(new)
    return pool


INDICES = make_indices(160)


def indices() -> st.SearchStrategy[sympy.Expr]:
    return st.integers(0, len(INDICES) - 1).map(INDICES.__getitem__)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_any_index_is_read_back(index: sympy.Expr) -> None:
    graph = parse(show(Graph("g", (), (), (index,), SymbolTable())))
    assert isinstance(graph, Graph) and graph.outputs == (index,)


DTYPES = st.sampled_from(list(DType))
BUFFERS = {"x": F32, "y": DType.INT64, "add": DType.BFLOAT16, "z": DType.BOOL}
# No NaN, which equals nothing.
NUMBERS = st.one_of(st.floats(allow_nan=False), st.integers(), st.booleans())


def values() -> st.SearchStrategy[Expr]:
    leaves: st.SearchStrategy[Expr] = st.one_of(
        st.builds(Const, NUMBERS, DTYPES),
        st.builds(Var, st.text(max_size=3), DTYPES),
        st.builds(IndexValue, indices(), DTYPES),
        st.tuples(st.sampled_from(sorted(BUFFERS)), st.lists(indices(), max_size=3)).map(
            lambda p: Load(p[0], tuple(p[1]), BUFFERS[p[0]])
        ),
        st.builds(Load, st.sampled_from(["x", "unknown", "odd name"]), st.tuples(indices()), st.just(DType.INT8)),
    )

    def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        return st.one_of(
            st.builds(Cast, inner, DTYPES, st.booleans()),
            st.builds(Select, inner, inner, inner),
            st.sampled_from(sorted(OPS)).flatmap(
                lambda fn: st.builds(Call, st.just(fn), st.tuples(*[inner] * OPS[fn].arity), DTYPES)
            ),
            st.tuples(inner, inner).map(lambda p: Call("mul", (p[0], p[0]), p[0].dtype)),
            st.tuples(inner, indices()).map(lambda p: Load("x", (p[0], p[1]), F32)),
        )

    return st.recursive(leaves, grow, max_leaves=6)


def types() -> st.SearchStrategy[TensorType]:
    shapes = st.lists(st.one_of(st.integers(0, 9).map(sympy.Integer), st.just(n), st.just(n * 2)), max_size=3).map(
        tuple
    )
    plain = st.builds(
        lambda s, d, dev: TensorType(s, contiguous_strides(s), d, dev),
        shapes,
        DTYPES,
        st.sampled_from(["cpu", "cuda:1"]),
    )
    strided = st.builds(lambda s, d: TensorType(s, tuple(reversed(contiguous_strides(s))), d), shapes, DTYPES)
    return st.one_of(plain, strided)


def notes(place: Place, kind: LoopKind | None = None) -> st.SearchStrategy[Annotations]:
    """Some hints of a place, and of a kind of loop, with values that they take."""
    found = []
    for hint in (h for h in HINTS.values() if place in h.places and (kind is None or kind in h.kinds)):
        given = st.sampled_from(hint.choices) if hint.choices else st.just(hint.default)
        found.append(st.tuples(st.just(hint.key("odd name") if hint.of_buffer else hint.name), given))
    return st.lists(st.one_of(found), max_size=2, unique_by=lambda pair: pair[0]).map(tuple)


TABLE = (
    st.lists(st.sampled_from(SYMBOLS[:2]), unique=True, max_size=2)
    .flatmap(
        lambda s: st.tuples(
            *(
                st.builds(
                    Size, st.just(v), st.integers(0, 3), st.one_of(st.none(), st.integers(4, 9)), st.integers(1, 8)
                )
                for v in s
            )
        )
    )
    .map(SymbolTable)
)
ACCESS = st.builds(
    Access,
    st.sampled_from(["x", "y"]),
    st.lists(st.one_of(indices(), values().filter(lambda e: not isinstance(e, Var))), max_size=2).map(tuple),
)
STATEMENTS = st.one_of(
    st.builds(lambda a, v: Store(a.buffer, a.indices, v), ACCESS, values()),
    st.sampled_from(sorted(MONOIDS))
    .map(MONOIDS.get)
    .flatmap(
        lambda m: st.builds(
            Update,
            st.just(m),
            st.tuples(*[ACCESS] * len(m.components)),
            st.tuples(*[values()] * len(m.components)),
            st.booleans(),
        )
    ),
)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    axes = tuple(
        Axis(v, draw(indices()), draw(st.sampled_from(AxisKind))) for v in draw(st.sampled_from([(), (i0,), (i0, r0)]))
    )
    bindings = tuple(draw(indices()) for _ in axes)
    body = tuple(draw(st.lists(STATEMENTS, max_size=2)))
    bounds = tuple(draw(st.lists(st.builds(Bound, indices(), indices()), max_size=2)))
    return Block(draw(st.text(max_size=4)), axes, bindings, body, bounds, draw(notes(Place.BLOCK)))


@st.composite
def nests(draw: st.DrawFn) -> LoopNest:
    def buffer(name: str) -> Buffer:
        kind = draw(types())
        dtype = BUFFERS[name]
        return Buffer(
            name, kind.shape, kind.strides, dtype, draw(st.sampled_from(Scope)), draw(st.sampled_from([0, 16]))
        )

    def loop(inner: st.SearchStrategy[Block | Loop]) -> st.SearchStrategy[Block | Loop]:
        bodies = st.lists(inner, max_size=2).map(tuple)
        return st.sampled_from(LoopKind).flatmap(
            lambda kind: st.builds(
                Loop, st.sampled_from(SYMBOLS[2:4]), indices(), bodies, st.just(kind), notes(Place.LOOP, kind)
            )
        )

    body = draw(st.lists(st.recursive(blocks(), loop, max_leaves=2), max_size=2))
    params, local = tuple(map(buffer, ("x", "y"))), tuple(map(buffer, draw(st.sampled_from([(), ("add", "z")]))))
    return LoopNest("f", params, ("y",), tuple(body), local, draw(TABLE), draw(notes(Place.NEST)))


def constants() -> st.SearchStrategy[Constant]:
    told = st.builds(lambda kind, digest: Constant(kind, digest=digest), types(), st.sampled_from(["", "0f" * 32]))
    return st.one_of(told, st.builds(Constant, st.text(max_size=4)))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    def kind(name: str) -> TensorType:
        t = draw(types())
        return TensorType(t.shape, t.strides, BUFFERS.get(name, t.dtype), t.device)

    m = draw(st.sampled_from(sorted(MONOIDS)).map(MONOIDS.get))
    parts = tuple(f"part{k}" for k in range(len(m.components)))
    nodes = [
        Compute("y", kind("y"), draw(st.sampled_from([(), (i0,), (i0, i1)])), draw(values())),
        Reduction(
            parts, tuple(map(kind, parts)), (i0,), (r0,), (draw(indices()),), m, tuple(draw(values()) for _ in parts)
        ),
        View(
            "add",
            kind("add"),
            "y",
            (i0,),
            tuple(draw(st.lists(st.one_of(indices(), values()), max_size=2))),
            draw(indices()),
        ),
        Library(
            (),
            (),
            "aten::op.out",
            (Ref("x"), draw(NUMBERS)),
            (("a", (draw(indices()),)),),
            draw(st.text(max_size=5)),
            rounded=draw(st.booleans()),
            refused=draw(st.booleans()),
        ),
        CallTensor(("z", "w"), (kind("z"), kind("w")), "g", ("x", "y"), (draw(indices()),)),
    ]
    outputs = tuple(draw(st.lists(st.one_of(st.sampled_from(["x", "y", "z"]), indices(), st.none()), max_size=3)))
    inputs = (Input("x", kind("x"), draw(st.booleans())), SizeInput("k", draw(indices())))
    named = draw(st.dictionaries(st.text(max_size=4), constants(), max_size=2))
    return Graph("main", inputs, tuple(nodes), outputs, draw(TABLE), named)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(nests())
def test_any_nest_is_read_back(nest: LoopNest) -> None:
    assert parse(show(nest)) == nest


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_any_graph_is_read_back(graph: Graph) -> None:
    assert parse(show(graph)) == graph


NUMBERS_OF = {
    torch.complex64: [[1.5 - 2j, complex(float("nan"), -0.0)], [0j, 1j]],
    torch.bool: [[True, False], [False, True]],
    torch.uint64: [[2**64 - 1, 0], [1, 2]],
}


def with_constants(**constants: Constant) -> Graph:
    return Graph("main", (), (), (), constants=constants)


@pytest.mark.parametrize("dtype", [d.torch for d in DType if d is not DType.COMPLEX32], ids=str)
def test_small_tensors_are_numbers_in_the_text(dtype: torch.dtype) -> None:
    numbers = NUMBERS_OF.get(dtype, [[1, 2], [0, 4]])
    if dtype.is_floating_point and dtype is not torch.float8_e8m0fnu:
        numbers = [[-1.5, float("nan")], [0.0, 0.125]]
    value = torch.tensor(numbers, dtype=dtype).t()
    whole = [*map(sympy.Integer, (2, 2))]
    kind = TensorType(tuple(whole), (sympy.S.One, whole[0]), DType.from_torch(dtype), "cuda:1")
    graph = with_constants(weight=Constant.of(value, kind))
    text = show(graph)
    assert "sha256" not in text
    found = parse(text)
    assert isinstance(found, Graph) and found == graph
    again = found.constants["weight"].value
    assert again.dtype is dtype and again.stride() == (1, 2) and digest_of(again) == digest_of(value)


def test_large_tensors_are_digests_and_other_objects_types() -> None:
    kind = TensorType((sympy.Integer(100),), (sympy.S.One,), DType.FLOAT32)
    value = torch.randn(100)
    graph = with_constants(a=Constant.of(value, kind), b=Constant.of(len))
    found = parse(show(graph))
    assert isinstance(found, Graph) and found == graph
    assert found.constants["a"].digest == digest_of(value) and found.constants["a"].value is None
    assert found.constants["b"] == Constant("builtin_function_or_method")
    assert found != with_constants(a=Constant.of(value + 1, kind), b=Constant.of(len))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("constant('a', float32[2], [1, 2, 3])", "the elements of float32[2] as lists in lists, found '[1, 2, 3]'"),
        ("constant('a', float32[2], ['x', 'y'])", "the elements of float32[2]"),
        ("constant('a', float32[2], [1, 2], sha256='')", "expected constant(name, type, elements)"),
        ("constant('a', 'f')\n    constant('a', 'f')", "one constant called 'a'"),
        ("library('aten::f', [], (), 'why', hidden)", "after the reason one of refused, rounded"),
    ],
)
def test_constants_and_marks_that_are_none(line: str, says: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(f"@graph\ndef main():\n    {line}\n    return ()\n")
    assert says in str(caught.value)


def test_calls_in_place_and_over_tables_keep_their_text() -> None:
    kind = TensorType((sympy.Integer(4),), (sympy.S.One,), DType.FLOAT32)
    inputs = tuple(Input(n, kind) for n in ("p", "q", "g"))
    one = CallTensor(("a", "b"), (kind, kind), "f", ("p", "g"), (), (), ("p", None))
    many = CallTensor(("c", "d"), (kind, kind), "f", ("q", "a", "b", "g"), (), (), (None, None), 2)
    graph = Graph("main", inputs, (one, many), ("b", "c"))
    assert parse(show(graph)) == graph
    assert [c.args for c in many.calls()] == [("q", "a"), ("b", "g")] and one.fresh == (False, True)
