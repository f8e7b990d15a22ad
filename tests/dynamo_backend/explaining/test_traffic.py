"""Bytes by hand: of nests whose loops are written out, and of graphs with views, tables, library calls and writes in
place."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.report import GraphReport
from torch_mlc.dynamo_backend.reports.traffic import Visits, cache_of, kept_near, traffic_of
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse

ROWS, COLUMNS = 8, 96


def parse_nest(text: str) -> LoopNest:
    nest = parse(text)
    assert isinstance(nest, LoopNest)
    return nest


# Sums of rows, then every element over its row's sum.
NORMALISE = """
@nest(outputs=['out0'])
def rows(in0: tensor(float32, [8, 96]), out0: tensor(float32, [8, 96])):
    t0 = local(float32[8])
    for i in {grid}(8):
        for r_0 in serial({steps}):
            for r_1 in {lanes}({width}):
                with block('b0'):
                    i0 = spatial(8, i)
                    r0 = reduction(96, r_1 + {width}*r_0)
                    t0[i0] = sum.update(in0[i0, r0])
        for s_0 in serial({steps}):
            for s_1 in {lanes}({width}):
                with block('b1'):
                    i0 = spatial(8, i)
                    r0 = spatial(96, s_1 + {width}*s_0)
                    out0[i0, r0] = div(in0[i0, r0], t0[i0])
"""
KEPT = """
@nest(outputs=['out0'])
def rows(in0: tensor(float32, [8, 96]), out0: tensor(float32, [8, 96])):
    t0 = local(float32[8])
    t1 = local(float32[8, 96])
    for i in block_x(8):
        for r in serial(96):
            with block('b0'):
                i0 = spatial(8, i)
                r0 = spatial(96, r)
                t1[i0, r0] = in0[i0, r0]
        for r in serial(96):
            with block('b1'):
                i0 = spatial(8, i)
                r0 = reduction(96, r)
                t0[i0] = sum.update(t1[i0, r0])
        for r in serial(96):
            with block('b2'):
                i0 = spatial(8, i)
                r0 = spatial(96, r)
                out0[i0, r0] = div(t1[i0, r0], t0[i0])
"""


@pytest.mark.parametrize(
    ("text", "visits"),
    [
        (NORMALISE.format(grid="serial", steps=96, lanes="vectorized", width=1), 2),
        (NORMALISE.format(grid="block_x", steps=3, lanes="thread_x", width=32), 2),
        # The whole row is one tile, which both blocks hold.
        (NORMALISE.format(grid="block_x", steps=1, lanes="thread_x", width=96), 1),
        (KEPT, 1),
    ],
    ids=["loops", "looped tile", "one tile", "local buffer"],
)
def test_second_visits_of_a_row_count_unless_it_is_kept(text: str, visits: int) -> None:
    size = ROWS * COLUMNS * 4
    traffic = traffic_of(parse_nest(text))
    assert traffic.arrays == {"in0": Visits(size, visits * size, 0), "out0": Visits(size, 0, size)}
    assert traffic.arrays["in0"].times == visits
    assert traffic.moved == (visits + 1) * size and traffic.least == 2 * size


@pytest.mark.parametrize(("row", "visits"), [(96, 1), (97, 2)])
@pytest.mark.parametrize("lanes", ["vectorized", "thread_x"])
def test_a_second_visit_finds_a_row_in_the_cache_that_holds_it(row: int, visits: int, lanes: str) -> None:
    """With what is written between both visits: a cache of two rows of 96."""
    grid, width = ("serial", 1) if lanes == "vectorized" else ("block_x", 1)
    text = NORMALISE.format(grid=grid, steps=96, lanes=lanes, width=width).replace("96", str(row))
    traffic = traffic_of(parse_nest(text), cache=2 * 96 * 4)
    size = ROWS * row * 4
    assert traffic.arrays == {"in0": Visits(size, visits * size, 0), "out0": Visits(size, 0, size)}
    assert traffic.least == 2 * size


APART = """
@nest(outputs=['out0', 'out1'])
def twice(in0: tensor(float32, [8, 96]), in1: tensor(int64, [8]), out0: tensor(float32, [8, 96]), out1: tensor(float32, [8, 96])):
    for i in serial(8):
        for r in serial(96):
            with block('b0'):
                i0 = spatial(8, i)
                r0 = spatial(96, r)
                out0[i0, r0] = exp(in0[i0, r0])
    for i_1 in serial(8):
        for r_1 in serial(96):
            with block('b1'):
                i0 = spatial(8, i_1)
                r0 = spatial(96, r_1)
                out1[i0, r0] = {value}
