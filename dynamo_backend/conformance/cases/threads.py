"""Several threads that call one compiled function, and processes that were forked."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import NotApplicable, Violation, expect, within
from ..kit.processes import anew
from ..kit.subject import Subject
from ..kit.waiting import ended
from .autograd import SHAPE, curve, gradient_of_curve, points

THREADS, CALLS = 4, 12


def together(subject: Subject, work: Callable[[int], str]) -> None:
    """``work`` on several threads at once, which begin together. Each tells what is wrong, or ""."""
    told: list[str] = []
    gate = threading.Barrier(THREADS)

    def body(number: int) -> None:
        try:
            gate.wait(subject.patience)
            told.append(work(number))
        except BaseException as error:
            told.append(f"raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(THREADS)]
    for t in threads:
        t.start()

    def done(pause: float) -> bool:
        time.sleep(pause / 5)
        return not any(t.is_alive() for t in threads)

    why = ended(done, subject.patience)
    expect(not why, f"{THREADS - len(told)} of {THREADS} threads {why}")
    expect(not any(told), next((t for t in told if t), ""))


def work(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1).cumsum(0) + x.sum()


def compared(compiled: Callable[..., Tensor], rows: Callable[[int, int], int]) -> Callable[[int], str]:
    def body(number: int) -> str:
        for i in range(CALLS):
            generator = torch.Generator().manual_seed(number * 100 + i)
            x = torch.randn(rows(number, i), 40, generator=generator)
            if told := unequal(compiled(x), work(x), 10):
                return f"thread {number}, call {i}: the result {told}"
        return ""

    return body


@case("Threads that call one function get one another's results.", "Servers call models from many threads.")
def one_function_in_many_threads(subject: Subject) -> None:
    compiled = subject.compile(work, fullgraph=True)
    compiled(torch.randn(8, 40))
    together(subject, compared(compiled, lambda number, i: 8))


@case("Threads that meet new sizes compile at once, and wrongly.", "The first requests of a server come together.")
def compiling_in_many_threads(subject: Subject) -> None:
    together(subject, compared(subject.compile(work, dynamic=False), lambda number, i: 8 + number % 2))


@case("Threads of symbolic sizes read one another's sizes.", "Arenas and sizes are kept between calls.")
def sizes_in_many_threads(subject: Subject) -> None:
    compiled = subject.compile(work, dynamic=True, fullgraph=True)
    for n in (7, 9):
        compiled(torch.randn(n, 40))
    together(subject, compared(compiled, lambda number, i: 5 + number * 3 + i))


@case("Threads that train one function mix what they saved.", "Data-parallel threads share a module.")
def training_in_many_threads(subject: Subject) -> None:
    compiled = subject.compile(curve, fullgraph=True)
    compiled(points()).sum().backward()

    def body(number: int) -> str:
        for i in range(CALLS):
            x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number * 100 + i)).requires_grad_()
            compiled(x).sum().backward()
            assert x.grad is not None
            if told := unequal(x.grad, gradient_of_curve(x)):
                return f"thread {number}, call {i}: the gradient {told}"
        return ""

    together(subject, body)


@case("The grad mode of one thread holds for another.", "It is each thread's own.")
def modes_are_each_threads(subject: Subject) -> None:
    compiled = subject.compile(lambda x: x * 2)
    x = torch.randn(4, requires_grad=True)

    def body(number: int) -> str:
        for _ in range(CALLS):
            with torch.set_grad_enabled(number % 2 == 0):
                needs = compiled(x).requires_grad
            if needs != (number % 2 == 0):
                return f"a result {'needs' if needs else 'needs no'} gradient in a thread where grad mode is the other"
        return ""

    together(subject, body)


@case("A function that was compiled elsewhere does not run in a new thread.", "State is kept for one thread alone.")
def another_thread(subject: Subject) -> None:
    compiled = subject.compile(work, fullgraph=True)
    x = torch.randn(8, 40)
    first = within(subject.patience, "compiling in a thread", lambda: compiled(x))
    told = unequal(compiled(x), first) or unequal(
        within(subject.patience, "a call in a thread", lambda: compiled(x)), first
    )
    expect(not told, f"the result of another thread {told}")


def in_a_fork(subject: Subject, run: Callable[[], str]) -> None:
    """``run`` in a child of this process, with one thread as workers of data loaders have. It tells what is wrong."""
    if not hasattr(os, "fork"):
        raise NotApplicable("this system has no fork")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        told = "the child did not answer"
        try:
            os.close(reading)
            torch.set_num_threads(1)
            told = run()
        except BaseException as error:
            told = f"the child raised {type(error).__name__}: {error}"
        finally:
            os.write(writing, pickle.dumps(told[:2000]))
            os._exit(0)
    os.close(writing)

    def done(pause: float) -> bool:
        time.sleep(pause / 5)
        return os.waitpid(child, os.WNOHANG)[0] != 0

    if why := ended(done, subject.patience):
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
        raise Violation(f"a forked child {why}")
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    expect(bool(answer), "a forked child died")
    told = pickle.loads(answer)
    expect(not told, told)


@case(
    "A child that was forked hangs in what its parent compiled.",
    "Threads and locks of the parent are not there.",
    starts_processes=True,
)
def forked_child_calls(subject: Subject) -> None:
    torch.set_num_threads(1)  # as in the child, which would compile anew otherwise
    compiled = subject.compile(work, dynamic=False)
    big = torch.randn(600, 40)
    wanted = work(big)
    compiled(big)
    in_a_fork(subject, lambda: told if (told := unequal(compiled(big), wanted, 10)) else "")


@case("A child that was forked cannot compile.", "Workers of data loaders meet new sizes.", starts_processes=True)
def forked_child_compiles(subject: Subject) -> None:
    compiled = subject.compile(work, dynamic=False)
    compiled(torch.randn(9, 40))
    x = torch.randn(11, 40)
    wanted = work(x)
    in_a_fork(subject, lambda: told if (told := unequal(compiled(x), wanted, 10)) else "")


@case(
    "A child that was forked draws the numbers of its parent.",
    "All workers augment alike after their seeds.",
    starts_processes=True,
)
def forked_child_draws_by_its_seed(subject: Subject) -> None:
    torch.set_num_threads(1)
    compiled = subject.compile(lambda x: torch.rand_like(x))
    x = torch.ones(50)
    torch.manual_seed(1)
    first = compiled(x)
    torch.manual_seed(2)
    second = compiled(x)

    def run() -> str:
        torch.manual_seed(2)
        mine = compiled(x)
        if torch.equal(mine, first):
            return "a child with seed 2 draws the numbers of seed 1"
        return "" if torch.equal(mine, second) else "a child with seed 2 draws other numbers than its parent with it"

    in_a_fork(subject, run)


def spawned(name: str, options: Mapping[str, Any], x: Tensor, answer: Connection) -> None:
    """What a process that was started anew makes of ``work``, or what it raises."""
    try:
        made = Subject(name, options).compile(work)(x)
        answer.send(made.numpy())
    except BaseException as error:
        answer.send(f"raised {type(error).__name__}: {error}")


@case(
    "A process that was started anew cannot compile.",
    "Spawned workers read caches that others write.",
    starts_processes=True,
)
def spawned_process_compiles(subject: Subject) -> None:
    """Two at once, which begin with nothing of their parent's but the name of the backend."""
    x = torch.randn(9, 40)
    for got in anew(spawned, (subject.name, dict(subject.options), x), 2 * subject.patience, count=2):
        expect(not isinstance(got, str), f"a process that was started anew {got}")
        told = unequal(torch.from_numpy(got), work(x), 10)
        expect(not told, f"in a process that was started anew the result {told}")


@case("A module trained in threads of a pool loses gradients.", "Backward runs on whatever thread calls it.")
def backward_in_another_thread(subject: Subject) -> None:
    net = nn.Linear(3, 2)
    compiled: Any = subject.compile(net)
    y = compiled(torch.ones(4, 3)).sum()
    within(subject.patience, "a backward in a thread", y.backward)
    bias = net.bias.grad
    expect(bias is not None and torch.equal(bias, torch.full((2,), 4.0)), f"the gradient is {bias}")
