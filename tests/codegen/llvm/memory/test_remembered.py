"""Index values and offsets that are remembered while a kernel is written: the text is that without, none is stale."""

from __future__ import annotations

import pytest
import sympy

from torch_mlc.codegen.llvm.memory import index
from torch_mlc.codegen.llvm.memory.access import address
from torch_mlc.codegen.llvm.text.builder import Builder, Val
from torch_mlc.codegen.llvm.text.context import BufferPlace, Context
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.runtime.targets import cpu_target

I64 = DType.INT64
P, U, V = symbol("i"), symbol("u"), symbol("v")


def context(**indices: str) -> Context:
    values = {symbol(name): Val(text, I64) for name, text in indices.items()}
    return Context(LoopNest("k", (), (), ()), cpu_target(), Builder("define void @k()"), {}, values)


def test_copies_of_an_unrolled_loop_have_their_own() -> None:
    ctx = context(i="%i", u="1")
    expr = P * 8 + U
    first = index.scalar_index(ctx, expr)
    ctx.indices[U] = Val("2", I64)
    assert index.scalar_index(ctx, expr) != first
    ctx.indices[U] = Val("1", I64)
    assert index.scalar_index(ctx, expr) == first


def test_what_a_loop_made_is_not_known_behind_it() -> None:
    ctx = context(i="%i")
    with ctx.inside(is_loop=True, written=frozenset()):
        ctx.indices[U] = Val(ctx.b.fresh("u"), I64)
        inner = index.scalar_index(ctx, P * 8 + U)
        assert index.scalar_index(ctx, P * 8 + U) == inner
    with ctx.inside(is_loop=True, written=frozenset()):
        ctx.indices[U] = Val(ctx.b.fresh("u"), I64)
        assert index.scalar_index(ctx, P * 8 + U) != inner


def test_a_branch_keeps_what_it_made_to_itself() -> None:
    ctx = context(i="%i")
    name = ctx.b.effect("call i64 @data()")
    ctx.indices[U] = Val(name, I64)
    with ctx.inside(written=frozenset()):
        loaded = ctx.b.load("load i64, ptr %p", "p", None, movable=False)
        ctx.indices[V] = Val(loaded, I64)
        inner = index.scalar_index(ctx, U + V)
    assert ctx.b.recall((U + V, ((U, name), (V, loaded)))) is None
    assert inner.name.startswith("%")


def test_loops_in_another_order_sum_in_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(remembers: bool) -> str:
        ctx = context(u="3", i="%i", v="2")
        if not remembers:
            monkeypatch.setattr(Builder, "remember", lambda *_: None)
        for order in ((U, P, V), (V, P, U), (P, U, V), (U, P, V)):
            ctx.indices = {s: ctx.indices[s] for s in order}
            for expr in (P * 4 + U + V, P * U + V * 8, (P + 1) * 5 + U, P * 4 + U + V):
                index.scalar_index(ctx, sympy.expand(expr))
        return ctx.b.text()

    assert text(True) == text(False)


def test_offsets_follow_bindings_and_layouts() -> None:
    ctx = context(i="%i", v="%v")
    a = symbol("a")
    place = BufferPlace("%x", DType.FLOAT32, (sympy.Integer(64),), (sympy.Integer(2),))
    shifted = BufferPlace("%x", DType.FLOAT32, (sympy.Integer(64),), (sympy.Integer(2),), (sympy.Integer(3),))
    wanted = {(P, place): 2 * P, (V + 1, place): 2 * V + 2, (P, shifted): 2 * P - 6}
    for (binding, where), offset in (*wanted.items(), *wanted.items()):
        ctx.axes = {a: binding}
        assert address(ctx, where, (a,), [None]).offset == offset
