"""``aot_compile``: what is saved holds its code, and runs in a process that has none of our caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import warm_processes
from tests.versions import needs_aot_compile
from torch_mlc.dynamo_backend.caches import saved_program
from torch_mlc.dynamo_backend.caches.saved_program import SavedProgram, SavedProgramError
from torch_mlc.ir.target import Target
from torch_mlc.runtime.settings.options import Options

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), needs_aot_compile]

MODELS = """
import torch
from torch import nn
from torch.compiler import nested_compile_region


def pointwise(x, y):
    return (x * 2 + y).relu().sum(0)


def with_constants(x):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4.0)


@nested_compile_region
def layer(x, w):
    return torch.relu(x @ w) + x


def regions(x, w):
    return layer(layer(x, w), w * 2)


def training(x, w):
    return (torch.softmax(x @ w, -1) * x).square().sum()


def any_size(x):
    return x.sin().sum(0) * x.shape[0]


def written(x, y):
    x.add_(y)
    return x * 2


def wrong_index(x, i):
    return x.sin()[i] + 1


w = lambda: torch.linspace(0, 1, 16).view(4, 4)
CASES = {
    "pointwise": (pointwise, lambda: (torch.ones(3, 4), w()[:3]), {}),
    "with_constants": (with_constants, lambda: (torch.ones(3, 4),), {}),
    "regions": (regions, lambda: (torch.eye(4), w()), {}),
    "training": (training, lambda: (torch.eye(4), w().requires_grad_()), {}),
    "any_size": (any_size, lambda: (torch.ones(5, 4),), {"dynamic": True}),
    "written": (written, lambda: (torch.ones(4, 4), w()), {}),
    "wrong_index": (wrong_index, lambda: (torch.ones(3, 4), torch.tensor([0, 2])), {}),
}


def results(fn, args):
    out = fn(*args)
    if out.requires_grad:
        out.backward()
    return [out.detach(), *(a.detach() for a in args), *(a.grad for a in args if a.grad is not None)]


def load(folder, name):
    with open(f"{folder}/{name}", "rb") as file:
        return torch.compiler.load_compiled_function(file)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x)) * self.scale


def net():
    torch.manual_seed(0)
    return Net()
"""

# Modules of what is saved are imported where it is loaded.
SAVE = """
import sys
sys.path.insert(0, sys.argv[1])
from saved_models import *
for name, (fn, make, how) in CASES.items():
    compiled = torch.compile(fn, backend="mlc", fullgraph=True, **how).aot_compile((make(), {}))
    torch.testing.assert_close(results(compiled, make()), results(fn, make()))
    compiled.save_compiled_function(f"{sys.argv[1]}/{name}")
    torch.testing.assert_close(results(load(sys.argv[1], name), make()), results(fn, make()))
x = torch.ones(3, 4)
for grad in (True, False):
    with torch.set_grad_enabled(grad):
        method = torch.compile(net().forward, backend="mlc", fullgraph=True, dynamic=True).aot_compile(((x,), {}))
    method.save_compiled_function(f"{sys.argv[1]}/method_{grad}")
model = torch.compile(net(), backend="mlc", fullgraph=True)
kinds = [torch._dynamo.aot_compile.ModelInput((torch.ones(n, 4),), {}, [torch.no_grad()]) for n in (2, 5)]
model._aot_compile(kinds)
model._save_aot_compiled_module(f"{sys.argv[1]}/net")
"""

LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from saved_models import *
from torch_mlc.runtime.counters import counters
for name, (fn, make, how) in CASES.items():
    loaded = load(sys.argv[1], name)
    for _ in range(2):
        torch.testing.assert_close(results(loaded, make()), results(fn, make()))
    if name == "any_size":
        torch.testing.assert_close(loaded(torch.ones(9, 4)), fn(torch.ones(9, 4)))
    if name == "wrong_index":
        try:
            loaded(torch.ones(3, 4), torch.tensor([0, 7]))
        except IndexError as error:
            notes = getattr(error, "__notes__", error.args)
            assert "saved_models.py" in notes[-1] and "x.sin()[i] + 1" in notes[-1], notes
for grad in (True, False):
    method, mine, eager = load(sys.argv[1], f"method_{grad}"), net(), net()
    with torch.set_grad_enabled(grad):
        for n in (3, 8):
            out, wanted = method(mine, torch.ones(n, 4)), eager(torch.ones(n, 4))
            torch.testing.assert_close(out, wanted)
            if grad:
                (out.sum() + wanted.sum()).backward()
                torch.testing.assert_close(mine.linear.weight.grad, eager.linear.weight.grad)
    for wrong in (torch.ones(3, 5), torch.ones(3, 4, dtype=torch.float64)):
        try:
            method(mine, wrong)
        except RuntimeError as error:
            assert "GuardManager check failed" in str(error), error
        else:
            raise AssertionError("wrong inputs are taken")
model = torch.compile(net(), backend="mlc", fullgraph=True)
with open(f"{sys.argv[1]}/net", "rb") as file:
    model._load_aot_compiled_module(file.read())
with torch.no_grad():
    for n in (2, 5):
        torch.testing.assert_close(model(torch.ones(n, 4)), net()(torch.ones(n, 4)))
counts = counters.snapshot()
print(counts["graphs_compiled"], counts["kernels_generated"], counts["native_programs"] > 0)
"""


