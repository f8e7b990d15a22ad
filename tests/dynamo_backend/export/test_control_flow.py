"""Branches and loops in exported libraries: against eager, both ways, without torch, and what of them is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, export
from torch.nn import functional as F

import torch_mlc
from tests.dynamo_backend.export.jitted import Jitted
from torch_mlc.dynamo_backend.export.assemble import assemble
from torch_mlc.dynamo_backend.export.errors import ExportError
from torch_mlc.ir.errors import OutOfRangeError
from torch_mlc.runtime.export import open as opened

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS = Dim("rows", min=0, max=300)


class Model(nn.Module):
    """A function of a module with weights, as ``forward``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.wide = nn.Linear(5, 5), nn.Linear(5, 33)
        self.register_buffer("scale", torch.rand(5) + 0.5)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def agree(jitted: Jitted, model: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(*inputs))
    for found, value in zip(jitted.call(*inputs), wanted, strict=True):
        torch.testing.assert_close(found, value.contiguous(), rtol=1e-5, atol=1e-5, equal_nan=True)


def product(m: Model, x: Tensor) -> Any:
    return torch.cond(
        x.sum() > 0,
        lambda x: F.layer_norm(m.wide(x).relu() @ m.wide.weight, (5,)) * m.scale,
        lambda x: torch.softmax(m.linear(x), -1) - x,
        (x,),
    )


def several(m: Model, x: Tensor) -> Any:
    """Results that are weights' and inputs' copies, views of what the branch makes, and of other types."""
    y = x * 2
    made = torch.cond(
        y.mean() > 0,
        lambda x, y: (x.clone(), (y + 1).t(), y.sum(0), x > 0, x[:, 1:3] * 2),
        lambda x, y: (y.clone(), (x - 1).t(), x.amin(1).sum() + m.scale, y < x, (y * x)[:, :2] + m.scale[0]),
        (x, y),
    )
    return made, made[1].t() + 1


def nested(m: Model, x: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.amax() > 0.5, lambda x: m.linear(x * 0.5), lambda x: x.exp() * m.scale, (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: inner(x - 1) * 2 + inner(x + 1).sum(), (x,)) + 1


def by_size(m: Model, x: Tensor) -> Any:
    small = torch.cond(x.shape[0] > 4, lambda x: x.sum(0), lambda x: x.cumsum(0).sum(0) * m.scale, (x,))
    some = (x.shape[0] > 2) & torch.sym_not((x.shape[0] * 2 > 9) | (x.shape[0] == 4))
    return torch.cond(some, lambda s: s + 1, lambda s: s - 1, (small,))


def turned(m: Model, x: Tensor) -> Any:
    """Operands that are views, of which one begins inside of another, and one is a row that is repeated."""
    y = x.repeat(2, 3)
    return torch.cond(
        x.sum() > 0,
        lambda a, b, c: (a @ m.linear.weight[:, :3] + b.sum(), c * 2),
        lambda a, b, c: (a[:, :3] - b[:, :1], c.exp()),
        (x * 3, y.t()[1::2].t()[: x.shape[0]], m.scale.expand(x.shape[0], 5)),
    )


def twice(m: Model, x: Tensor) -> Any:
    """Memory of one branch is used again by the next, and by kernels behind it, while the first result is read."""
    a = torch.cond(x.sum() > 0, lambda x: m.wide(m.linear(x)).relu(), lambda x: m.wide(x).cos(), (x,))
    b = torch.softmax(a, -1) @ m.wide.weight
    c = torch.cond(b.sum() > 1, lambda b, a: (b @ m.wide.weight.t() + a).sum(-1), lambda b, a: (a * a).sum(-1), (b, a))
    return a, b * c[:, None], torch.sort(c).values


def loop(m: Model, x: Tensor) -> Any:
    return while_loop(
        lambda i, x: (i < 7) & (x.abs().amax() < 40),
        lambda i, x: (i + 1, m.linear(x) * 1.5 + m.scale),
        (torch.tensor(0), x),
    )


def several_loops(m: Model, x: Tensor) -> Any:
    """A loop in a branch, a branch in a loop, one that never turns, and values that change places."""

    def doubled(x: Tensor) -> Tensor:
        return while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * m.scale), (torch.ones((), dtype=torch.int64), x)
        )[1]

    y = torch.cond(x.sum() > 0, doubled, lambda x: x - 1, (x,))
    step = lambda x: torch.cond(x.sum() > 2, lambda x: x * 0.5, lambda x: m.linear(x) + 1, (x,))  # noqa: E731
    z = while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, step(y)), (torch.tensor(0), y))[1]
    never = while_loop(lambda i, y: i < 0, lambda i, y: (i + 1, y * 0), (torch.tensor(0), y))[1]
    _, a, b = while_loop(
        lambda i, a, b: i < 5, lambda i, a, b: (i + 1, b + 1, a.clone()), (torch.tensor(0), y.sum(0), z.sum(0))
    )
    return y, z, never, a, b


