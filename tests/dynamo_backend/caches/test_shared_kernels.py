"""Kernels that several graphs of a process want at the same time."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from torch_mlc.dynamo_backend.caches import surroundings
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.compiling.compiled import CompiledGraph
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.runtime.compile.compilers import Compilers
from torch_mlc.runtime.compile.kernels import KernelCode, KernelStore
from torch_mlc.runtime.settings.options import Options

MAKE = kernels.compile_source


def code(key: str) -> KernelCode:
    return KernelCode(key, key, "llvm", (), b"")


def test_a_key_has_one_future_while_it_is_made() -> None:
    store, begun = KernelStore(None), []

    def begin() -> Future[KernelCode]:
        begun.append(Future())
        return begun[-1]

    first, second, other = store.shared("a", begin), store.shared("a", begin), store.shared("b", begin)
    assert first is second is not other and len(begun) == 2
    begun[0].set_result(code("a"))
    assert first.result(0).key == "a" and store.shared("a", begin) is not first
    begun[1].cancel()
    assert other.cancelled() and len(begun) == 3
    with pytest.raises(ValueError, match="cannot begin"):
        store.shared("c", lambda: (_ for _ in ()).throw(ValueError("cannot begin")))
    failed = store.shared("c", begin)
    begun[3].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failed.result(0)


def test_two_graphs_at_once_make_a_kernel_once() -> None:
    store, going, made = KernelStore(None), threading.Event(), []

    def make() -> KernelCode:
        made.append(going.wait(60))
        return code("a")

    with Compilers() as one, Compilers() as other:
        both = [store.shared("a", lambda c=c: c.start("a", make)) for c in (one, other)]
        going.set()
        assert [b.result(60).key for b in both] == ["a", "a"]
    assert made == [True]


def graph(factor: float) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    given = [torch.rand(5, 5), torch.rand(5, 5)]
    (gm,) = capture(lambda x, w: (((x @ w).sin() @ w).exp() @ w) * factor, given)
    return gm, given


def test_threads_that_compile_at_once_make_what_they_share_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    options = Options(strict=True, cache_dir=tmp_path)
    meeting, made = threading.Barrier(2), Counter()

    def counting(source: Any, target: Any, key: str, *rest: Any) -> KernelCode:
        made[key] += 1
        return MAKE(source, target, key, *rest)

    shared = KernelStore.shared

    def together(store: KernelStore, key: str, begin: Any) -> Future[KernelCode]:
        meeting.wait(300)  # both know that no cache has it
        return shared(store, key, begin)

    monkeypatch.setattr(kernels, "compile_source", counting)
    monkeypatch.setattr(KernelStore, "shared", together)
    # What a test puts into our modules would be part of every key, and what it counts changes.
    monkeypatch.setattr(surroundings, "_process_fingerprint", str)
    graphs = [graph(2.0), graph(3.0)]

    def compiled(k: int) -> CompiledGraph:
        return compile_graph(graphs[k][0], graphs[k][1], options=options, name=f"g{k}")

    with ThreadPoolExecutor(2) as threads:
        for k, found in enumerate(threads.map(compiled, range(2))):
            gm, given = graphs[k]
            assert found.call is not None
            torch.testing.assert_close(found.call(list(given))[0], gm(*given)[0])
    assert len(made) == 4 and set(made.values()) == {1}


def test_what_another_graph_gave_up_is_made_here(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def given_up(store: KernelStore, key: str, begin: Any) -> Future[KernelCode]:
        found: Future[KernelCode] = Future()
        found.cancel()
        return found

    monkeypatch.setattr(KernelStore, "shared", given_up)
    gm, given = graph(2.0)
    found = compile_graph(gm, given, options=Options(strict=True, cache_dir=tmp_path))
    assert found.call is not None
    torch.testing.assert_close(found.call(list(given))[0], gm(*given)[0])
