"""The laws of the monoids: identity, associativity (up to rounding where one is not exact), and their answers."""

import functools
import itertools
import math
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import MONOIDS, Monoid
from torch_mlc.ir.expr.value import Call, Cast, Const, Expr, Select, Var, const
from torch_mlc.ir.oracle.ops import converter, function, scalar

F32, I64 = DType.FLOAT32, DType.INT64
State = tuple[np.generic, ...]
# Components' types, by monoid; the rest are one float32.
TYPES = {
    **dict.fromkeys(("argmax", "argmin", "last_argmax", "last_argmin"), (F32, I64)),
    "welford": (F32,) * 3, "moments": (F32,) * 2, "logsumexp": (F32,) * 2, "attention": (F32,) * 3,
    "any": (DType.BOOL,), "all": (DType.BOOL,), "xor": (I64,),
}  # fmt: skip
ODD = [0.0, 1.0, -2.5, 3.0, 80.0, -90.0, math.inf, -math.inf, math.nan]


def evaluate(e: Expr, env: dict[str, np.generic]) -> np.generic:
    match e:
        case Var():
            return env[e.name]
        case Const():
            return scalar(e.value, e.dtype)
        case Cast():
            return converter(e.value.dtype, e.dtype)(evaluate(e.value, env))
        case Call():
            return function(e.fn, e.args[0].dtype, e.dtype)(*(evaluate(a, env) for a in e.args))
        case Select():
            return evaluate(e.if_true if evaluate(e.condition, env) else e.if_false, env)
    raise AssertionError(e)


def types(m: Monoid) -> tuple[DType, ...]:
    return TYPES.get(m.name, (F32,))


def run(m: Monoid, exprs: tuple[Expr, ...], *states: State) -> State:
    env = {f"{k}{i}": v for k, s in enumerate(states) for i, v in enumerate(s)}
    with np.errstate(all="ignore"):
        return tuple(evaluate(e, env) for e in exprs)


def variables(m: Monoid, k: int) -> tuple[Expr, ...]:
    return tuple(Var(f"{k}{i}", d) for i, d in enumerate(types(m)))


def combine(m: Monoid, a: State, b: State) -> State:
    return run(m, m.combine(variables(m, 0), variables(m, 1)), a, b)


def identity(m: Monoid) -> State:
    return tuple(scalar(c.value, c.dtype) for c in m.identity(types(m)))


def whole(x: float) -> int:
    """An integer for each number."""
    return int(x) if math.isfinite(x) else 1 << 40


def lift(m: Monoid, x: float, k: int) -> State:
    """The state of element ``x`` at place ``k``."""
    if m.name in ("any", "all"):
        return (np.bool_(x > 0),)
    if m.name == "xor":
        return (np.int64(whole(x)),)
    args: tuple[Expr, ...] = (const(x, F32),)
    if m.name == "attention":
        args = (const(x, F32), const(float(k), F32))
    elif types(m)[-1] is I64:
        args = (const(x, F32), const(k, I64))
    return run(m, m.lift(*args))


def same(m: Monoid, a: State, b: State, rtol: float = 2e-5) -> None:
    # A state whose greatest is NaN has the answer NaN, whatever else is in it.
    if m.name in ("logsumexp", "attention") and a[0] != a[0] and b[0] != b[0]:
        return
    for p, q in zip(a, b, strict=True):
        if m.exact:
            assert p == q or (p != p and q != q), f"{m.name}: {a} and {b}"
        else:
            np.testing.assert_allclose(float(p), float(q), rtol=rtol, atol=1e-5, err_msg=m.name)


def places(m: Monoid) -> list[float]:
    # Welford's deltas of infinities are NaN, as torch's are; its laws are for finite elements.
    return [x for x in ODD if math.isfinite(x)] if m.name == "welford" else ODD