def sizes(m: Model, x: Tensor) -> Any:
    """Sizes from outside, as numbers and as dimensions of what a body makes; one that no operand has."""
    n, wide = x.shape[0], torch.cat([x, x * 2, x[:1]])
    y = torch.cond(
        x.sum() > 0,
        lambda x: x / (n + 1) + torch.arange(n)[:, None],
        lambda x: x + wide.view(-1, 5)[: x.shape[0]] * n,
        (x,),
    )
    halves = torch.cond(wide.sum() > 0, lambda w: w[: w.shape[0] // 2] * 2, lambda w: w[: w.shape[0] // 2] + n, (wide,))
    start = torch.zeros((), dtype=torch.int64)
    z = while_loop(lambda i, z: i < n, lambda i, z: (i + 2, z * 0.5 + n / 3), (start, y))[1]
    return y, halves.sum(0), z, torch.cond(y.sum() > 5, lambda: torch.ones(3), lambda: torch.zeros(3), ())


FUNCTIONS = [product, several, nested, by_size, turned, twice, loop, several_loops, sizes]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:Pred is a Python constant")
def test_it_is_as_eager(function: Callable[..., Any], dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Model(function).eval()
    program = export(model, (torch.randn(6, 5),), dynamic_shapes=({"args": ({0: ROWS},)} if dynamic else None))
    jitted = Jitted(assemble(program))
    for rows in (0, 1, 3, 4, 5, 64, 300) if dynamic else (6,):
        if rows == 0 and function in (nested, several, loop, sizes):
            continue  # there is no greatest and no first element of none
        for sign in (1, -1, 0.25, -0.25):
            agree(jitted, model, sign * torch.rand(rows, 5))
    agree(jitted, model, torch.full((6, 5), float("nan")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_types(dtype: torch.dtype) -> None:
    def f(m: Model, x: Tensor, flag: Tensor) -> Any:
        y = torch.cond(flag, lambda x: x * 2, lambda x: x * x, (x,))
        return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * x), (flag.sum(), y))

    model = Model(f)
    x = torch.randn(3, 5).mul(3).to(dtype)
    jitted = Jitted(assemble(export(model, (x, torch.tensor([True])))))
    for flag in (True, False):
        agree(jitted, model, x, torch.tensor([flag]))


def test_layouts_that_are_not_rows() -> None:
    def f(m: Model, x: Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: F.avg_pool2d(x, 1) * 2, lambda x: x.relu() + 1, (x,))
        z = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2 + x), (torch.tensor(0), y))[1]
        return y, z, y.sum(1) + z.sum(1)

    model, x = Model(f), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    jitted = Jitted(assemble(export(model, (x,))))
    for sign in (1, -1):
        agree(jitted, model, sign * x.abs())


def test_state_is_written_with_what_a_branch_makes() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            new = torch.cond(x.sum() > 0, lambda t, x: t + x.sum(0), lambda t, x: t * 0.5, (self.total, x))
            self.total.copy_(new)
            return self.total * 2

    model, other = Counter(), Counter()
    jitted = Jitted(assemble(export(model, (torch.randn(2, 5),))))
    for sign in (1, 1, -1, 1, -1):
        agree(jitted, other, sign * torch.rand(2, 5))


def test_random_numbers_in_a_branch(tmp_path: Path) -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: torch.rand_like(x), lambda x: x - 1, (x,))

    torch_mlc.export(export(Noise(), (torch.ones(100),)), tmp_path)
    loaded = torch_mlc.load(tmp_path)
    first, second = loaded(torch.ones(100)), loaded(torch.ones(100))
    assert not torch.equal(first, second) and first.min() >= 0 and first.max() < 1
    torch.testing.assert_close(loaded(-torch.ones(100)), torch.full((100,), -2.0))
    loaded.seed(0)
    assert torch.equal(loaded(torch.ones(100)), first)


def test_a_wrong_index_in_a_branch_is_told_with_its_line(tmp_path: Path) -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            y = torch.softmax(x, -1) @ x
            y = torch.cond(y.sum() > 0, lambda y, i: torch.cumsum(y, 0)[i], lambda y, i: y[:2] * 1, (y, i))
            return torch.sort(y, 0).values

    model, i = Picks(), torch.tensor([0, 2])
    torch_mlc.export(export(model, (torch.rand(5, 5), i)), tmp_path)
    loaded = torch_mlc.load(tmp_path)
    torch.testing.assert_close(loaded(torch.ones(5, 5), i), model(torch.ones(5, 5), i))
    wrong = torch.tensor([1, 5])
    torch.testing.assert_close(loaded(-torch.ones(5, 5), wrong), model(-torch.ones(5, 5), wrong))
    with pytest.raises(OutOfRangeError, match="given the index 5") as caught:
        loaded(torch.ones(5, 5), wrong)
    note = "".join(getattr(caught.value, "__notes__", caught.value.args))
    assert "In the model: test_control_flow.py" in note and "torch.cond" in note


