"""Kernels that are made beside the thread that asks for them."""

from __future__ import annotations

import threading

import pytest

from torch_mlc.runtime.compile.compilers import Compilers
from torch_mlc.runtime.compile.kernels import KernelCode


def code(key: str) -> KernelCode:
    return KernelCode(key, key, "llvm", (), key.encode())


def test_code_is_made_by_one_thread_in_order_while_the_caller_goes_on():
    going, order = threading.Event(), []

    def make(key: str) -> KernelCode:
        assert going.wait(60)
        order.append((key, threading.current_thread()))
        return code(key)

    with Compilers() as compilers:
        started = [compilers.start(k, lambda k=k: make(k)) for k in "abc"]
        assert not any(s.done() for s in started) and compilers.making("b") is started[1]
        going.set()
        assert [s.result(60).key for s in started] == ["a", "b", "c"]
    assert [key for key, _ in order] == ["a", "b", "c"]
    (thread,) = {thread for _, thread in order}
    assert thread is not threading.main_thread() and not thread.is_alive()


@pytest.mark.parametrize(
    "compilers, gpu",
    [(Compilers(beside=False), False), (Compilers(), True), (Compilers(beside=False, workers=2), True)],
)
def test_where_nobody_is_beside_the_caller_it_makes_the_code_at_once(compilers, gpu):
    def make() -> KernelCode:
        assert threading.current_thread() is threading.main_thread()
        return code("a")

    with compilers:
        assert compilers.start("a", make, gpu=gpu).result(0).key == "a"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("gpu", [False, True])
def test_errors_are_raised_where_the_code_is_wanted(gpu, workers):
    def make() -> KernelCode:
        raise ValueError("no")

    with Compilers(workers=workers) as compilers:
        started = compilers.start("a", make, gpu=gpu)
        with pytest.raises(ValueError, match="no"):
            started.result(60)


def test_what_nobody_waits_for_is_not_begun():
    going, made = threading.Event(), []

    def make() -> KernelCode:
        made.append(going.wait(60))
        return code("a")

    with pytest.raises(KeyboardInterrupt), Compilers() as compilers:
        started = [compilers.start(k, make) for k in "abc"]
        while not started[0].running():
            pass
        threading.Timer(0.05, going.set).start()
        raise KeyboardInterrupt
    assert len(made) == 1 and all(s.cancelled() for s in started[1:])
