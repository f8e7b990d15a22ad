"""Dynamic shapes: one compilation for all sizes, no guard of the backend's, sizes that the data decide."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from torch_mlc.dynamo_backend.entry.capture import capture

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def close(ours: Any, eager: Any) -> None:
    torch.testing.assert_close(ours, eager, rtol=3e-5, atol=3e-6, equal_nan=True)


# --- recompilations ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A transformer's layer with positions, a mask and heads: sizes meet in views, products and comparisons."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        x = self.embed(tokens) + self.place(torch.arange(t))
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, 4).permute(2, 0, 3, 1, 4)
        score = (q @ k.mT) * 0.5
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        y = torch.softmax(score.masked_fill(~mask, -torch.inf), -1) @ v
        return (x + self.out(y.transpose(1, 2).reshape(b, t, 16))).mean(1)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool1d(F.silu(self.norm(self.conv(x))), 2)
        return self.out(y.flatten(2).mean(-1))


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape
        x = x * self.scale
        padded = F.pad(x, (0, (-t) % 4)).view(b, -1, 4)
        halves = x.reshape(-1)[: (b * t) // 2 * 2].view(2, -1)
        return padded.amax(-1).sum(1) + halves.mean() + torch.arange(t).remainder(3).sum()


def tokens(b: int, t: int) -> Tensor:
    return torch.randint(0, 50, (b, t))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Tensor]]] = {
    "attention": (Attention, tokens),
    "convolutional": (Convolutional, lambda b, t: torch.randn(b, 4, t)),
    "ragged": (Ragged, lambda b, t: torch.randn(b, t)),
}
LENGTHS, BATCHES = (8, 5, 17, 32, 63), (3, 2, 7)


def facts_of(name: str, training: bool, backend: str) -> set[str]:
    """What one compilation with symbolic sizes takes for granted of them."""
    make, data = MODELS[name]
    model, found = make(), []
    call = torch._dynamo.lookup_backend(backend)

    def seen(gm: torch.fx.GraphModule, inputs: list[Any], **given: Any) -> Callable[..., Any]:
        found.append(torch._guards.TracingContext.get().fake_mode.shape_env)
        return call(gm, inputs, **given)

    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        result = torch.compile(model, backend=seen, dynamic=True, fullgraph=True)(data(3, 5))
    if training:
        result.sum().backward()
    sizes = found[-1]
    return {str(g.expr) for g in sizes.guards} | {f"{a} is {b}" for a, b in sizes.replacements.items()}


@pytest.mark.parametrize("name", [n if n == "ragged" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_taken_for_granted_of_sizes(name: str, training: bool) -> None:
    assert facts_of(name, training, "mlc") == facts_of(name, training, "aot_eager")


@pytest.mark.parametrize("name", ["attention", "ragged"])
def test_tracing_and_rewriting_make_no_constants_of_sizes(name: str) -> None:
    make, data = MODELS[name]
    graphs = capture(make(), (data(3, 5),), dynamic=True, training=True)
    values = [n.meta.get("val") for gm in graphs for n in gm.graph.nodes]
    (sizes,) = {v.node.shape_env for v in values if isinstance(v, torch.SymInt)}
    assert sizes.var_to_range and not [v for v in sizes.replacements.values() if v.is_Integer]


CASES = [
    pytest.param("ragged", False),
    *(pytest.param(name, t, marks=pytest.mark.slow) for name in ("attention", "convolutional") for t in (False, True)),
]


@pytest.mark.parametrize(("name", "training"), CASES)
def test_as_many_compilations_as_without_us(name: str, training: bool) -> None:
    """Automatic dynamic shapes, as users have them: static at first, then symbols."""
    make, data = MODELS[name]
    model = make()
    counts: dict[str, int] = {}
    for backend in ("aot_eager", "mlc"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        run = torch.compile(model, backend=counter)
        for b in BATCHES:
            for t in LENGTHS:
                x = data(b, t)
                with torch.set_grad_enabled(training):
                    ours = run(x)
                    if backend == "mlc":
                        close(ours, model(x))
                    if training:
                        ours.sum().backward()
        counts[backend] = counter.frame_count
    assert counts["mlc"] == counts["aot_eager"], counts


class Limited(nn.Module):
    """Floats of a module of every kind: those that a norm ties to their values, limits, and one that stays a float."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.slope, self.most = 0.25, 2.5

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardtanh(self.norm(x), -0.5, 6.5) * self.slope
        return x.clamp(max=self.most) + torch.clamp(x, -self.most, self.most)


