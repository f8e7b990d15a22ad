"""Exported functions, called with addresses, against eager: sizes, views, state, copies, wrong indices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F

from tests.dynamo_backend.export.jitted import Jitted
from torch_mlc.dynamo_backend.export.assemble import assemble

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def exported(model: nn.Module, *inputs: Any, dynamic: Any = None, **how: Any) -> Jitted:
    return Jitted(assemble(export(model, inputs, dynamic_shapes=dynamic), **how))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def agree(found: Any, wanted: Any) -> None:
    flat = torch.utils._pytree.tree_leaves(wanted)
    assert len(found) == len(flat)
    for a, b in zip(found, flat, strict=True):
        torch.testing.assert_close(a, b.contiguous())


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 5), nn.Softmax(-1)).eval()


@pytest.mark.parametrize("threads", [1, 2])
def test_sizes_that_vary(threads: int) -> None:
    model = mlp()
    jitted = exported(model, torch.randn(3, 13), dynamic=({0: Dim("batch", max=300)},), options={"threads": threads})
    for batch in (0, 1, 2, 7, 64, 300):
        x = torch.randn(batch, 13)
        with torch.no_grad():
            agree(jitted.call(x), model(x))
    with pytest.raises(AssertionError):
        jitted.call(torch.randn(301, 13))


def test_results_that_are_views_inputs_and_the_same_twice() -> None:
    weight = torch.randn(4, 6)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor, i: Tensor) -> Any:
            y = torch.relu(x) + 1
            return {
                "t": y.t(), "same": (y, y), "part": y[1:3, ::2], "input": x, "turned": x.t(), "weight": self.weight.t(),
                "wide": y[0].expand(3, 6), "ints": i * 2, "row": y.view(-1), "picked": self.weight[i],
            }  # fmt: skip

    model, inputs = Model(), (torch.randn(4, 6), torch.tensor([0, 3, 3]))
    jitted = exported(model, *inputs)
    with torch.no_grad():
        for _ in range(2):
            agree(jitted.call(*inputs), model(*inputs))


def test_layouts_and_odd_types() -> None:
    def f(x: Tensor, h: Tensor, b: Tensor, i: Tensor) -> Any:
        return (x * 2).transpose(1, 3), h.float().sum(-1), (h * 3).to(torch.bfloat16), b & (i > 1), i.to(torch.int8) + 1

    x = torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last)
    h, b, i = torch.randn(7, 9).half(), torch.rand(5) > 0.5, torch.arange(5)
    agree(exported(Function(f), x, h, b, i).call(x, h, b, i), f(x, h, b, i))


class Cache(nn.Module):
    """State that calls write to, and read what calls before have left."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.register_buffer("cache", torch.zeros(4, 16))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = torch.relu(self.project(x))
        self.cache.index_copy_(0, self.position, z[:1])
        self.position += 1
        y.add_(1)
        return z.t(), self.cache, self.cache.sum(0), self.position


def test_state_is_kept_from_call_to_call() -> None:
    model = Cache()
    eager = copy.deepcopy(model)
    jitted = exported(model, torch.randn(3, 8), torch.zeros(2), dynamic=({0: Dim("b", max=64)}, None))
    written = {w.name for w in jitted.assembled.model.weights if w.mutable}
    assert written == {"cache", "position"}
    y, other = torch.zeros(2), torch.zeros(2)
    with torch.no_grad():
        for batch in (3, 1, 5, 2):
            x = torch.randn(batch, 8)
            found, wanted = jitted.call(x, y), eager(x, other)
            agree(found, wanted)
            torch.testing.assert_close(y, other)


