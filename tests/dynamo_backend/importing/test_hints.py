"""Sizes that have no value while a graph is compiled: those that data decide, and those that a caller marks unbacked.

What is chosen by a typical size has to do without one, on CPUs and for a GPU that is not here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.versions import TORCH
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.dynamo_backend.tracing.hints import hint_of, is_decided_by_data
from torch_mlc.runtime.settings.options import Options

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH, CLASSES = 32, 10
Program = Callable[[nn.Module, Tensor, Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    """[rows, width] as one sample of four heads."""
    return x.view(-1, 4, WIDTH // 4).transpose(0, 1)[None]


def attention(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (heads(t.contiguous()) for t in m(x).chunk(3, -1))
    return ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).reshape(-1, WIDTH)


# By what is to be decided: a module, and what is made of it, of rows, and of a number for each row.
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Program]] = {
    "cross-entropy": (lambda: nn.Linear(WIDTH, CLASSES), lambda m, x, y: F.cross_entropy(m(x), y % CLASSES)),
    "log-softmax": (lambda: nn.Linear(WIDTH, CLASSES), lambda m, x, y: m(x).log_softmax(-1)),
    "losses of rows": (
        lambda: nn.Linear(WIDTH, CLASSES), lambda m, x, y: F.cross_entropy(m(x), y % CLASSES, reduction="none")),
    "attention": (lambda: nn.Linear(WIDTH, 3 * WIDTH), attention),
    "fused attention": (nn.Identity, lambda m, x, y: F.scaled_dot_product_attention(heads(x), heads(x), heads(x))),
    "causal": (
        nn.Identity, lambda m, x, y: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)),
    "layer norm": (lambda: nn.LayerNorm(WIDTH), lambda m, x, y: F.gelu(m(x))),
    "group norm": (lambda: nn.GroupNorm(4, WIDTH), lambda m, x, y: m(x)),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), lambda m, x, y: m(x)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        lambda m, x, y: m(x.view(-1, 2, 4, 4)).flatten(1)),
    "depthwise": (lambda: nn.Conv2d(2, 2, 3, groups=2), lambda m, x, y: m(x.view(-1, 2, 4, 4))),
    "embedding": (lambda: nn.Embedding(CLASSES, 4), lambda m, x, y: m(y % CLASSES)),
    "embedding bag": (lambda: nn.EmbeddingBag(CLASSES, 4), lambda m, x, y: m(y[:, None] % CLASSES)),
    "gather": (nn.Identity, lambda m, x, y: x.gather(1, y[:, None] % WIDTH)),
    "index_add": (nn.Identity, lambda m, x, y: torch.zeros(CLASSES, WIDTH).index_add(0, y % CLASSES, x)),
    "products": (lambda: nn.Linear(WIDTH, 4), lambda m, x, y: m(x) @ m(x).t()),
    "recurrent": (lambda: nn.RNNCell(WIDTH, WIDTH), lambda m, x, y: m(x, m(x, m(x)))),
    "reductions": (nn.Identity, lambda m, x, y: x.var(0) + x.logsumexp(0) + x.amax(0) + x.cumsum(0).mean(0)),
    "join": (nn.Identity, lambda m, x, y: torch.cat([x.sin(), x * 2, torch.ones(2, WIDTH)])),
}  # fmt: skip
# Of those whose rewrites ask for typical sizes both ways are tried. Torch's own tracing of some asks whether there is a
# row, which a program can promise of a size that data decide.
BOTH = ("cross-entropy",)
CHOSEN = ("fused attention", "causal", "batch norm", "convolution", "reductions", "log-softmax")
WAYS = [
    *((name, "chosen") for name in PROGRAMS if name in (*BOTH, *CHOSEN)),
    *((name, "marked") for name in PROGRAMS if name not in CHOSEN),
]


def results(name: str, way: str, backend: str | None) -> list[Tensor | None]:
    """The result of a program, and the gradients of its rows and weights."""
    torch.manual_seed(0)
    make, program = PROGRAMS[name]
    m, x, y = make(), torch.randn(9, WIDTH, requires_grad=True), torch.randint(0, 100, (9,))
    chosen = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0]).bool()

    def run(x: Tensor, y: Tensor) -> Tensor:
        if way == "chosen":
            x, y = x[chosen], y[chosen]
            torch._check(x.shape[0] > 1)
        return program(m, x, y)

    if way == "marked":
        mark_unbacked(x, 0)
        mark_unbacked(y, 0)
    made = (torch.compile(run, backend=backend, fullgraph=True) if backend else run)(x, y)
    if made.requires_grad:
        made.square().mean().backward()
    return [made.detach(), x.grad, *(p.grad for p in m.parameters())]


@pytest.mark.parametrize(("name", "way"), WAYS, ids=str)
def test_a_number_of_rows_that_is_not_known(name: str, way: str) -> None:
    if way == "marked" and name in ("cross-entropy", "losses of rows") and TORCH < (2, 12):
        pytest.skip("torch 2.11 asks whether two numbers of rows differ, whatever the backend")
    with config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(results(name, way, "mlc"), results(name, way, None), rtol=1e-4, atol=1e-5)


def test_a_loss_of_rows_that_data_decide_stays_whole() -> None:
    """However few rows a chunk is asked to have: there is no bound for their number."""
    layer, x, y = nn.Linear(8, 4), torch.randn(40, 8), torch.randint(0, 4, (40,))

    def loss(x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
        return F.cross_entropy(layer(x[chosen]), y[chosen])

    with config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(loss, backend="mlc", fullgraph=True, options={"loss_chunk": 4})
        for rows in (40, 7, 1):
            chosen = torch.arange(40) < rows
            torch.testing.assert_close(run(x, y, chosen), loss(x, y, chosen))


@pytest.mark.parametrize("name", ["cross-entropy", "attention", "layer norm", "recurrent"])
def test_for_a_gpu_that_is_not_here(name: str) -> None:
    pytest.importorskip("triton")
    make, program = PROGRAMS[name]
    m, x, y = make(), torch.randn(9, WIDTH, requires_grad=True), torch.randint(0, 100, (9,))
    mark_unbacked(x, 0)
    mark_unbacked(y, 0)
    graphs = capture(lambda x, y: program(m, x, y), (x, y))
    retarget(graphs, "cuda")
    options = Options.resolve(None, {"target": "cuda:sm_90", "strict": True}, {})
    for graph in graphs:
        assert compile_graph(graph, (), options=options, load=False, fresh=True).stages is not None


def test_typical_values() -> None:
    size = ShapeEnv().create_unbacked_symint()
    assert is_decided_by_data(size) and not is_decided_by_data(5)
    assert hint_of(5) == 5 and hint_of(2 * size + 1) == 129
