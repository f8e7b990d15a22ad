"""Functions that expressions define: by a loop that goes on while any lane does, or at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ....ir.expr.intrinsics import Definition
from ....ir.expr.iterations import Iteration
from ....ir.expr.value import Expr
from ..text.builder import Builder, Val

Evaluate: TypeAlias = Callable[[Expr, Mapping[str, Val]], Val]


def defined(b: Builder, meaning: Definition, args: tuple[Val, ...], value: Evaluate) -> Val:
    """What an expression of ``args`` is, which have the same lanes."""
    env = {v.name: a for v, a in zip(meaning.args, args, strict=True)}
    for let, e in meaning.lets:
        env[let.name] = value(e, env)
    return b.splat(value(meaning.result, env), args[0].lanes)


def iterate(b: Builder, loop: Iteration, args: tuple[Val, ...], value: Evaluate) -> Val:
    """The loop's result for ``args``, which have the same lanes."""
    env = {v.name: a for v, a in zip(loop.args, args, strict=True)}
    lanes = {v.name: 0 if v.name in loop.counts else args[0].lanes for v in loop.state}
    start = [b.splat(value(e, env), lanes[v.name]) for v, e in zip(loop.state, loop.start, strict=True)]

    def states() -> dict[str, Val]:
        return {v.name: Val(b.fresh(v.name), v.dtype, lanes[v.name]) for v in loop.state}

    outside = states()
    with b.frame(is_loop=True):
        head, body, done = b.fresh("head"), b.fresh("body"), b.fresh("done")
        before = b.block
        inside, following = states(), states()
        b.branch(head)
        b.label(head)
        for first, old, new in zip(start, inside.values(), following.values(), strict=True):
            b.line(f"{old.name} = phi {old.type} [ {first.name}, %{before} ], [ {new.name}, {body} ]")
        active = b.splat(value(loop.condition, env | inside), args[0].lanes)
        b.line(f"br i1 {_any(b, active)}, label {body}, label {done}")
        b.label(body)
        for (name, old), e in zip(inside.items(), loop.step, strict=True):
            new = b.splat(value(e, env | inside), lanes[name])
            if name in loop.kept:
                new = b.select(active, new, old)
            # A name of its own, which the phi above has been told.
            b.line(f"{following[name].name} = select i1 true, {new}, {new}")
        b.branch(head)
        b.label(done)
        for old, last in zip(inside.values(), outside.values(), strict=True):
            b.line(f"{last.name} = phi {last.type} [ {old.name}, {head} ]")
    return b.splat(value(loop.result, env | outside), args[0].lanes)


def _any(b: Builder, active: Val) -> str:
    if not active.lanes:
        return active.name
    return b.call("i1", f"llvm.vector.reduce.or.v{active.lanes}i1", str(active))