class IntegerCache(nn.Module):
    """Attention to keys and values that are kept as int8, with a scale for each head and position."""

    def __init__(self, length: int = 64, heads: int = 4, width: int = 8) -> None:
        super().__init__()
        self.heads, self.width, self.length = heads, width, length
        self.qkv = nn.Linear(32, 3 * heads * width)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, width, dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.zeros(1, heads, length, 1))

    def kept(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        integers, scales = getattr(self, name), getattr(self, f"{name}_scale")
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
        integers.index_copy_(2, positions, (x / scale).round().to(torch.int8))
        scales.index_copy_(2, positions, scale)
        return integers.to(x.dtype) * scales

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        n, time, _ = x.shape
        q, k, v = self.qkv(x).view(n, time, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        k, v = self.kept("keys", k, positions), self.kept("values", v, positions)
        mask = torch.arange(self.length) <= positions[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(n, time, -1)


def test_a_cache_of_integers_is_never_written_out_as_floats() -> None:
    torch.manual_seed(0)
    model = IntegerCache()
    eager = copy.deepcopy(model)
    jitted = exported(model, torch.randn(1, 1, 32), torch.tensor([0]))
    kinds = {w.name: w.dtype.torch for w in jitted.assembled.model.weights if w.mutable}
    assert kinds["keys"] == kinds["values"] == torch.int8
    assert jitted.function("forward").arena < model.keys.numel() * 4
    with torch.no_grad():
        for position in range(model.length):
            x, at = torch.randn(1, 1, 32), torch.tensor([position])
            agree(jitted.call(x, at), eager(x, at))


def test_functions_share_weights_and_state() -> None:
    class Shared(nn.Module):
        def __init__(self, inside: Cache) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside.cache @ self.inside.project.weight @ x

    model = Cache()
    reader = Shared(model)
    x, y = torch.randn(3, 8), torch.zeros(2)
    programs = {"write": export(model, (x, y)), "read": export(reader, (torch.randn(8, 2),))}
    assembled = assemble(programs)
    assert len(assembled.model.weights) == 4
    jitted, eager = Jitted(assembled), copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(3):
            agree(jitted.call(x, torch.zeros(2), name="write"), eager(x, torch.zeros(2)))
            v = torch.randn(8, 2)
            agree(jitted.call(v, name="read"), Shared(eager)(v))


def test_what_is_made_of_weights_alone_is_a_weight() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.conv(x)))

    torch.manual_seed(1)
    model = Net()
    model(torch.randn(4, 3, 9, 9))
    model.eval()
    x = torch.randn(2, 3, 9, 9)
    jitted = exported(model, x)
    names = {w.name for w in jitted.assembled.model.weights}
    assert not any("running" in n for n in names), names
    with torch.no_grad():
        agree(jitted.call(x), model(x))


def test_weights_of_other_types_and_layouts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.randn(6, 4).to(torch.bfloat16).t())
            self.register_buffer("flags", torch.tensor([True, False, True, True]))
            self.register_buffer("table", torch.arange(24).view(2, 3, 4).transpose(0, 2).contiguous().transpose(0, 2))
            self.lengths = torch.tensor([3, 1, 2, 5], dtype=torch.int16)

        def forward(self, x: Tensor) -> Any:
            return x * self.low.float(), x.sum(1) * self.flags, self.table.sum(0) + self.lengths, self.lengths + 1

    model, x = Model(), torch.randn(4, 6)
    jitted = exported(model, x, options={"freeze": False})
    with torch.no_grad():
        agree(jitted.call(x), model(x))


def test_a_wrong_index_is_told_with_its_launch() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return torch.softmax(x, -1)[i] + 1

    x, model = torch.randn(5, 3), Model()
    jitted = exported(model, x, torch.tensor([0, 4]))
    agree(jitted.call(x, torch.tensor([4, 1])), model(x, torch.tensor([4, 1])))
    jitted.call(x, torch.tensor([4, 9]), fails=True)
    kind, *_, launch = jitted.status.tolist()
    assert kind != 0
    assert "softmax(x, -1)[i]" in jitted.assembled.hosts["forward"].launches[launch]


