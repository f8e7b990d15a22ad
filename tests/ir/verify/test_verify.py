"""Each rule refuses what breaks it, showing where; and lets sound programs pass."""

import dataclasses

import pytest
import sympy

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Call, Const, Load, Select, Var, const, symbol
from torch_mlc.ir.graph.graph import Graph, IRModule
from torch_mlc.ir.nest.loops import Block, Loop, LoopNest, Store, map_nodes
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.graph import GRAPH_RULES
from torch_mlc.ir.verify.verify import NEST_RULES, verify

NEST = """
@nest(outputs=['out'])
def f(a: float32[n, 100], out: float32[n]):
    n = size()
    t = local(float32[n])
    for p in parallel(n):
        for qo in serial(4):
            for qi in vectorized(32):
                with block('b0'):
                    i0 = spatial(n, p)
                    r0 = reduction(100, 32*qo + qi)
                    where(32*qo + qi < 100)
                    t[i0] = sum.update(a[i0, r0])
    for u in serial(n):
        with block('b1'):
            i0 = spatial(n, u)
            out[i0] = exp(t[i0])
"""
GRAPH = """
@graph
def main(x: float32[n, 4], at: int64[n], k: size(n)):
    n = size()
    y = compute(float32[n, 4], lambda i0, i1: exp(x[at[i0], i1]))
    z, = reduce(sum, [float32[n]], [4], lambda i0, r0: (y[i0, r0],))
    v = view(tensor(float32, [4, n], strides=[1, 4]), y, lambda i0, i1: (i1, i0))
    w, = call('g', [float32[n]], [z], sizes=[n])
    p, = library('aten::mm.default', [float32[n, n]], (ref('y'), ref('v')), 'matrix product')
    return (w, v, p, size(2*n))
"""
CALLEE = """
@graph
def g(a: float32[m]):
    m = size()
    b = compute(float32[m], lambda i0: neg(a[i0]))
    return (b,)
"""


