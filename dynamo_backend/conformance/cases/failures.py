"""Errors in the middle: they get out, and leave nothing behind that eager would not."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from ..kit import ops
from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import Violation, expect, within
from ..kit.subject import Subject


def raises(call: Any, what: str) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise Violation(f"{what} did not raise")


def gather(table: Tensor, index: Tensor) -> Tensor:
    return table[index] * 2


@case("An index out of range reads other memory.", "Eager raises; a number that is nobody's is worse.")
def index_out_of_range(subject: Subject) -> None:
    compiled, table = subject.compile(gather, fullgraph=True), torch.randn(4, 3)
    compiled(table, torch.tensor([0, 1]))
    for wrong in ([0, 4], [-5, 0], [1000, 2]):
        raises(lambda wrong=wrong: compiled(table, torch.tensor(wrong)), f"index {wrong} of four rows")


@case("After an error, the next call hangs or is wrong.", "A lock is held, or a plan half done.")
def the_next_call_works(subject: Subject) -> None:
    compiled, table = subject.compile(gather, fullgraph=True), torch.randn(4, 3)
    good, bad = torch.tensor([3, 1]), torch.tensor([0, 9])
    compiled(table, good)
    for _ in range(3):
        raises(lambda: compiled(table, bad), "an index out of range")
        got = within(subject.patience, "a call after one that raised", lambda: compiled(table, good))
        told = unequal(got, gather(table, good))
        expect(not told, f"after an error the result {told}")


@case("An input is half written when a call raises.", "Eager's is as before, or written whole.")
def nothing_is_half_written(subject: Subject) -> None:
    def f(cache: Tensor, table: Tensor, index: Tensor) -> Tensor:
        cache.add_(1)
        picked = table[index]
        cache.mul_(picked.sum())
        return picked

    compiled, table = subject.compile(f, fullgraph=True), torch.ones(4, 3)
    compiled(torch.ones(6), table, torch.tensor([1, 2]))
    cache = torch.ones(6)
    raises(lambda: compiled(cache, table, torch.tensor([1, 7])), "an index out of range")
    allowed = (torch.ones(6), torch.full((6,), 2.0))  # before, and where eager stops
    expect(any(torch.equal(cache, a) for a in allowed), f"the input that eager leaves at 2, or 1, is {cache.tolist()}")


@case("An error of an op of the user's is swallowed.", "Checks are written as ops, and raise.")
def errors_of_ops_get_out(subject: Subject) -> None:
    ops.register()
    compiled = subject.compile(lambda x: ops.checked(x) * 2, fullgraph=True)
    compiled(torch.ones(3))
    error = raises(lambda: compiled(-torch.ones(3)), "an op that raises ValueError")
    told = "".join(map(str, [error, error.__cause__]))
    expect("negative number" in told, f"the op's message is lost: {type(error).__name__}: {str(error)[:200]}")
    compiled(torch.ones(3))


@case("Shapes that do not fit are padded, cut, or crash.", "Eager raises.")
def shapes_that_do_not_fit(subject: Subject) -> None:
    compiled = subject.compile(lambda a, b: a @ b + 1, dynamic=True)
    compiled(torch.randn(3, 4), torch.randn(4, 5))
    raises(lambda: compiled(torch.randn(3, 4), torch.randn(6, 5)), "a product of 3x4 and 6x5")
    told = unequal(compiled(torch.ones(2, 3), torch.ones(3, 2)), torch.full((2, 2), 4.0))
    expect(not told, f"after shapes that do not fit the result {told}")


@case("An error in the backward leaves the forward unusable.", "A trainer catches it, and goes on.")
def error_in_the_backward(subject: Subject) -> None:
    compiled = subject.compile(lambda x: x.sin() * 2, fullgraph=True)
    x = torch.randn(4, 3, requires_grad=True)

    def stop(gradient: Tensor) -> Tensor:
        raise ValueError("stopped by a hook")

    y = compiled(x)
    y.register_hook(stop)
    raises(lambda: y.sum().backward(), "a backward whose hook raises")
    within(subject.patience, "a step after an error in the backward", lambda: compiled(x).sum().backward())
    told = unequal(x.grad, x.detach().cos() * 2) if x.grad is not None else "is None"
    expect(not told, f"after an error in the backward the gradient {told}")


@case("A check of sizes or values that fails is left out.", "torch._check guards what follows.")
def checks_hold(subject: Subject) -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        size = n.item()
        torch._check(size >= 2)
        torch._check(size <= x.shape[0])
        return x.narrow(0, 0, size) * 2  # type: ignore[arg-type]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled, x = subject.compile(f, fullgraph=True), torch.arange(5.0)
        told = unequal(compiled(x, torch.tensor(3)), x[:3] * 2)
        expect(not told, f"the result {told}")
        raises(lambda: compiled(x, torch.tensor(1)), "a check that fails")
        raises(lambda: compiled(x, torch.tensor(9)), "a check that fails")


@case("Dividing integers by zero crashes or gives a number.", "Eager raises.")
def integer_division_by_zero(subject: Subject) -> None:
    compiled = subject.compile(lambda a, b: a // b, fullgraph=True)
    a = torch.tensor([7, -7])
    told = unequal(compiled(a, torch.tensor([2, 2])), torch.tensor([3, -4]))
    expect(not told, f"the quotient {told}")
    raises(lambda: compiled(a, torch.tensor([2, 0])), "a division of integers by zero")


@case("torch's minifier fails on what the backend returns.", "It runs a copy of that, and asks it for parameters.")
def minifier_looks_on(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return (x * y).sin()

    with tempfile.TemporaryDirectory() as folder:
        # At this level it writes to that folder alone.
        how = {"repro_after": "dynamo", "repro_level": 2, "debug_dir_root": folder}
        with torch._dynamo.config.patch(how):
            subject.agrees(f, lambda: (torch.randn(4), torch.randn(4)))