"""  # noqa: E501


@pytest.mark.parametrize("value", ["exp(in0[i0, r0])", "neg(out0[i0, r0])"], ids=["read", "written"])
def test_loops_that_are_apart_go_through_all_of_it(value: str) -> None:
    """So all that both write has to stay there, too."""
    nest, size = parse_nest(APART.format(value=value)), ROWS * COLUMNS * 4
    again = "in0" if "in0" in value else "out0"
    for cache, reads in ((3 * size, 0), (3 * size - 1, 1), (0, 1)):
        arrays = traffic_of(nest, cache=cache).arrays
        assert arrays[again].read == (again == "in0") * size + reads * size
        assert arrays["out0"].written == arrays["out1"].written == size


def test_what_data_choose_may_be_anywhere() -> None:
    """Rows of a table that are gathered twice in each step: the table has to stay, not one row of it."""
    text = """
@nest(outputs=['out0'])
def gathered(in0: tensor(float32, [64, 96]), in1: tensor(int64, [8]), out0: tensor(float32, [8])):
    t0 = local(float32[8])
    for i in serial(8):
        for r in serial(96):
            with block('b0'):
                i0 = spatial(8, i)
                r0 = reduction(96, r)
                t0[i0] = sum.update(in0[in1[i0], r0])
        for s in serial(96):
            with block('b1'):
                i0 = spatial(8, i)
                r0 = reduction(96, s)
                out0[i0] = sum.update(div(in0[in1[i0], r0], t0[i0]))
"""
    named = 8 * 96 * 4
    assert traffic_of(parse_nest(text), cache=1000).arrays["in0"].read == 2 * named
    assert traffic_of(parse_nest(text), cache=named + 8 * 8 + 8 * 4).arrays["in0"].read == named


def test_a_cache_is_shared_by_the_programs_of_a_multiprocessor() -> None:
    text = NORMALISE.format(grid="block_x", steps=3, lanes="thread_x", width=32)
    nest = parse_nest(text)
    few = parse_nest(text.replace("['out0'])", "['out0'], annotations={'num_warps': 32})"))
    cpu, gpu = Target("cpu", "x86-64-v3", 1).machine, Target("cuda", "sm_90", 132).machine
    assert cache_of(cpu, nest) == cpu.l2_bytes
    assert cache_of(gpu, nest) == gpu.l2_bytes // (gpu.cores * 16)
    assert cache_of(gpu, few) == gpu.l2_bytes // (gpu.cores * 2)


@pytest.mark.parametrize(("row", "visits"), [(192, 1), (193, 2)])
def test_what_caches_are_asked_to_keep_stays_beside_what_is_written(row: int, visits: int) -> None:
    text = NORMALISE.format(grid="block_x", steps=96, lanes="thread_x", width=1).replace("96", str(row))
    nest = parse_nest(text.replace("with block('b0'):", "with block('b0', annotations={'evict:in0': 'evict_last'}):"))
    assert kept_near(nest) == {"in0"}
    arrays = traffic_of(nest, cache=192 * 4).arrays
    assert arrays["in0"].times == visits and arrays["out0"].written == ROWS * row * 4


def test_a_cache_is_shared_by_the_programs_that_registers_have_room_for() -> None:
    nest = parse_nest(NORMALISE.format(grid="block_x", steps=3, lanes="thread_x", width=32))
    gpu = Target("cuda", "sm_90", 132).machine
    assert cache_of(gpu, nest, 1) == gpu.l2_bytes // gpu.cores
    assert cache_of(gpu, nest, 64) == cache_of(gpu, nest)


def test_long_rows_are_read_again() -> None:
    def read(columns: int) -> float:
        return explained(lambda x: torch.softmax(x, -1), torch.randn(4, columns)).traffic.reads["arg0_1"]

    assert read(2048) == 1 and read(1 << 20) > 1


def test_neighbours_in_one_visit_are_read_once() -> None:
    text = """
@nest(outputs=['out0'])
def stencil(in0: tensor(float32, [98]), out0: tensor(float32, [96])):
    for i in serial(96):
        with block('b0'):
            i0 = spatial(96, i)
            out0[i0] = add(add(in0[i0], in0[1 + i0]), in0[2 + i0])