def change(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def module(*pairs: tuple[str, str]) -> IRModule:
    main, callee = parse(change(GRAPH, *pairs)), parse(CALLEE)
    assert isinstance(main, Graph) and isinstance(callee, Graph)
    return IRModule({"main": main, "g": callee})


def refused(obj: IRModule | LoopNest | Graph, says: str, underlined: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(obj)
    text = str(caught.value)
    assert says in text
    lines = text.split("\n")
    at = next(k for k, line in enumerate(lines) if line.endswith("^ here"))
    marked = lines[at - 1][lines[at].index("^") : lines[at].rindex("^") + 1]
    assert underlined in marked


def test_sound_programs_pass() -> None:
    verify(parse(NEST))
    verify(module())


@pytest.mark.parametrize(
    "old, new, says, underlined",
    [
        ("    t = local", "    a = local(float32[n, 100])\n    t = local", "two buffers are called 'a'", "a = local"),
        ("block('b1')", "block('b0')", "two blocks are called 'b0'", "with block('b0')"),
        ("for u in", "for p in", "two loops run over p", "for p in serial(n)"),
        ("outputs=['out']", "outputs=['out', 'other']", "output 'other' is no parameter", "def f"),
        ("    n = size()\n", "", "nothing binds the symbol n", "a: float32[n, 100]"),
        ("vectorized(32)", "vectorized(n)", "needs a constant extent", "for qi in vectorized(n)"),
        ("spatial(n, u)", "spatial(n, p)", "nothing binds the symbol p", "with block('b1')"),
        ("a[i0, r0]", "a[i0, qi]", "nothing binds the symbol qi", "a[i0, qi]"),
        (
            "                    where(32*qo + qi < 100)\n",
            "",
            "axis r0 of extent 100 is bound to 0..127",
            "r0 = reduction",
        ),
        ("a[i0, r0]", "a[i0]", "a has 2 dimensions, indexed by 1", "a[i0]"),
        ("exp(t[i0])", "exp(load(q[i0], float32))", "nothing above defines 'q'", "load(q[i0], float32)"),
        ("exp(t[i0])", "load(t[i0], float64)", "loaded as float64", "load(t[i0], float64)"),
        ("exp(t[i0])", "lt(t[i0], t[i0])", "out holds float32, the value is bool", "lt(t[i0], t[i0])"),
        ("exp(t[i0])", "add(t[i0], float64(1.0))", "add of mixed types float32, float64", "add(t[i0]"),
        ("exp(t[i0])", "add(t[i0])", "add takes 2 arguments, here 1", "add(t[i0])"),
        ("exp(t[i0])", "select(t[i0], t[i0], t[i0])", "a condition is bool", "t[i0]"),
        (
            "exp(t[i0])",
            "select(bool(True), t[i0], cast(t[i0], float64))",
            "the branches are float32 and float64",
            "select(",
        ),
        ("exp(t[i0])", "index(i0, float32)", "an index is an integer", "index(i0, float32)"),
        ("exp(t[i0])", "a[i0, i0 + 100*n + t[i0]]", "expected", ""),
        ("exp(t[i0])", "a[i0, t[i0]]", "a gather's index is an integer", "t[i0]"),
        ("exp(t[i0])", "a[i0, 100]", "runs over 100..100", "a[i0, 100]"),
        ("exp(t[i0])", "var('v', float32)", "nothing binds the value v", "var('v', float32)"),
        ("exp(t[i0])", "float32(1)", "a int is no literal of float32", "float32(1)"),
        ("t[i0] = sum.update(a[i0, r0])", "t[i0] = logsumexp.update(a[i0, r0])", "logsumexp has 2 components", "t[i0]"),
        ("t[i0] = sum.update(a[i0, r0])", "t[i0] = a[i0, r0]", "a store in a block with a reduction axis", "t[i0] = a"),
        (
            "t[i0] = sum.update(a[i0, r0])",
            "a[i0, r0] = sum.update(a[i0, r0])",
            "a is an input, and is written",
            "block('b0')",
        ),
        ("out[i0] = ", "t[i0] = ", "nothing writes the output out", "out: float32[n]"),
        ("for p in parallel(n)", "for p in vectorized(32)", "", ""),
    ],
    ids=str,
)
def test_rules_of_nests(old: str, new: str, says: str, underlined: str) -> None:
    if says == "expected":
        with pytest.raises(Exception, match="expected"):
            parse(change(NEST, (old, new)))
        return
    if not says:
        verify(parse(change(NEST, (old, new))))
        return
    refused(parse(change(NEST, (old, new))), says, underlined)


def test_reading_before_writing() -> None:
    nest = parse(NEST)
    assert isinstance(nest, LoopNest)
    refused(dataclasses.replace(nest, body=nest.body[::-1]), "t is read before anything writes it", "t[i0]")


@pytest.mark.parametrize(
    "kinds, says",
    [
        (("parallel", "parallel"), "a parallel loop inside another"),
        (("vectorized", "parallel"), "a parallel loop inside a vectorized loop"),
        (("thread_x", "block_x"), "a blockIdx.x loop inside a threadIdx.x loop"),
        (("parallel", "block_x"), "parallel is a CPU's kind of loop"),
        (("block_x", "block_y"), ""),
        (("block_x", "thread_x"), ""),
        (("serial", "parallel"), ""),
    ],
)
def test_nesting_of_kinds(kinds: tuple[str, str], says: str) -> None:
    nest = parse(
        "@nest(outputs=['x'])\ndef f(x: float32[4, 4]):\n"
        f"    for a in {kinds[0]}(4):\n        for b in {kinds[1]}(4):\n"
        "            with block('k'):\n                i = spatial(4, a)\n                j = spatial(4, b)\n"
        "                x[i, j] = float32(0.0)\n"
    )
    if says:
        refused(nest, says, "for b in")
    else:
        verify(nest)


def test_a_symbol_of_other_assumptions_is_another_symbol() -> None:
    nest = parse(NEST)
    other = sympy.Symbol("u", integer=True)

    def swap(node: Loop | Block) -> Loop | None:
        return dataclasses.replace(node, var=other) if isinstance(node, Loop) and node.var == symbol("u") else None

    refused(dataclasses.replace(nest, body=map_nodes(nest.body, swap)), "is not ir.expr.value.symbol('u')", "for u in")


def test_a_guarded_load_may_be_out_of_range() -> None:
    verify(parse(change(NEST, ("exp(t[i0])", "select(lt(index(i0, int64), int64(0)), a[i0, 100], t[i0])"))))


@pytest.mark.parametrize(
    "old, new, says, underlined",
    [
        (
            "    y = c",
            "    x = compute(float32[n, 4], lambda i0, i1: x[i0, i1])\n    y = c",
            "'x' is defined twice",
            "x = compute",
        ),
        ("z, = reduce", "y, = reduce", "'y' is defined twice", "y, = reduce"),
        ("[z], sizes", "[q], sizes", "nothing above defines 'q'", "w, = call"),
        ("return (w, v", "return (q, v", "the output 'q' is not defined", "def main"),
        ("float32[n, n]", "float32[n, s9]", "nothing binds the symbol s9", "p, = library"),
        ("compute(float32[n, 4]", "compute(float32[n]", "2 axes and a shape of 1", "y = compute"),
        ("exp(x[at[i0], i1])", "exp(x[i0, i1 + 1])", "runs over 1..4", "x[i0, i1 + 1]"),
        ("exp(x[at[i0], i1])", "cast(x[i0, i1], float64)", "the node is float32, its value float64", "cast("),
        ("reduce(sum", "reduce(logsumexp", "logsumexp has 2 components", "z, = reduce"),
        ("[4], lambda i0, r0", "[4, 1], lambda i0, r0", "0 axes and a shape of 1", "z, = reduce"),
        ("lambda i0, i1: (i1, i0)", "lambda i0, i1: (i1,)", "y has 2 dimensions, indexed by 1", "v = view"),
        (
            "tensor(float32, [4, n], strides=[1, 4]), y",
            "tensor(int32, [4, n], strides=[1, 4]), y",
            "a view of float32 as int32",
            "v =",
        ),
        ("call('g'", "call('h'", "the module has no function 'h'", "w, = call"),
        ("[z], sizes", "[y], sizes", "g has arguments (float32 of 1 dimensions), here (float32 of 2", "w, = call"),
        ("sizes=[n]", "sizes=[]", "g has 1 sizes, here 0", "w, = call"),
        ("aten::mm.default", "mm", "'mm' names no op", "p, = library"),
    ],
    ids=str,
)
def test_rules_of_graphs(old: str, new: str, says: str, underlined: str) -> None:
    refused(module((old, new)), says, underlined)


def test_unknown_functions_and_bad_literals_built_by_hand() -> None:
    nest = parse(NEST)

    def with_value(value: object) -> LoopNest:
        def swap(node: Loop | Block) -> Block | None:
            if isinstance(node, Block) and node.name == "b1":
                return dataclasses.replace(node, body=(Store("out", (symbol("i0"),), value),))  # type: ignore[arg-type]
            return None

        return dataclasses.replace(nest, body=map_nodes(nest.body, swap))

    load = Load("t", (symbol("i0"),), DType.FLOAT32)
    refused(with_value(Call("gelu", (load,), DType.FLOAT32)), "no function 'gelu'", "gelu(t[i0]")
    refused(with_value(Call("exp", (load,), DType.FLOAT64)), "exp gives float32, said to be float64", "exp(")
    refused(with_value(Const(True, DType.FLOAT32)), "a bool is no literal", "float32(True)")
    refused(
        with_value(Select(const(True, DType.BOOL), load, Var("v", DType.FLOAT32))), "nothing binds the value v", "var("
    )


@pytest.mark.parametrize(
    "factor",
    [
        "select(lt(a[i0, r0], float32(3.0)), c[()], a[i0, r0])",
        "select(lt(a[i0, r0], float32(3.0)), float32(0.0), c[()])",
    ],
)
def test_a_choice_is_a_factor_of_a_product(factor: str) -> None:
    text = f"""
@nest(outputs=['y'])
def f(a: tensor(float32, [24, 63]), c: tensor(float32, []), b: tensor(float32, [24, 63]), y: tensor(float32, [24])):
    for k in serial(24):
        for n in serial(63):
            with block('b0', role=product):
                i0 = spatial(24, k)
                r0 = reduction(63, n, dim=inner)
                y[i0] = sum.update(mul({factor}, b[i0, r0]))
"""
    verify(parse(text))
    refused(parse(text.replace("b[i0, r0]", "b[i0, 0]")), "b0 is no product", "b0")


def test_the_entry_is_a_graph() -> None:
    with pytest.raises(VerifyError, match="entry 'main' is no graph"):
        verify(IRModule({"g": parse(CALLEE)}))


def test_long_functions_are_shown_around_the_fault() -> None:
    lines = "".join(f"    y{k} = compute(float32[4], lambda i0: exp(x[i0]))\n" for k in range(200))
    graph = parse(
        f"@graph\ndef f(x: float32[4]):\n{lines}    z = compute(float32[4], lambda i0: x[i0 + 1])\n    return (z,)"
    )
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    assert str(caught.value).count("\n") < 40
    assert "^ here" in str(caught.value) and "hint: guard the load" in str(caught.value)


def test_every_rule_says_what_it_asks() -> None:
    assert all(rule.__doc__ for rule in (*NEST_RULES, *GRAPH_RULES))
