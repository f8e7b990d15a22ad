"""Errors of a program name the line of the model at hand, whoever compiled the program first."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config

from tests.versions import torch_mends_it
from torch_mlc.codegen.host.steps.lines import place_text, places_in, program_with_lines, with_lines
from torch_mlc.ir.errors import DivisionByZeroError, FreedInputError, OutOfRangeError
from torch_mlc.ir.graph.graph import Origin
from torch_mlc.runtime.counters import counters

SOURCE = """
import torch

def run(x, i, y):
    rows = x.sin()[i] * (i * 6 // i)[:, None]
    return rows.sum(0), torch.fft.rfft(y)
"""
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty folders for both caches, and nothing in memory."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "mlc"))
    torch._dynamo.reset()
    with functorch_config.patch(enable_autograd_cache=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def model_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, str], Fn]:
    """The program of a source that begins so many lines further down in a file of some name."""

    def load(name: str, down: int, source: str = SOURCE) -> Fn:
        path = tmp_path / f"{name}.py"
        path.write_text("#\n" * down + source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module.run  # type: ignore[no-any-return]

    return load  # type: ignore[return-value]


def told(error: BaseException) -> str:
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def errors(fn: Fn, training: bool, **how: Any) -> Iterator[tuple[type[Exception], str]]:
    """What a compiled program tells of each kind of wrong call."""
    run = torch.compile(fn, backend="mlc", **how)
    x, i, y = torch.randn(6, 4), torch.tensor([1, 2, 3]), torch.randn(4, 4)
    x.requires_grad_(training)
    out = run(x, i, y)
    if training:
        out[0].sum().backward()
    freed = y.clone()
    freed.untyped_storage().resize_(0)
    for wrong in ((x, torch.tensor([1, 2, 9]), y), (x, torch.tensor([1, 0, 2]), y), (x, i, freed)):
        with pytest.raises((OutOfRangeError, DivisionByZeroError, FreedInputError)) as caught:
            run(*wrong)
        yield caught.type, told(caught.value)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("form", ["python", "native"])
def test_the_line_is_that_of_the_model_at_hand(model_in: Callable[..., Fn], form: str, training: bool) -> None:
    before = counters.snapshot()["graphs_compiled"]
    compiled = []
    for name, down, cached in (("first", 0, True), ("second", 40, True), ("third", 80, False)):
        torch._dynamo.reset()
        dynamo_counters.clear()
        with functorch_config.patch(enable_autograd_cache=cached):
            found = list(errors(model_in(name, down), training, options={"host_program": form}))
        compiled.append(counters.snapshot()["graphs_compiled"] - before)
        kernel, library = f"{name}.py:{5 + down} in run: rows", f"{name}.py:{6 + down} in run: return"
        assert [kind for kind, _ in found] == [OutOfRangeError, DivisionByZeroError, FreedInputError]
        for (_, text), line in zip(found, (kernel, kernel, library), strict=True):
            assert f"In the model: {line}" in text, text
        if name == "second":
            assert dynamo_counters["aot_autograd"]["autograd_cache_hit"] == 1
    # The second from AOTAutograd's cache, the third from ours.
    assert compiled == [1 + training] * 3


@torch_mends_it
@pytest.mark.parametrize("form", ["python", "native"])
def test_an_error_of_a_library(model_in: Callable[..., Fn], form: str) -> None:
    source = "import torch\ndef run(x):\n    y = x.sin() + 1\n    return torch.linalg.inv(y - y)\n"
    for name, down in (("first", 0), ("second", 5)):
        torch._dynamo.reset()
        with pytest.raises(torch.linalg.LinAlgError) as caught:
            torch.compile(model_in(name, down, source), backend="mlc", options={"host_program": form})(torch.ones(3, 3))
        assert f"In the model: {name}.py:{4 + down} in run: return" in told(caught.value)


def test_an_error_in_a_backward(model_in: Callable[..., Fn]) -> None:
    source = """
import torch

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.save_for_backward(i)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g[ctx.saved_tensors[0]], None

def run(x, i):
    return Wrong.apply(x, i).square().sum()
"""
    for name, down in (("first", 0), ("second", 7)):
        torch._dynamo.reset()
        run = torch.compile(model_in(name, down, source), backend="mlc")
        run(torch.randn(4, requires_grad=True), torch.tensor([0, 1, 2, 3])).backward()
        loss = run(torch.randn(4, requires_grad=True), torch.tensor([0, 1, 2, 7]))
        with pytest.raises(OutOfRangeError) as caught:
            loss.backward()
        assert f"In the model: {name}.py:" in told(caught.value)


def test_bodies_of_control_flow_tell_their_own_line(model_in: Callable[..., Fn]) -> None:
    source = """
import torch

def run(x, i):
    return torch.cond(x.sum() > 0,
                      lambda x, i: x[i] * 2,
                      lambda x, i: x.sin() + i, (x, i))
"""
    for name, down in (("first", 0), ("second", 30)):
        torch._dynamo.reset()
        run = torch.compile(model_in(name, down, source), backend="mlc")
        run(torch.ones(3), torch.tensor([0, 1, 2]))
        with pytest.raises(OutOfRangeError) as caught:
            run(torch.ones(3), torch.tensor([0, 1, 5]))
        assert f"{name}.py:{6 + down}" in told(caught.value), told(caught.value)


def test_profilers_see_the_line_of_the_model_at_hand(model_in: Callable[..., Fn]) -> None:
    source = "import torch\ndef run(x):\n    return (x.sin() + 1).sum(0)\n"
    for name, down in (("first", 0), ("second", 11)):
        torch._dynamo.reset()
        run = torch.compile(model_in(name, down, source), backend="mlc")
        with torch.no_grad():
            run(torch.ones(3, 4))
            with torch.profiler.profile() as profile:
                run(torch.ones(3, 4))
        assert any(f"{name}.py:{3 + down}" in e.key for e in profile.key_averages())


def test_limits_of_memory_tell_of_the_model_at_hand(model_in: Callable[..., Fn]) -> None:
    source = "import torch\ndef run(x):\n    return x.sin() @ x.T\n"
    for name, down in (("first", 0), ("second", 11)):
        torch._dynamo.reset()
        run = torch.compile(
            model_in(name, down, source), backend="mlc", options={"memory_limit": 1 << 20}, dynamic=True
        )
        run(torch.ones(64, 8))
        with pytest.raises(RuntimeError, match="Here it would be") as caught:
            run(torch.ones(4096, 8))
        assert f"{name}.py:{3 + down}" in told(caught.value)


LINES = ["a.py:1", "", "a.py:3", "a.py:1"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("plain", "plain"),
        ("    # @mlc[0]\n    k()", "    # a.py:1\n    k()"),
        ("    # @mlc[0,2,3]\n    k()", "    # a.py:1; a.py:3\n    k()"),
        ("    # @mlc[1]\n    k()", "    k()"),
        ("    # @mlc[0]\n    k()\n    # @mlc[3]\n    l()", "    # a.py:1\n    k()\n    l()"),
        ("    for x:\n        # @mlc[0]\n        k()\n    # @mlc[3]\n    l()", None),
    ],
)
def test_places_in_a_text(text: str, want: str | None) -> None:
    got = program_with_lines(text, LINES.__getitem__)
    assert got == want if want is not None else got.count("# a.py:1") == 2


def test_places_in_a_message() -> None:
    origins = (Origin("aten.add", "x", place=2), Origin("aten.mul", "y", place=0))
    assert with_lines(f"add{place_text(origins, aside=True)}!", LINES.__getitem__) == "add (a.py:3; a.py:1)!"
    assert with_lines("add@mlc(1)!", LINES.__getitem__) == "add!"
    assert places_in([place_text(origins), place_text(origins, aside=True), "@mlc[7]"]) == {0, 2, 7}
    assert place_text((Origin("aten.add", "x"),)) == "x", "the line itself, where no place is known"


def test_tensors_are_compared_by_identity() -> None:
    """Looking for the tensor that failed asks none for its values, which several elements have no truth of."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    run = torch.compile(f, backend="mlc")
    x, y = torch.randn(3), torch.randn(3)
    run(x, y)
    y.untyped_storage().resize_(0)
    with pytest.raises(FreedInputError):
        run(x, y)


def test_no_graph_is_held_for_its_lines(model_in: Callable[..., Fn]) -> None:
    """A program that runs holds strings, not the graph of nodes and fake tensors that they were read from."""
    source = "import torch\ndef run(x):\n    return (x.sin() + 1).sum(0)\n"
    for name in ("compiled", "found"):
        torch._dynamo.reset()
        gc.collect()
        before = {id(x) for x in gc.get_objects() if type(x) is fx.Graph}
        run = torch.compile(model_in(name, 0, source), backend="mlc")
        with torch.no_grad():
            run(torch.ones(3, 4))
        torch._dynamo.utils.clear_compilation_metrics()
        gc.collect()
        holders = [
            lines
            for graph in gc.get_objects()
            if type(graph) is fx.Graph and id(graph) not in before
            for node in graph.nodes
            for lines in gc.get_referrers(node)
            if type(lines) is list
            and lines is not graph
            and any(isinstance(c, CellType) for c in gc.get_referrers(lines))
        ]
        assert not holders, name


@pytest.mark.parametrize("form", ["python", "native"])
def test_an_error_names_all_lines_of_its_kernel(model_in: Callable[..., Fn], form: str) -> None:
    source = """
import torch

def run(x, i):
    a = x.sin()
    b = a[i] + 1
    c = b.cos() * 2
    d = c.exp() - b
    return d * d.tanh()
"""
    run = torch.compile(model_in("long", 0, source), backend="mlc", options={"host_program": form})
    run(torch.randn(4), torch.tensor([0, 1, 2]))
    with pytest.raises(OutOfRangeError) as caught:
        run(torch.randn(4), torch.tensor([0, 1, 7]))
    assert all(f"long.py:{number} in run" in told(caught.value) for number in range(6, 10)), told(caught.value)
