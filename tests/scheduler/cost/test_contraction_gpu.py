"""Which products a GPU computes with our loops, and that it says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.expr.value import loads
from torch_mlc.ir.graph.graph import Graph, Library, Reduction
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.passes import decompose_contractions, eliminate_dead, simplify_algebra

BF16 = torch.bfloat16
SM90 = gpu_target("cuda:sm_90")


class Program(torch.nn.Module):
    def __init__(self, fn: Callable[..., object]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *inputs: Tensor) -> object:
        return self.fn(*inputs)


def decided(fn: Callable[..., object], *inputs: Tensor, target: Target = SM90) -> Graph:
    model, fakes = on_fake_device(Program(fn), inputs, "cuda")
    graphs = capture(model, fakes)
    graph = eliminate_dead(simplify_algebra(import_graph(graphs[0])))
    return eliminate_dead(decompose_contractions(graph, PassContext(target_of=lambda device: target)))


def products(graph: Graph) -> tuple[list[Reduction], list[Library]]:
    opened = [n for n in graph.nodes if isinstance(n, Reduction)]
    return opened, [n for n in graph.nodes if isinstance(n, Library)]


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def quantised(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return x @ (w.to(x.dtype) * s).t()


def grouped(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    parts = w.unflatten(1, (s.shape[1], -1)).to(x.dtype) * s.unsqueeze(-1)
    return x @ parts.flatten(1).t()


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_packed_weights_are_read_packed_for_few_rows(rows: int) -> None:
    graph = decided(quantised, empty(rows, 4096), empty(4096, 4096, dtype=torch.int8), empty(4096, 1))
    (total,), libraries = products(graph)
    assert not libraries
    assert {ld.dtype.torch for ld in loads(total.values[0])} == {BF16, torch.int8}
    assert "made of" in total.origins[0].note


def test_few_results_of_long_sums_are_made_in_pieces() -> None:
    """As many as give each multiprocessor of the target a program, or the library keeps the product."""
    shapes = empty(16, 14336), empty(4096, 14336, dtype=torch.int8), empty(4096, 1)
    (pieces, total), libraries = products(decided(quantised, *shapes))
    assert not libraries and "the sum in 2 pieces" in pieces.origins[0].note
    assert [int(e) for e in pieces.types[0].shape] == [2, 16, 4096]
    assert [int(e) for e in total.reduce_shape] == [2]
    (whole,), _ = products(decided(quantised, *shapes, target=replace(SM90, cores=32)))
    assert "pieces" not in whole.origins[0].note
    assert not products(decided(with_gelu, empty(64, 1 << 16), empty(128, 1 << 16)))[0]


def test_steps_are_dealt_where_tiles_do_not_fill_the_machine() -> None:
    """40 tiles for 132 multiprocessors; where tiles fill those, or as many as they are, each is one program's."""
    shapes = empty(128, 8192), empty(5120, 8192, dtype=torch.int8), empty(5120, 1)
    (runs,), libraries = products(decided(quantised, *shapes))
    note = runs.origins[0].note
    assert not libraries and "the steps of 40 tiles dealt to 132 programs (whole tiles take" in note
    assert [int(e) for e in runs.types[0].shape] == [132, 2, 128, 128]
    groups = empty(128, 8192), empty(5120, 8192, dtype=torch.int8), empty(5120, 64)
    assert not any("dealt" in n.origins[0].note for n in products(decided(grouped, *groups))[0])
    (whole,), _ = products(decided(quantised, *shapes, target=replace(SM90, cores=40)))
    assert "dealt" not in whole.origins[0].note and len(whole.reduce_axes) == 1


def test_rows_that_start_anywhere_are_the_library_s() -> None:
    """Their elements would be copied one by one."""
    for depth, expected in ((1024, True), (1021, False)):
        opened, _ = products(decided(with_gelu, empty(2048, depth), empty(4096, depth)))
        assert bool(opened) is expected


def test_many_rows_are_the_library_s() -> None:
    """Multiplying is all of the time, and the library does it faster."""
    graph = decided(quantised, empty(8192, 4096), empty(4096, 4096, dtype=torch.int8), empty(4096, 1))
    opened, (library,) = products(graph)
    assert not opened and "cuBLAS in" in library.reason