"""
    assert traffic_of(parse_nest(text)).arrays["in0"] == Visits(98 * 4, 98 * 4, 0)


def test_what_is_written_in_place_is_read_and_written() -> None:
    text = """
@nest(outputs=['in0'], annotations={'in_place': 'in0'})
def double(in0: tensor(float32, [96])):
    for i in serial(96):
        with block('b0'):
            i0 = spatial(96, i)
            in0[i0] = add(in0[i0], in0[i0])
"""
    traffic = traffic_of(parse_nest(text))
    assert traffic.moved == traffic.least == 2 * 96 * 4


def explained(function: Callable[..., object], *inputs: Tensor) -> GraphReport:
    (graph,) = torch_mlc.explain(function, *inputs).graphs
    return graph


def test_of_a_gathered_table_the_rows_named_count() -> None:
    table, rows = torch.randn(1000, 64), torch.randint(1000, (5,))
    graph = explained(lambda t, r: torch.nn.functional.embedding(r, t) * 2.0, table, rows)
    assert graph.traffic.compulsory == graph.traffic.moved == 5 * 8 + 2 * 5 * 64 * 4
    assert "moves 2.5 KiB in kernels and 0 B in library calls, 1.00 times the 2.5 KiB" in str(graph)


def test_one_of_a_kind_is_told_as_one() -> None:
    graph = explained(lambda x: torch.softmax(x, -1), torch.randn(3, 50))
    assert "cpu: 1 kernel launch (1 kernel), 0 library calls, " in str(graph)


def test_library_calls_move_their_operands_and_results() -> None:
    a, b, c = torch.randn(32, 48), torch.randn(16, 48), torch.randn(16, 16)
    graph = explained(lambda a, b, c: a @ b.t() @ c, a, b, c)
    inputs, result = (32 * 48 + 16 * 48 + 16 * 16) * 4, 32 * 16 * 4
    assert graph.launches == 0 and graph.traffic.kernels == 0
    # The first product is written, read by the second, and that is written.
    assert graph.traffic.libraries == inputs + 3 * result
    assert sum(c.moved for c in graph.libraries) == graph.traffic.libraries
    assert graph.traffic.compulsory == inputs + result
    assert graph.traffic.ratio == (inputs + 3 * result) / (inputs + result)


def test_views_inputs_that_come_back_and_halves_of_an_input() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :24].exp().t(), y.view(-1)

    graph = explained(f, torch.randn(32, 48), torch.randn(7, 9))
    # Half of x is read and written; y is handed through.
    assert graph.traffic.compulsory == graph.traffic.moved == 2 * 32 * 24 * 4


def test_an_input_written_in_place_is_read_and_written() -> None:
    graph = explained(lambda x: x.mul_(2.0), torch.randn(64, 96))
    assert graph.traffic.compulsory == graph.traffic.moved == 2 * 64 * 96 * 4


def test_a_call_over_a_table_moves_what_its_calls_do() -> None:
    tensors = [torch.randn(n) for n in (64, 4096, 129, 77)]
    graph = explained(lambda ts: [t.sin() for t in ts], tensors)
    size = sum(t.numel() for t in tensors) * 4
    assert graph.launches == 1 and graph.traffic.compulsory == 2 * size
    assert graph.traffic.moved == 2 * size


def test_reads_of_an_input_add_up_over_kernels_and_library_calls() -> None:
    x = torch.randn(32, 48)
    graph = explained(lambda x: (x.t() @ x, x[:, :24].exp()), x)
    (times,) = graph.traffic.reads.values()
    # Twice by the product, half of it once more.
    assert graph.launches == 1 and times == 2.5


ROW = 40000


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("columns", [1024, ROW])
@pytest.mark.parametrize("function", [torch.nn.functional.softmax, torch.nn.functional.layer_norm])
def test_visits_are_the_loads_of_the_code(function: Callable[..., Tensor], columns: int) -> None:
    with FakeTensorMode():
        x = torch.empty(8192, columns)
    shape = (columns,) if function is torch.nn.functional.layer_norm else -1
    report = torch_mlc.explain(lambda x: function(x, shape), x, target="cuda:sm_90")
    (kernel,) = report.kernels
    assert kernel.traffic is not None and kernel.scheduled is not None
    loads = kernel.source.count("tl.load(in0_ptr")
    assert traffic_of(kernel.scheduled).arrays["in0"].times == loads
    assert (loads > 1) == (columns == ROW)
    # Of such rows the second cache keeps one for each multiprocessor.
    assert kernel.traffic.arrays["in0"].times == 1
