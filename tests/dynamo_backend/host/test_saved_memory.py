"""A backward writes over what its forward saved for it, where nobody else can see that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_mlc.runtime.host import own_memory
from torch_mlc.scheduler.calls import overwrite

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@dataclass
class Watch:
    """Of each argument that a backward wanted for itself: whether it had it, or a copy."""

    own: list[int] = field(default_factory=list)
    copies: int = 0

    def taken(self) -> tuple[int, int]:
        found = len(self.own), self.copies
        self.own.clear()
        self.copies = 0
        return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """All sizes are large enough; what becomes of arguments is written down."""
    seen = Watch()
    copied, is_alone = own_memory.copied, own_memory.is_alone

    def copying(tensor: Tensor) -> Tensor:
        seen.copies += 1
        return copied(tensor)

    def asked(args: Any, position: int) -> bool:
        alone = is_alone(args, position)
        if alone:
            seen.own.append(args[position].data_ptr())
        return alone

    monkeypatch.setattr(overwrite, "LEAST_OWNED", 0)
    monkeypatch.setattr(own_memory, "copied", copying)
    monkeypatch.setattr(own_memory, "is_alone", asked)
    yield seen


def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (F.silu(x @ a) * (x @ b)).sum()


def huber(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.huber_loss((x @ a) * 2, x @ b)


def likelihood(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(x @ a, torch.arange(x.shape[0]) % a.shape[1])


def inputs(rows: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    shapes = (rows, 16), (16, 33), (16, 33)
    x, a, b = (torch.randn(s, requires_grad=True) for s in shapes)
    return x, a, b


def check(got: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, eager in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-5, atol=1e-5)


def gradients(fn: Callable[..., Tensor], args: tuple[Tensor, ...], **how: Any) -> list[Tensor]:
    return [g for g in torch.autograd.grad(fn(*args), args, allow_unused=True, **how) if g is not None]


@pytest.mark.parametrize("form", ["python", "native"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [gated, huber, likelihood], ids=lambda f: f.__name__)
def test_saved_tensors_are_written_over(watch: Watch, fn: Callable[..., Tensor], dynamic: bool, form: str) -> None:
    run = torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True, options={"host_program": form})
    for rows in (37, 37, 37, 50) if dynamic else (37, 37, 37):
        args = inputs(rows)
        check(gradients(run, args), gradients(fn, args))
        own, copies = watch.taken()
        assert own > 0 and copies == 0


@pytest.mark.parametrize("first", [False, True], ids=["later", "at first"])
def test_a_retained_graph_reads_them_again(watch: Watch, first: bool) -> None:
    run = torch.compile(gated, backend="mlc", fullgraph=True)
    args = inputs()
    wanted = gradients(gated, args)
    if not first:
        check(gradients(run, args), wanted)
        watch.taken()
    loss = run(*args)
    for _ in range(3):
        check(list(torch.autograd.grad(loss, args, retain_graph=True)), wanted)
    own, copies = watch.taken()
    assert own == 0 and copies > 0
    check(list(torch.autograd.grad(loss, args)), wanted)
    own, copies = watch.taken()
    assert own > 0 and copies == 0


def test_what_hooks_keep_stays(watch: Watch) -> None:
    """As those do that look at what is saved, or put it elsewhere."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    run = torch.compile(gated, backend="mlc", fullgraph=True)
    args = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: kept[k]):
        loss = run(*args)
        before = [t.clone() for t in kept]
        check(list(torch.autograd.grad(loss, args)), gradients(gated, args))
    assert kept and all(torch.equal(a, b) for a, b in zip(before, kept, strict=False))
    own, copies = watch.taken()
    assert own == 0 and copies > 0


def test_what_the_caller_has_stays(watch: Watch) -> None:
    """Results that are saved too, views of them, and arguments."""

    def fn(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, g = x @ a, x @ b
        return (F.silu(h) * g * F.silu(x).mean()).mean(), h, g.t()

    run = torch.compile(fn, backend="mlc", fullgraph=True)
    args = inputs()
    loss, h, g = run(*args)
    before = [t.detach().clone() for t in (*args, h, g)]
    check(list(torch.autograd.grad(loss, args)), list(torch.autograd.grad(fn(*args)[0], args)))
    assert all(torch.equal(a, b) for a, b in zip(before, (*args, h, g), strict=True))


def test_a_gradient_has_a_storage_of_its_size(watch: Watch) -> None:
    """What a forward saves may lie in a longer one where sizes vary."""
    run = torch.compile(huber, backend="mlc", dynamic=True, fullgraph=True)
    for rows in (37, 5000, 70_001):
        args = inputs(rows)
        for g, wanted in zip(gradients(run, args), gradients(huber, args), strict=True):
            assert g.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
            torch.testing.assert_close(g, wanted, rtol=2e-5, atol=1e-5)


def test_captured_programs_leave_them(watch: Watch) -> None:
    """The memory that a captured forward saves in is that of all its runs."""
    run = torch.compile(gated, backend="mlc", mode="reduce-overhead", fullgraph=True)
    args = inputs()
    check(gradients(run, args), gradients(gated, args))
    assert watch.taken() == (0, 0)


_AGAIN = """
import sys, torch
import tests.dynamo_backend.host.test_saved_memory as t
from torch_mlc.scheduler.calls import overwrite
overwrite.LEAST_OWNED = 0
seen = []
alone = t.own_memory.is_alone
t.own_memory.is_alone = lambda args, k: (seen.append(alone(args, k)), seen[-1])[1]
run, args = torch.compile(t.gated, backend="mlc", fullgraph=True), t.inputs()
got = t.gradients(run, args)
t.check(got, t.gradients(t.gated, args))
loss = run(*args)
t.check(list(torch.autograd.grad(loss, args, retain_graph=True)), got)
t.check(list(torch.autograd.grad(loss, args)), got)
from torch._dynamo.utils import counters
print(seen and all(seen), counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_programs_of_the_cache_do_as_well(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    told = [subprocess.run([sys.executable, "-c", _AGAIN], capture_output=True, text=True) for _ in range(2)]
    assert [t.returncode for t in told] == [0, 0], told[-1].stderr
    assert [t.stdout.split()[0] for t in told] == ["True", "True"]
    assert told[1].stdout.split()[1] != "0" or told[0].stdout.split()[1] == "0"