def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def with_gelu(x: Tensor, w: Tensor) -> Tensor:
    return functional.gelu(x @ w.t())


def with_norm(x: Tensor, w: Tensor) -> Tensor:
    return functional.layer_norm(functional.gelu(x @ w.t()), (w.shape[0],))


def test_an_epilogue_pays_where_the_product_is_shallow() -> None:
    for depth, expected in ((512, True), (16384, False)):
        opened, _ = products(decided(with_gelu, empty(8192, depth), empty(4096, depth)))
        assert bool(opened) is expected
    assert not products(decided(linear, empty(8192, 512), empty(4096, 512)))[0], "nothing follows: nothing is saved"


def test_what_feeds_a_reduction_saves_nothing() -> None:
    """Its tile ends in memory, where the reduction's kernel would have made it of a result as large."""
    shapes = empty(8192, 512), empty(4096, 512)
    alone, followed = (decided(fn, *shapes) for fn in (with_gelu, with_norm))
    (total,), _ = products(alone)
    assert "131072 KiB of the result kept in registers" in total.origins[0].note
    assert any("with nothing saved" in n.reason for n in products(followed)[1])


def log_total(x: Tensor, w: Tensor) -> Tensor:
    return torch.logsumexp((x @ w.t()).float(), 1)


def gradient_of_bias(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, x @ w.t(), 0).sum(0)


@pytest.mark.parametrize(("rows", "dtype", "expected"), [(8192, BF16, True), (128, BF16, False)])
def test_a_reduction_that_does_not_join_keeps_nothing_in_registers(
    rows: int, dtype: torch.dtype, expected: bool
) -> None:
    """Tiles give parts of a sum; of rows that are no tile, or of what is read twice, they do not."""
    given = (empty(*shape, dtype=dtype) for shape in ((rows, 64), (4096, 64), (rows, 4096)))
    opened, libraries = products(decided(gradient_of_bias, *given))
    assert any(n.origins[0].note for n in opened) is expected and bool(libraries) is not expected
    _, (library,) = products(decided(log_total, empty(rows, 16, dtype=dtype), empty(50304, 16, dtype=dtype)))
    assert "with nothing saved" in library.reason


def test_what_others_need_is_written_while_a_shallow_product_multiplies() -> None:
    """A residual stream before a norm: the norm's kernel then waits for neither product nor stream, and writes none."""

    def block(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x + h @ w.t()
        return y, functional.layer_norm(y, (w.shape[0],))

    for depth, expected in ((768, True), (3072, False)):
        _, libraries = products(decided(block, empty(8192, 768), empty(8192, depth), empty(768, depth)))
        assert bool(libraries) is not expected and any("24576 KiB less" in n.reason for n in libraries) is not expected


def test_full_float32_is_the_library_s_unless_memory_decides() -> None:
    kinds = {"dtype": torch.float32}
    assert not products(decided(with_gelu, empty(4096, 1024, **kinds), empty(4096, 1024, **kinds)))[0]
    few = decided(quantised, empty(1, 4096, **kinds), empty(4096, 4096, dtype=torch.int8), empty(4096, 1, **kinds))
    assert products(few)[0]


def test_products_of_bytes_are_opened_where_rows_run_along_the_depth() -> None:
    def scaled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch._int_mm(x, w.t()) * s

    x, w, s = (empty(*shape, dtype=kind) for shape, kind in (
        ((1024, 1024), torch.int8), ((4096, 1024), torch.int8), ((4096,), torch.float32)))  # fmt: skip
    (total,), libraries = products(decided(scaled, x, w, s))
    assert not libraries and {ld.dtype.torch for ld in loads(total.values[0])} == {torch.int8}
    _, (library,) = products(decided(lambda x, w, s: torch._int_mm(x, w) * s, x, w.reshape(1024, 4096), s))
    assert "contiguous in depth" in library.reason


def test_small_products_and_integers_stay() -> None:
    assert not products(decided(with_gelu, empty(8, 8), empty(8, 8)))[0]
    kinds = {"dtype": torch.int32}
    assert not products(decided(linear, empty(64, 64, **kinds), empty(64, 64, **kinds)))[0]
