"""The rules of host programs, and what is told where one is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy

from torch_mlc.codegen.host.memory.plan_memory import plan_memory
from torch_mlc.codegen.host.steps.kernel_use import KernelUse
from torch_mlc.codegen.host.steps.program import HostProgram
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.codegen.host.steps.resolved import Pointer, RunKernel
from torch_mlc.codegen.host.steps.step import (
    Allocate,
    BindSize,
    Free,
    HostStep,
    Launch,
    MakeView,
    Repeat,
    Return,
    Reuse,
)
from torch_mlc.codegen.host.steps.write_out_loops import write_out_loops
from torch_mlc.codegen.host.verify import verify_host_program
from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.graph.graph import TensorType

N = symbol("s0")
KIND = TensorType((N,), (sympy.S.One,), DType.FLOAT32)


def launch(*tensors: str) -> Launch:
    return Launch(KernelUse("k0_", ()), tensors, (N,), "cpu")


def program(*steps: HostStep) -> HostProgram:
    return HostProgram("p", ("x",), {"x": KIND}, steps, (N,), table=SymbolTable((Size(N, hint=8),)))


CHAIN = (
    BindSize(N, "x", 0),
    Allocate("a", KIND),
    launch("x", "a"),
    Allocate("b", KIND),
    launch("a", "b"),
    Reuse("c", "a"),
    launch("b", "c"),
    Free(("b",)),
    Allocate("d", KIND),
    launch("c", "d"),
    Free(("c",)),
    MakeView("v", KIND, "d", sympy.S.Zero),
    Return(("d", "v")),
)


def without(at: int) -> tuple[HostStep, ...]:
    return CHAIN[:at] + CHAIN[at + 1 :]


def with_one(at: int, step: HostStep) -> tuple[HostStep, ...]:
    return (*CHAIN[:at], step, *CHAIN[at:])


@pytest.mark.parametrize("form", [plan_memory, resolve, lambda p: resolve(plan_memory(p))])
def test_what_keeps_the_rules(form: Callable[[HostProgram], HostProgram]) -> None:
    verify_host_program(program(*CHAIN))
    verify_host_program(form(program(*CHAIN)))


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (without(0), "step 0: nothing before it gives the size s0"),
        (without(1), "step 1: a stands for nothing there: no step before it makes that"),
        (with_one(4, Free(("a",))), "step 5: a stands for nothing there: step 4 forgot it"),
        (with_one(6, launch("a", "b")), "step 6: a stands for nothing there: step 5 forgot it or took over its memory"),
        (with_one(8, Free(("b",))), "step 8: b stands for nothing there: step 7 forgot it"),
        (with_one(5, MakeView("w", KIND, "a", sympy.S.Zero)), "it takes over the memory of a, which w looks at"),
        (with_one(5, Reuse("y", "x")), "it takes over the memory of x, which the caller has given"),
        (CHAIN[:-1], "a program returns its results in its last step"),
        (with_one(3, CHAIN[-1]), "a program returns its results in its last step"),
    ],
)
def test_a_broken_rule_is_told_with_its_step(steps: tuple[HostStep, ...], told: str) -> None:
    with pytest.raises(VerifyError, match=told):
        verify_host_program(program(*steps))


def test_resolved_pointers_are_what_they_say() -> None:
    resolved = resolve(plan_memory(program(*CHAIN)))

    def lying(step: HostStep) -> HostStep:
        if not isinstance(step, RunKernel):
            return step
        rows = tuple(replace(r, pointers=tuple(Pointer(p.name, False) for p in r.pointers)) for r in step.rows)
        return replace(step, rows=rows)

    with pytest.raises(VerifyError, match="a is an address"):
        verify_host_program(replace(resolved, steps=tuple(map(lying, resolved.steps))))


BODY = (Allocate("h", KIND), launch("c", "w", "h"), Free(("c", "w")))
CARRIED = (("c", "h", "x"),)


def layers(steps: tuple[HostStep, ...], taken: tuple[str, ...] = ("w0", "w1", "w2")) -> HostProgram:
    loop = Repeat(steps, 3, {"w": taken}, {}, CARRIED)
    names = ("x", "w0", "w1", "w2")
    return HostProgram("p", names, dict.fromkeys(names, KIND), (BindSize(N, "x", 0), loop, Return(("h",))), (N,))


def test_steps_that_repeat() -> None:
    p = layers(BODY)
    for form in (p, resolve(p), write_out_loops(p), resolve(write_out_loops(p))):
        verify_host_program(form)
    for steps, told in (
        ((*BODY, Free(("h",))), "h stands for nothing there"),
        (BODY[1:], "h stands for nothing there"),
        ((*BODY, launch("x", "h"), Free(("x",))), "x stands for nothing there: step 5 forgot it"),
    ):
        with pytest.raises(VerifyError, match=told):
            verify_host_program(layers(steps))
    with pytest.raises(VerifyError, match="w is not taken from as many arguments as it repeats"):
        verify_host_program(layers(BODY, ("w0", "w1")))


def test_memory_of_one_time_is_not_that_of_the_next() -> None:
    """What a time is given may live beside what it makes under the same name, and its memory be taken over."""
    body = (Allocate("h", KIND), launch("c", "w", "h"), Reuse("t", "h"), launch("c", "t"), Free(("c", "w")))
    loop = Repeat(body, 3, {"w": ("w0", "w1", "w2")}, {}, (("c", "t", "x"),))
    p = replace(layers(BODY), steps=(BindSize(N, "x", 0), loop, Return(("t",))))
    for form in (p, resolve(p), write_out_loops(p)):
        verify_host_program(form)
