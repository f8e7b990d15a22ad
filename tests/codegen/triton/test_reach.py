"""Indices of 32 bits where sizes are symbols: how far they reach, which form of a kernel a launch takes, and what the
shorter indices spare."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, ModularIndexing

from torch_mlc.codegen.kernel import INDEX_MAX, NARROW, WIDE, KernelSource, wide_source
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.codegen.triton.index import Ranges
from torch_mlc.codegen.triton.reach import _Reach, reach_of
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu.launch import reach_function
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.runtime.triton.report import elf_sections
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.rules import default_schedule

Tensor = torch.Tensor
SM90 = gpu_target("cuda:sm_90")
S0, S1, K0, K1 = map(symbol, ("s0", "s1", "k0", "k1"))


def nests(fn: Callable[..., Any], *args: Tensor) -> Iterator[LoopNest]:
    """The scheduled kernels of a function of tensors whose sizes may vary."""
    gm = make_fx(fn, decomposition_table(), "symbolic")(*args)
    retarget([gm], "cuda")
    for function in fuse(import_graph(gm)).functions.values():
        yield default_schedule(lower_to_loops(function), SM90).nest


@cache
def source_of(fn: Callable[..., Any], *shape: int) -> KernelSource:
    (nest,) = nests(fn, torch.zeros(*shape))
    return emit_triton(nest, SM90)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous() + 1


def expression(rng: random.Random, depth: int) -> sympy.Expr:
    """Of two loop variables and two sizes; parts of it may be negative."""
    if depth == 0:
        return rng.choice((K0, K0, K1, S0, S1, sympy.Integer(rng.randrange(6))))

    def part() -> sympy.Expr:
        return expression(rng, depth - 1)

    match rng.randrange(8):
        case 0 | 1:
            return part() + part()
        case 2:
            return part() - part()
        case 3:
            return rng.choice((Max, Min))(part(), part())
        case 4 | 5:
            return part() * rng.choice((2, 3, S0, S1, FloorDiv(K1, 2), FloorDiv(K1 - 4, 2)))
        case 6:
            return rng.choice((FloorDiv, CeilDiv))(part(), rng.choice((2, 3, S1)))
        case _:
            return ModularIndexing(expression(rng, 0), rng.choice((1, 2)), rng.choice((2, 5, S1)))


def divided(expr: sympy.Expr) -> Iterator[sympy.Expr]:
    """What has to be exact for an expression to be: itself, and what is divided or compared in it."""
    yield expr
    for e in sympy.preorder_traversal(expr):
        if not (e.is_Add or e.is_Mul or e.is_Pow):
            yield from e.args


@pytest.mark.parametrize("seed", range(3))
def test_no_index_exceeds_the_reach_in_any_lane(seed: int) -> None:
    rng, found, close = random.Random(seed), 0, 0
    for _ in range(150):
        extents = [rng.choice((S0, S0 * S1, CeilDiv(S0, 2), FloorDiv(S0 + 3, 4) * S1)) for _ in range(2)]
        ranges = Ranges(SymbolTable((Size(S0, rng.randrange(3)), Size(S1, 1))))
        for var, extent in zip((K0, K1), extents, strict=True):
            ranges.loop(var, extent)
        index = sympy.expand(expression(rng, rng.randrange(1, 4)))
        reach = reach_of([index], ranges)
        if reach is None:
            continue
        found += 1
        parts = {*divided(index)}
        for n, m in ((2, 1), (3, 2), (5, 3)):
            sizes = {S0: sympy.Integer(n), S1: sympy.Integer(m)}
            most = int(reach.xreplace(sizes))
            largest = 0
            for a, b in itertools.product(*(range(int(e.xreplace(sizes))) for e in extents)):
                at = {**sizes, K0: sympy.Integer(a), K1: sympy.Integer(b)}
                largest = max(largest, *(abs(int(p.xreplace(at))) for p in parts))
            assert largest <= most, f"{index} over {extents} is {largest} at {sizes}, not at most {reach} = {most}"
            close += most <= 2 * largest + 8
    # A bound that is far above what it bounds would send tensors of ordinary sizes to the longer form.
    assert found > 100 and close > 1.5 * found


@pytest.mark.parametrize(
    ("fn", "shape", "sizes", "overhang"),
    [(gelu, (30, 20), (1 << 16, 1 << 15), 0), (softmax, (30, 20), (1 << 16, 1 << 15), 0),
     (turned, (30, 20, 50), (1 << 6, 1 << 10, 1 << 15), 1 << 23)],
)  # fmt: skip
def test_the_reach_of_a_kernel_is_its_last_element_and_the_rest_of_a_tile(
    fn: Callable[..., Any], shape: tuple[int, ...], sizes: tuple[int, ...], overhang: int
) -> None:
    source = source_of(fn, *shape)
    assert source.option("index") == "i32" and NARROW in source.text and "tl.int64" not in source.text
    reach = reach_function(source)(*sizes)
    assert 1 << 31 <= reach <= (1 << 31) + 1024 + overhang
    # Half as much is far from the border, whatever hangs over.
    assert reach_function(source)(sizes[0] // 2, *sizes[1:]) <= INDEX_MAX


def test_strides_reach_farther_than_elements() -> None:
    """A view with huge strides has few elements far apart."""

    def fn(x: Tensor) -> Tensor:
        return x * 2

    (nest,) = nests(fn, torch.zeros(100, 50).t())
    plain = reach_function(emit_triton(nest, SM90))
    buffer = nest.params[0]
    strides = tuple(s * (1 << 20) for s in buffer.strides)
    far = replace(nest, params=(replace(buffer, strides=strides), *nest.params[1:]))
    source = emit_triton(far, SM90)
    assert source.reach is not None
    reach = reach_function(source)
    assert plain(100, 50) < 1 << 14 and reach(100, 50) >= 4999 << 20 > INDEX_MAX
    assert reach(10, 5) <= INDEX_MAX


def test_what_never_fits_has_one_form_alone() -> None:
    (nest,) = nests(gelu, torch.zeros(100, 50))
    buffer = nest.params[0]
    strides = tuple(s * (1 << 31) for s in buffer.strides)
    source = emit_triton(replace(nest, params=(replace(buffer, strides=strides), *nest.params[1:])), SM90)
    assert source.reach is None and source.option("index") == "i64" and WIDE in source.text


def test_a_quotient_of_what_is_too_large_does_not_fit() -> None:
    ranges = Ranges(SymbolTable())
    ranges.loop(K0, sympy.Integer(1 << 20))
    assert ranges.fits_int32(K0 * 1024) and not ranges.fits_int32(FloorDiv(K0 * 4096 + 5 * K0, 3001))


@pytest.mark.parametrize("fn", [softmax, gelu])
def test_short_indices_spare_instructions_and_registers(fn: Callable[..., Any]) -> None:
    source = source_of(fn, 30, 20)
    narrow, wide = (compile_triton(s, SM90) for s in (source, wide_source(source)))
    assert narrow.arguments == ("ptr", "ptr", "i32", "i32") and wide.arguments == ("ptr", "ptr", "i64", "i64")
    registers = [resource_report(b).registers for b in (narrow, wide)]
    instructions = [len(dict(elf_sections(b.code))[f".text.{b.name}"]) // 16 for b in (narrow, wide)]
    # Sections of instructions are padded to the same length where they differ by a few.
    assert registers[0] < registers[1] and instructions[0] <= instructions[1], (registers, instructions)


def test_a_fraction_inside_of_a_term_leaves_open_what_exceeds_what() -> None:
    reach = _Reach(Ranges(SymbolTable((Size(S0, 2), Size(S1, 1)))))
    larger = Max(-FloorDiv(5 - FloorDiv(S0, 2), 4), FloorDiv(S0 + 2, 4))
    assert reach._exceeds(S0 * S1, FloorDiv(S0, 2))
    assert not reach._exceeds(S0 * S1, S0 * S1 + S1 * FloorDiv(S0, 2) * larger)
