"""Control flow in LLVM: a counting loop, and what is done where a condition holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .builder import Val
from .context import Context


@contextmanager
def runtime_loop(ctx: Context, low: str, high: str, written: frozenset[str] | None = None) -> Iterator[str]:
    """A loop over low <= i < high, which is known to run at least once; gives the name of i. It writes ``written``."""
    b = ctx.b
    with ctx.inside(is_loop=True, written=written):
        head, latch, done = b.fresh("head"), b.fresh("latch"), b.fresh("done")
        before = b.block
        b.branch(head)
        b.label(head)
        name, following = b.fresh("i"), b.fresh("next")
        b.line(f"{name} = phi i64 [ {low}, %{before} ], [ {following}, {latch} ]")
        yield name
        b.branch(latch)
        b.label(latch)
        b.line(f"{following} = add nuw nsw i64 {name}, 1")
        more = b.fresh("more")
        b.line(f"{more} = icmp slt i64 {following}, {high}")
        b.line(f"br i1 {more}, label {head}, label {done}")
        b.label(done)


@contextmanager
def branch(ctx: Context, condition: Val, written: frozenset[str]) -> Iterator[None]:
    """What is done where a scalar condition holds."""
    b = ctx.b
    with ctx.inside(written=written):
        body, done = b.fresh("then"), b.fresh("end")
        b.line(f"br {condition}, label {body}, label {done}")
        b.label(body)
        yield
        b.branch(done)
        b.label(done)
