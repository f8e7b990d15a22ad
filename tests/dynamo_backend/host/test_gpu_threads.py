"""Programs on GPUs in threads that have no context yet, as autograd's and users' have none, over a driver that the CPU
plays and that refuses to load and to launch there."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from tests.dynamo_backend.played_programs import alternate, momentum, rand
from tests.runtime.played_driver import PlayedLibrary

pytest.importorskip("triton")
Work = Callable[[], None]


def in_a_users_thread(work: Work) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join()


def in_a_foreign_thread(work: Work) -> None:
    """A thread that Python has not begun, as autograd's are."""
    entry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: work() or 0)
    process, thread = ctypes.CDLL(None), ctypes.c_ulong()
    assert process.pthread_create(ctypes.byref(thread), None, entry, None) == 0
    process.pthread_join(thread, None)


def in_a_thread_each(work: Work) -> None:
    """As DataParallel does: replicas at once."""
    threads = [Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


THREADS = [in_a_users_thread, in_a_foreign_thread, in_a_thread_each]


@pytest.mark.parametrize("form", ["python", "machine"])
@pytest.mark.parametrize("start", THREADS)
@pytest.mark.parametrize("loaded_before", [False, True])
def test_a_thread_without_a_context_loads_and_launches(
    both: Any, played: PlayedLibrary, start: Callable[[Work], None], form: str, loaded_before: bool
) -> None:
    program = both(alternate, (30, 20))
    call, x, found = getattr(program, form), rand(30, 20), list[torch.Tensor]()
    if loaded_before:
        call([x])
    played.refused.clear()

    def work() -> None:
        assert not played.context
        found.append(call([x])[0])
        found.append(call([x])[0])

    start(work)
    assert len(found) in (2, 6) and not played.errors
    for result in found:
        torch.testing.assert_close(result, alternate(x)[0])
    # Where programs begin: no launch had to be refused first.
    assert not played.refused


@pytest.mark.parametrize("form", ["python", "machine"])
@pytest.mark.parametrize("start", THREADS)
def test_tables_in_a_thread_without_a_context(
    both: Any, played: PlayedLibrary, start: Callable[[Work], None], form: str
) -> None:
    shapes = [(k + 2, 3) for k in range(6)]
    call = getattr(both(momentum, *shapes, *shapes), form)
    args = [rand(*s) for s in (*shapes, *shapes)]
    found: list[Any] = []
    start(lambda: found.append(call([*args])))
    assert len(found) in (1, 3) and not played.errors
    for results in found:
        torch.testing.assert_close([*results], [*momentum(*args)])


@pytest.mark.parametrize("start", THREADS)
def test_a_kernel_by_itself_launches_in_any_thread(
    both: Any, played: PlayedLibrary, start: Callable[[Work], None]
) -> None:
    """What measures and tunes calls kernels with no program around them."""
    (kernel,) = both(lambda x: (x * 2,), (30, 20)).kernels.values()
    x, outs = rand(30, 20), list[torch.Tensor]()

    def work() -> None:
        for _ in range(2):
            out = torch.empty(30, 20)
            kernel.call([x, out])
            outs.append(out)

    work()
    start(work)
    assert len(outs) in (4, 8)
    for out in outs:
        torch.testing.assert_close(out, x * 2)


def test_a_gpu_that_is_not_current_is_so_for_a_launch_alone(both: Any, played: PlayedLibrary) -> None:
    (kernel,) = both(lambda x: (x * 2,), (30, 20)).kernels.values()
    x = rand(30, 20)

    def work(device: int) -> None:
        out = torch.empty(30, 20)
        kernel.owner.at(device, x.data_ptr(), out.data_ptr())
        torch.testing.assert_close(out, x * 2)

    for before in (0, 100, 101):
        played.context = before
        for device in (1, 0, 1, 2):
            work(device)
            # Only a thread that had none is given one, that of the GPU that torch takes for its current one.
            assert played.context == before or (before == 0 and played.context == 100)
    assert {h % 100 for h in played.homes} == {0, 1, 2}


@pytest.mark.parametrize("form", ["python", "machine"])
@pytest.mark.parametrize("before", [0, 100, 101])
def test_a_program_on_another_gpu_runs_there_and_leaves_the_thread_where_it_was(
    both: Any, played: PlayedLibrary, before: int, form: str
) -> None:
    call = getattr(both(alternate, (30, 20), device="cuda:1"), form)
    x, found, after = rand(30, 20), list[torch.Tensor](), list[int]()

    def work() -> None:
        for _ in range(2):
            played.context = before
            found.append(call([x])[0])
            after.append(played.context % 100)

    in_a_users_thread(work)
    assert len(found) == 2 and not played.errors and {h % 100 for h in played.homes} == {1}
    for result in found:
        torch.testing.assert_close(result, alternate(x)[0])
    assert after == [before % 100] * 2


def test_a_context_of_the_users_choice_stays(both: Any, played: PlayedLibrary) -> None:
    """One that is not torch's, on the same GPU."""
    program = both(alternate, (30, 20))
    x = rand(30, 20)
    played.context = 200  # one more of GPU 0
    for call in (program.python, program.machine):
        torch.testing.assert_close(call([x])[0], alternate(x)[0])
    assert played.context == 200


def test_what_the_driver_says_of_a_context_is_told(both: Any, played: PlayedLibrary) -> None:
    program = both(alternate, (30, 20))
    program.python([rand(30, 20)])
    played.no_contexts = True
    told: list[str] = []

    def work(call: Any) -> None:
        try:
            call([rand(30, 20)])
        except Exception as error:
            told.append(str(error))

    for call in (program.python, program.machine):
        in_a_users_thread(partial(work, call))
    assert len(told) == 2 and all("could not use GPU 0: out of memory" in t for t in told)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("host", ["python", "native"])
def test_the_first_backward_of_a_process_on_a_gpu(host: str) -> None:
    """Nothing but our kernels runs in autograd's thread."""
    script = f"""
import torch
fn = torch.compile(lambda x: x.softmax(0).softmax(1), backend="mlc", options={{"host_program": "{host}"}})
x = torch.randn(30, 20, device="cuda", requires_grad=True)
fn(x).backward(torch.randn(30, 20, device="cuda"))
torch.cuda.synchronize()
assert x.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