def test_what_is_saved_runs_in_a_process_with_another_cache(tmp_path: Path) -> None:
    (tmp_path / "saved_models.py").write_text(MODELS)
    for script, caches in ((SAVE, "first"), (LOAD, "second")):
        folders = {"MLC_CACHE_DIR": "mlc", "TORCHINDUCTOR_CACHE_DIR": "torch"}
        env = {name: str(tmp_path / caches / folder) for name, folder in folders.items()}
        printed = warm_processes.start(script, str(tmp_path), env=env).output()
    assert printed.split() == ["0", "0", "True"], "nothing is compiled, and host programs are machine code"


def f(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) + 1


@pytest.mark.parametrize("how", [{"cache": False}, {"host_program": "python"}, {"tune": False, "verify": 1}], ids=str)
def test_settings_that_do_without_caches(how: dict[str, Any], tmp_path: Path) -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    compiled = torch.compile(f, backend="mlc", fullgraph=True, options=how).aot_compile(((x, w), {}))
    compiled.save_compiled_function(str(tmp_path / "f"))
    with open(tmp_path / "f", "rb") as file:
        torch.testing.assert_close(torch.compiler.load_compiled_function(file)(x, w), f(x, w))


def test_what_is_no_data_is_refused_when_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that are objects, and kernels that only this process has."""

    def with_constant(x: Tensor) -> Tensor:
        return torch.sort(x * torch.tensor([3.0, 1.0, 2.0]))[0]

    class Own(Tensor):
        pass

    run = torch.compile(with_constant, backend="mlc", fullgraph=True)
    with monkeypatch.context() as patched:
        patched.setattr(saved_program, "_TENSORS", (Own,))
        with pytest.raises(
            SavedProgramError, match=r"cannot be saved: it calls an op with \w+, an object of type torch"
        ):
            run.aot_compile(((torch.ones(3),), {}))
    monkeypatch.setenv("MLC_STRICT", "0")
    monkeypatch.setattr("torch_mlc.dynamo_backend.compiling.kernels.emit", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="does not compile"), pytest.raises(SavedProgramError, match="MLC_STRICT=1"):
        torch.compile(lambda x: x.sin() + 2, backend="mlc", fullgraph=True).aot_compile(((torch.ones(3),), {}))


def saved(monkeypatch: pytest.MonkeyPatch) -> SavedProgram:
    found: list[SavedProgram] = []
    with monkeypatch.context() as patched:
        save = saved_program.save_program

        def keep(*args: Any, **how: Any) -> SavedProgram:
            found.append(save(*args, **how))
            return found[-1]

        patched.setattr("torch_mlc.dynamo_backend.entry.backend.save_program", keep)
        torch.compile(f, backend="mlc", fullgraph=True).aot_compile(((torch.ones(3, 4), torch.ones(4, 5)), {}))
    return found[0]


def test_what_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = saved(monkeypatch)
    with torch.no_grad():
        call: Callable[..., Any] | None = program.load().call
    assert call is not None
    torch.testing.assert_close(call([torch.ones(3, 4), torch.ones(4, 5)])[0], torch.full((3, 5), 5.0))
    damaged = (program.entries[0], program.entries[1][:-9] + b"something", *program.entries[2:])
    with pytest.raises(SavedProgramError, match="hash does not fit"):
        replace(program, entries=damaged).load()
    with pytest.raises(SavedProgramError, match="is missing"):
        replace(program, entries=program.entries[:1]).load()
    with pytest.raises(SavedProgramError, match="other versions"):
        replace(program, versions="1").load()
    for target, why in (
        ({"features": "+avx2,+flux_capacitor"}, r"\+flux_capacitor, which this one has not got"),
        ({"kind": "cuda", "arch": "sm_90", "features": ""}, "compiled for cuda:sm_90"),
    ):
        other = {"cpu": {**program.targets["cpu"], **target}}
        with pytest.raises(SavedProgramError, match=why):
            replace(program, targets=other).load()
    assert Target(**program.targets["cpu"]).kind == "cpu" and set(program.settings) < set(Options.__slots__)


def test_saving_leaves_the_caches_of_a_process_right() -> None:
    """An entry that holds its program and one that names it have keys of their own."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)

    def g(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(x @ w.t())

    for _ in range(2):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(g, backend="mlc")(x, model.weight), g(x, model.weight))
        compiled = torch.compile(g, backend="mlc", fullgraph=True).aot_compile(((x, model.weight), {}))
        torch.testing.assert_close(compiled(x, model.weight), g(x, model.weight))