# --- memory -----------------------------------------------------------------------------------------------------------


def test_branches_share_scratch() -> None:
    """A branch needs the greater of what both need, and what one has used the next may use."""

    def chain(x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch.softmax(torch.sort(x.t(), -1).values.t(), 0)
        return x

    def f(m: Model, x: Tensor) -> Any:
        for _ in range(3):
            x = torch.cond(x.sum() > 0, lambda x: chain(x, 3), lambda x: chain(x, 1), (x,))
        return x

    def alone(m: Model, x: Tensor) -> Any:
        return chain(x, 3)

    x = torch.randn(128, 128)
    branches, plain = (Jitted(assemble(export(Model(g), (x,)))) for g in (f, alone))
    nbytes = x.nbytes
    assert branches.function("forward").arena <= plain.function("forward").arena + 2 * nbytes + 4096
    for sign in (1, -1):
        agree(branches, Model(f), sign * x.abs())


# --- without torch ----------------------------------------------------------------------------------------------------

RUN = """
import resource, sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from open import ModelLibrary
given = np.load(sys.argv[1] + "/calls.npz")
library = ModelLibrary(sys.argv[1] + "/model")
context = library.context()
def turn(times):
    for _ in range(times):
        for k in range(int(given["count"])):
            results = context.call("forward", given[f"x{k}"])
            for n, result in enumerate(results):
                np.testing.assert_allclose(result, given[f"y{k}.{n}"], rtol=1e-5, atol=1e-5)
turn(50)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
turn(1000 // int(given["count"]))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 512, f"{grown} KiB more after 1,000 calls"
assert not any(m.split(".")[0] in ("torch", "torch_mlc") for m in sys.modules), "torch was imported"
print("same")
"""


@pytest.mark.parametrize("function", [twice, several_loops], ids=lambda f: f.__name__)
def test_a_process_without_torch(function: Callable[..., Any], tmp_path: Path) -> None:
    """Both branches, a thousand calls, with nothing more held behind them."""
    torch.manual_seed(1)
    model = Model(function).eval()
    program = export(model, (torch.randn(6, 5),), dynamic_shapes={"args": ({0: ROWS},)})
    torch_mlc.export(program, tmp_path / "model")
    calls: dict[str, Any] = {"count": 4}
    for k, (rows, sign) in enumerate(((3, 1), (3, -1), (200, 0.3), (200, -0.3))):
        x = sign * torch.rand(rows, 5)
        with torch.no_grad():
            results = torch.utils._pytree.tree_leaves(model(x))
        calls |= {f"x{k}": x, **{f"y{k}.{n}": y for n, y in enumerate(results)}}
    np.savez(tmp_path / "calls.npz", **calls)
    folder = str(Path(opened.__file__).parent)
    command, env = [sys.executable, "-c", RUN, str(tmp_path), folder], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "same", done.stderr


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(model: nn.Module, *inputs: Tensor, **how: Any) -> str:
    with pytest.raises(ExportError) as caught:
        assemble(export(model, inputs), **how)
    return str(caught.value)


def test_what_bodies_cannot_do_is_told_with_the_rest() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.cond(x.sum() > 0, lambda x: torch.linalg.eigvalsh(x @ x.t()), lambda x: x.sum(-1), (x,))
            return y + torch.fft.rfft(x).abs().sum()

    told = refused(Both(), torch.randn(5, 5))
    assert "operations" in told and "aten::_linalg_eigh" in told and "aten::_fft_r2c" in told
    assert "lambda x: torch.linalg.eigvalsh(x @ x.t())" in told


def test_numbers_that_loops_carry() -> None:
    def f(m: Model, x: Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x))[1]

    told = refused(Model(f), torch.randn(5))
    assert "hop::while_loop at test_control_flow.py" in told and "torch.tensor(n)" in told


def test_scans_and_branches_on_gpus() -> None:
    def f(m: Model, x: Tensor) -> Any:
        return scan(lambda c, x: (c + x, c * x), torch.zeros(5), x)

    assert (
        "hop::scan at test_control_flow.py" in (told := refused(Model(f), torch.randn(4, 5))) and "while_loop" in told
    )
    told = refused(Model(product), torch.randn(4, 5), targets=("cuda:sm_90",))
    assert "decided on the GPU" in told and "torch.where" in told