@pytest.mark.parametrize("m", MONOIDS.values(), ids=lambda m: m.name)
def test_identity(m: Monoid) -> None:
    same(m, combine(m, identity(m), identity(m)), identity(m))
    for k, x in enumerate(places(m)):
        state = lift(m, x, k)
        same(m, combine(m, identity(m), state), state)
        same(m, combine(m, state, identity(m)), state)


@pytest.mark.parametrize("m", MONOIDS.values(), ids=lambda m: m.name)
def test_associativity(m: Monoid) -> None:
    for xs in itertools.product(places(m), repeat=3):
        a, b, c = (lift(m, x, k) for k, x in enumerate(xs))
        same(m, combine(m, combine(m, a, b), c), combine(m, a, combine(m, b, c)))


@pytest.mark.parametrize("m", [m for m in MONOIDS.values() if m.after], ids=lambda m: m.name)
def test_states_in_order_are_combined_alike(m: Monoid) -> None:
    assert m.after is not None
    for x, y in itertools.product(ODD, repeat=2):
        a, b = lift(m, x, 0), lift(m, y, 1)
        for earlier in (identity(m), a):
            same(m, run(m, m.after(variables(m, 0), variables(m, 1)), earlier, b), combine(m, earlier, b))


REFERENCES = {
    "sum": torch.sum, "product": torch.prod, "max": torch.max, "min": torch.min,
    "argmax": lambda x: (torch.max(x), torch.argmax(x)), "argmin": lambda x: (torch.min(x), torch.argmin(x)),
    "last_argmax": lambda x: tuple(r[-1] for r in torch.cummax(x, 0)),
    "last_argmin": lambda x: tuple(r[-1] for r in torch.cummin(x, 0)),
    "any": lambda x: torch.any(x > 0), "all": lambda x: torch.all(x > 0),
    "welford": lambda x: (torch.mean(x), torch.var(x, correction=0)),
    "moments": lambda x: (torch.sum(x), torch.sum(x * x)),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "attention": lambda x: torch.softmax(x, 0) @ torch.arange(len(x), dtype=x.dtype),
    "weighted": torch.sum,
    "xor": lambda x: torch.tensor(functools.reduce(operator.xor, map(whole, x.tolist()))),
}  # fmt: skip


@pytest.mark.parametrize("m", MONOIDS.values(), ids=lambda m: m.name)
@settings(max_examples=25)
@given(data=st.data())
def test_answers_are_torchs_however_the_elements_are_grouped(m: Monoid, data: st.DataObject) -> None:
    finite = st.floats(-20, 20, width=32)
    odd = st.sampled_from([math.nan, math.inf, -math.inf])
    mixed = m.name not in ("welford", "logsumexp", "attention")
    xs = data.draw(st.lists(st.one_of(finite, odd) if mixed else finite, min_size=1, max_size=9))
    states = [lift(m, x, k) for k, x in enumerate(xs)]
    while len(states) > 1:  # neighbours are combined in any order
        k = data.draw(st.integers(0, len(states) - 2))
        states[k : k + 2] = [combine(m, states[k], states[k + 1])]
    got = run(m, m.project(variables(m, 0)), states[0])
    wanted = REFERENCES[m.name](torch.tensor(xs, dtype=torch.float64))
    scale = max((abs(x) for x in xs if math.isfinite(x)), default=1.0)
    for g, w in zip(got, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        np.testing.assert_allclose(float(g), w.item(), rtol=1e-4, atol=1e-5 * (1 + scale), err_msg=f"{m.name} of {xs}")


def test_rows_that_are_masked_out() -> None:
    m = MONOIDS["logsumexp"]
    state = combine(m, lift(m, -math.inf, 0), lift(m, -math.inf, 1))
    assert run(m, m.project(variables(m, 0)), state) == (-math.inf,)
    state = combine(m, state, lift(m, 2.0, 2))
    np.testing.assert_allclose(run(m, m.project(variables(m, 0)), state), 2.0)