def test_layers_that_repeat() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.SiLU()) for _ in range(8))).eval()
    x = torch.randn(5, 24)
    jitted = exported(model, x)
    assert len(jitted.assembled.model.kernels) < 8
    with torch.no_grad():
        agree(jitted.call(x), model(x))


def test_sizes_that_are_multiples_of_others() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return x.view(-1, 4).sum(1) + 1, y.cumsum(0)

    batch = Dim("batch", min=1, max=50)
    model, shapes = Function(f), ({0: 4 * batch}, {0: batch})
    jitted = Jitted(assemble(export(model, (torch.randn(12), torch.randn(3)), dynamic_shapes=(shapes,))))
    for n in (1, 5, 50):
        x, y = torch.randn(4 * n), torch.randn(n)
        agree(jitted.call(x, y), f(x, y))
    alone = ({0: 4 * batch},)
    jitted = Jitted(
        assemble(export(Function(lambda x: x.view(-1, 4).sum(1)), (torch.randn(12),), dynamic_shapes=(alone,)))
    )
    for n in (1, 5, 50):
        x = torch.randn(4 * n)
        agree(jitted.call(x), x.view(-1, 4).sum(1))
    with pytest.raises(AssertionError, match="multiple of 4"):
        jitted.call(torch.randn(9))


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (lambda x: x[0] * 2, 1),
        (lambda x: x[-1] + x.sum(0), 1),
        (lambda x: torch.cat([x, x[:1]]) + 1, 1),
        (lambda x: x[:2].sum(0), 2),
        (lambda x: x.narrow(0, 1, 1) * x, 2),
        (lambda x: torch.cond(x.sum() > 0, lambda x: x[1] + 1, lambda x: x.sum(0), (x,)), 2),
        (lambda x: x[:, :2] + x[:, 1:2], 0),
    ],
    ids=["first", "last", "one", "two", "second", "in a branch", "columns"],
)
def test_parts_that_small_tensors_lack_are_refused(function: Any, least: int) -> None:
    """torch traces for two rows and more; with fewer, memory that is nobody's would be read."""
    jitted = exported(Function(function), torch.randn(5, 3), dynamic=(({0: Dim("rows", min=0, max=99)},),))
    for rows in range(6):
        x = torch.randn(rows, 3)
        if rows >= least:
            agree(jitted.call(x), function(x))
            continue
        with pytest.raises(AssertionError, match=f"has to be at least {least}"):
            jitted.call(x)


@pytest.mark.parametrize(
    ("function", "shapes", "others"),
    [
        (lambda x, y: torch.cat([x, y * 2]), ((3, 4), (5, 4)), (((7, 4), (3, 4)), ((2, 4), (9, 4)))),
        (lambda x, y: x[: y.shape[0]] + y, ((9,), (4,)), (((12,), (7,)),)),
        (lambda x, y: (torch.arange(x.shape[0]) + x.shape[0] / 2, y.numel() + y.mean()), ((5,), (3,)), (((6,), (2,)),)),
        (lambda x, y: (x[:0], torch.zeros(0, 3), y, y * 1, x.sum(), torch.ones(3)), ((5,), (3,)), (((6,), (2,)),)),
        (lambda x, y: (x.view(-1, 4).sum(1), y.mul_(2).sum()), ((16,), (5,)), (((40,), (3,)),)),
    ],
    ids=["cat", "slice", "sizes", "nothing", "rows of four"],
)
def test_sizes_of_two_inputs(function: Any, shapes: Any, others: Any) -> None:
    model, args = Function(function), tuple(map(torch.randn, shapes))
    jitted = Jitted(assemble(export(model, args, dynamic_shapes=(tuple({0: Dim.AUTO} for _ in args),))))
    for kinds in (shapes, *others):
        given = tuple(map(torch.randn, kinds))
        agree(jitted.call(*(x.clone() for x in given)), function(*(x.clone() for x in given)))