def test_floats_that_become_constants_begin_one_tracing_again_and_no_more() -> None:
    counts = {}
    x, model = torch.randn(9, 6), Limited().eval()

    @torch.no_grad()
    def run(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x)
        return result

    for backend in ("aot_eager", "mlc"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(run, backend=counter, dynamic=True, fullgraph=True)
        for slope in (0.25, 0.75):
            model.slope = slope
            close(compiled(model, x), model(x))
        counts[backend] = counter.frame_count
    assert counts["mlc"] == counts["aot_eager"], counts


def test_no_guard_is_added_by_the_backend() -> None:
    """The guards that a graph ends up with are Dynamo's and AOTAutograd's alone, but for that of ``forward_ad``, which
    torch forgets (see ``forward_mode.py``)."""
    counts = {}
    for backend in ("aot_eager", "mlc"):
        torch._dynamo.reset()
        torch.compile(Ragged(), backend=backend, dynamic=True, fullgraph=True)(torch.randn(6, 10))
        (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(Ragged.forward)
        # What each guard says, without addresses.
        counts[backend] = sorted(re.sub(r"0x[0-9a-f]+|\d{9,}", "", str(entry.guard_manager)).splitlines())
    own = [line for line in counts["mlc"] if "DUAL_LEVEL_MATCH" in line]
    assert len(own) == 1
    assert [line for line in counts["mlc"] if line not in own] == counts["aot_eager"]


# --- sizes in views ---------------------------------------------------------------------------------------------------


def every_size(
    fn: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], sizes: tuple[int, ...], most: int = 1
) -> None:
    counter = CompileCounterWithBackend("mlc")
    run = torch.compile(fn, backend=counter, dynamic=True, fullgraph=True)
    for n in sizes:
        given = make(n)
        close(run(*given), fn(*given))
    # Sizes 0 and 1 are compilations of their own; the others share one.
    assert counter.frame_count <= most + sum(n in (0, 1) for n in sizes)


def test_products_of_sizes_in_views() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        b, t, c = x.shape
        flat = x.reshape(b * t * c)
        return (
            flat.view(t, b * c).sum(0),
            x.reshape(b * t, c).softmax(0),
            flat.view(-1, t).t() * t,
            x.flatten(1).amax(1),
        )

    every_size(f, lambda n: (torch.randn(n, n + 1, 2 * n),), (4, 7, 13))


def test_floor_divisions_and_remainders_of_sizes() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        (n,) = x.shape
        half, rest = n // 2, n % 3
        rows = x[: n // 4 * 4].view(-1, 4)
        return x[:half] + x[n - half :], x[rest:].cumsum(0), rows.sum(1), x[:: max(n // 5, 1)] * half + rest

    every_size(f, lambda n: (torch.randn(n),), (10, 7, 33, 64, 101), 2)


MADE = {
    "nearest": lambda x: F.interpolate(x * 2, scale_factor=1.5) + 1,
    "bilinear": lambda x: F.interpolate(x.exp(), scale_factor=(0.7, 2.3), mode="bilinear").sum(1),
    "twice": lambda x: F.interpolate(F.interpolate(x, scale_factor=1.3), scale_factor=1.3) * 2,
    "cut": lambda x: (x[..., : int(x.shape[-1] * 0.6)].relu(), x.new_zeros(round(x.shape[-1] / 2.5)) + x.sum()),
    "as input": lambda x: (y := F.interpolate(x, scale_factor=1.7, mode="bicubic")).sigmoid() / y.shape[-1],
}


@pytest.mark.parametrize("host_program", ["python", "native"])
@pytest.mark.parametrize("name", MADE)
def test_sizes_that_kernels_cannot_compute(name: str, host_program: str) -> None:
    """``int(1.5 * n)`` is computed by the host program, once, and kernels are given it, those of the backward too."""
    fn = MADE[name]
    run = torch.compile(fn, backend="mlc", dynamic=True, fullgraph=True, options={"host_program": host_program})
    for shape in ((2, 3, 10, 12), (3, 2, 17, 9), (4, 2, 23, 31)):
        x = torch.randn(shape, requires_grad=True)
        results, expected = ([y] if isinstance(y := f(x), Tensor) else y for f in (run, fn))
        close(results, expected)
        for ours, eager in zip(results, expected, strict=True):
            seed = torch.randn_like(eager)
            close(
                torch.autograd.grad(ours, x, seed, retain_graph=True),
                torch.autograd.grad(eager, x, seed, retain_graph=True),
            )


def test_sizes_made_of_sizes_that_the_data_decide() -> None:
    def f(x: Tensor) -> Tensor:
        return F.interpolate(x[x > 0][None, None], scale_factor=1.5) * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(f, backend="mlc", fullgraph=True, dynamic=True)
        for n in (30, 77):
            x = torch.randn(n)
            close(run(x), f(x))


def test_memory_is_for_what_sizes_are_and_not_for_what_they_may_be() -> None:
    def f(x: Tensor) -> Tensor:
        torch._check(x.shape[0] < 1 << 40)
        return (x * 2).softmax(0).cumsum(0)

    every_size(f, lambda n: (torch.randn(n),), (5, 300, 7000))


def test_chunks_and_splits() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x.chunk(2, 1)
        c = x.unfold(1, 3, 2).mean(-1)
        return a.sigmoid() * b, c, x.view(x.shape[0], 2, -1).flip(2), torch.stack(x.tensor_split(3, 0)[:1])

    every_size(f, lambda n: (torch.randn(3 * n, 2 * n),), (3, 5, 8))


def test_sizes_zero_and_one() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x * y
        return z.sum(0), z.softmax(-1), (x @ y.t()).relu(), torch.cat((x, y)).amax(1) if x.shape[1] else z, z.mean()

    every_size(f, lambda n: (torch.randn(n, 6), torch.randn(n, 6)), (3, 0, 1, 9))
    every_size(f, lambda n: (torch.randn(4, n), torch.randn(4, n)), (3, 0, 1, 9))


def test_marked_sizes() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * x.shape[0]).softmax(0) + x.shape[0] // 2

    counter = CompileCounterWithBackend("mlc")
    run = torch.compile(f, backend=counter, fullgraph=True)
    for n in (4, 2, 30, 64):
        x = torch.randn(n, 5)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        close(run(x), f(x))
    assert counter.frame_count == 1
    unbacked = torch.compile(f, backend="mlc", fullgraph=True)
    for n in (0, 1, 7):
        x = torch.randn(n, 5)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        close(unbacked(x), f(x))
    static = torch.randn(9, 5)
    torch._dynamo.mark_static(static, 0)
    close(torch.compile(f, backend="mlc", dynamic=True)(static), f(static))


def test_sizes_that_are_numbers_of_the_caller() -> None:
    def f(x: Tensor, k: int, scale: float) -> tuple[Tensor, int]:
        return x.roll(k, 0)[: k + 1] * scale + k, x.shape[0] * k

    run = torch.compile(f, backend="mlc", dynamic=True, fullgraph=True)
    x = torch.randn(12)
    for k, scale in ((3, 0.5), (5, 0.25), (7, -1.5)):
        ours, eager = run(x, k, scale), f(x, k, scale)
        close(ours[0], eager[0])
        assert ours[1] == eager[1]


# --- sizes that the data decide ---------------------------------------------------------------------------------------


def chosen(x: Tensor) -> Tensor:
    kept = torch.masked_select(x, x > 0)
    return (kept * 2).cumsum(0) - kept.mean()


def indexed(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.gt(0.5).nonzero(as_tuple=True)
    return x[rows].sum(-1) * columns, (rows * 10 + columns).float().relu()


def repeated(x: Tensor) -> Tensor:
    counts = x[:, 0].abs().mul(3).long()
    spread = x.repeat_interleave(counts, 0)
    return spread.exp() / (spread.sum(0) + 7)


def sliced(x: Tensor) -> Tensor:
    n = x.abs().sum().long().remainder(x.shape[0] - 1).item()
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    return x[:n].sum(1) + x[n:].mean() + n


def made(x: Tensor) -> Tensor:
    n = (x > 0).sum().item()
    torch._check(n >= 0)
    return torch.zeros(n, 3).add(1).cumsum(0) + torch.arange(n).unsqueeze(1)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = torch.tensor([2, x.shape[0] - 2]).tolist()
    torch._check(a + b == x.shape[0])
    first, second = x.split([a, b])
    return first.exp(), second.softmax(0)


def unique(x: Tensor) -> Tensor:
    values, back = x.mul(2).round().unique(return_inverse=True)
    return values.square()[back] + values.sum()


def consecutive(x: Tensor) -> Tensor:
    return x[:, 0].round().unique_consecutive(dim=-1).exp()


PROGRAMS = [chosen, indexed, repeated, sliced, made, split, unique, consecutive]


def _positions_are_integers() -> bool:
    """Whether torch's fake tensors know what ``unique`` gives; those of 2.11 do not."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        back: Tensor = torch.unique(torch.empty(3), return_inverse=True)[1]
    return back.dtype is torch.int64


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_sizes_that_the_data_decide(fn: Callable[[Tensor], Any]) -> None:
    if fn is unique and not _positions_are_integers():
        pytest.skip("torch's own tracing takes positions for floats, and indexes with none of those")
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        counter = CompileCounterWithBackend("mlc")
        run = torch.compile(fn, backend=counter, fullgraph=True, dynamic=True)
        for x in (torch.randn(6, 5), torch.rand(6, 5), torch.rand(6, 5) + 0.6, torch.randn(9, 5)):
            close(run(x), fn(x))
        if fn not in (split,):
            close(run(-torch.ones(6, 5)), fn(-torch.ones(6, 5)))
        assert counter.frame_count == 1


def test_gradients_over_sizes_that_the_data_decide() -> None:
    def f(x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return x[rows].tanh().square().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(f, backend="mlc", fullgraph=True)
        for x in (torch.randn(7, 4), torch.randn(7, 4), -torch.rand(7, 4)):
            grads = []
            for fn in (run, f):
                leaf = x.clone().requires_grad_()
                fn(leaf).backward()
                grads.append(leaf.grad)
            close(*grads)


def test_a_check_that_fails() -> None:
    def f(x: Tensor) -> Tensor:
        n = x.sum().long().item()
        torch._check(n <= 4, lambda: "too many")
        torch._check(n >= 0)
        return torch.ones(n) * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(f, backend="mlc", fullgraph=True)
        close(run(torch.ones(3)), f(torch.ones(3)))
        with pytest.raises(RuntimeError):
            run(torch.full((3,), 2.0))


# --- more than 2^31 elements ------------------------------------------------------------------------------------------


def programs_of(fn: Callable[..., Any], *inputs: Tensor, target: str) -> list[str]:
    """The kernels' sources for fake inputs, which have no memory."""
    from torch_mlc.dynamo_backend.entry.capture import capture
    from torch_mlc.dynamo_backend.entry.compile import compile_graph
    from torch_mlc.dynamo_backend.tracing.fake_device import retarget
    from torch_mlc.runtime.settings.options import Options

    graphs = capture(fn, inputs)
    if target != "cpu":
        retarget(graphs, "cuda")
    options = Options.resolve(None, {"target": target, "strict": True}, {})
    compiled = compile_graph(graphs[0], (), options=options, load=False, fresh=True)
    assert compiled.stages is not None
    return [k.source.text for k in compiled.stages.kernels.values() if k.source is not None]


def huge(x: Tensor) -> Tensor:
    return x.relu() + 1


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_indices_beyond_32_bits(target: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if target != "cpu":
        pytest.importorskip("triton")
    with FakeTensorMode():
        small, large = torch.empty(1 << 20), torch.empty((1 << 31) + 9)
        wide = torch.empty(1 << 16, 1 << 17)
    texts = {
        name: "\n".join(programs_of(fn, x, target=target))
        for name, fn, x in (
            ("small", huge, small), ("large", huge, large),
            ("rows", lambda x: x.softmax(-1), wide), ("columns", lambda x: x.sum(0), wide),
        )
    }  # fmt: skip
    if target == "cpu":
        # Addresses are 64 bits wide always; no index that may be beyond is made in 32 and widened.
        for name in ("large", "rows", "columns"):
            for line in texts[name].splitlines():
                assert not ("sext <" in line and "x i32>" in line and "x i64>" in line), line
    else:
        assert "int64" not in texts["small"]
        for name in ("large", "rows", "columns"):
            assert "tl.int64" in texts[name], texts[name]


@pytest.mark.parametrize("place", [(1 << 31) + 5, (1 << 33) - 1])
def test_addresses_beyond_32_bits(place: int) -> None:
    """Index arithmetic of an emitted CPU kernel at a place past 2^31, on a mapping of which few pages are touched."""
    import mmap

    rows, width = place // 4096 + 2, 4096
    memory = mmap.mmap(-1, rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(memory, dtype=torch.int8).view(rows, width)
    row, column = divmod(place, width)
    x[row, column] = 7
    index = torch.tensor([row, 0, row])

    def f(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x[index].int().sum(-1), x[row].int() * 2, x.t()[column, row:].int()

    for dynamic in (False, True):
        ours = torch.compile(f, backend="mlc", fullgraph=True, dynamic=dynamic)(x, index)
        for a, b in zip(ours, f(x, index), strict=True):
            assert torch.equal(a, b)
        assert ours[0].tolist() == [7, 0, 7]


def test_the_oracle_agrees_on_wide_indices() -> None:
    """Simplified and plain index expressions, evaluated at places beyond 2^31, are equal."""
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    from torch_mlc.ir.expr.index import simplify
    from torch_mlc.ir.expr.symbols import Size, SymbolTable
    from torch_mlc.ir.expr.value import symbol
    from torch_mlc.ir.oracle.text import index_text

    i, j, n = symbol("i0"), symbol("i1"), symbol("s0")
    big = 1 << 33
    table = SymbolTable((Size(n, 2, None),))
    extents = {i: sympy.Integer(big), j: n}
    exprs = [
        FloorDiv(i * n + j, n), ModularIndexing(i * n + j, 1, n), FloorDiv(i * n + j, 4096) * 4096,
        ModularIndexing(i * n + j, n, 1 << 20) + FloorDiv(i, 1 << 20) * (1 << 20), ModularIndexing(i * 6 + 5, 3, big),
    ]  # fmt: skip
    for expr in exprs:
        simple = simplify(expr, extents, table)
        for a in (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) + 7, big - 1):
            for size in (2, 3, 65_537, (1 << 31) + 11):
                for b in {0, 1, size - 1}:
                    values = {"i0": a, "i1": b, "s0": size}
                    plain, short = (
                        eval(index_text(e, lambda s: s.name), {"max": max, "min": min}, dict(values))
                        for e in (expr, simple)
                    )
                    assert plain == short, (expr, simple, values)
