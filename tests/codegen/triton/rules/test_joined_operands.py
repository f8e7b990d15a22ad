"""Products of an operand that is joined from several tensors, interpreted, against products in float64."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.facts.contraction import Decision, Products
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import eliminate_dead, simplify_algebra, widen
from torch_mlc.scheduler.passes.products.decompose_contractions import decompose_product
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.contraction import find_contraction, joined_axis
from torch_mlc.scheduler.rules.gpu.product_tiles import fitting, parts_at_once

sys.path.insert(0, str(Path(__file__).parents[1]))
from contractions import SM90, scheduled

SM80 = gpu_target("cuda:sm_80")


class Joined(torch.nn.Module):
    """``cat(parts, 1) @ w``, or with ``turned`` ``w.t() @ cat(parts, 0)``: the joined operand is on the right."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned

    def forward(self, w: Tensor, *parts: Tensor) -> Tensor:
        return w.t() @ torch.cat(parts, 0) if self.turned else torch.cat(parts, 1) @ w


def nest_of(model: Joined, w: Tensor, *parts: Tensor) -> LoopNest:
    """The loops of a product that reads the parts, the one kernel of its graph."""
    made, inputs = on_fake_device(model, (w, *parts), "cuda")
    graph = widen(simplify_algebra(import_graph(capture(made, inputs)[0])))
    products, taken = Products(graph), {n for node in graph.nodes for n in node.names}
    nodes = []
    for node in graph.nodes:
        p = products.product(node)
        inlined = () if p is None else (p.a.prologue is not None, p.b.prologue is not None)
        nodes += [node] if p is None else decompose_product(p, Decision(True, "asked for", inlined), graph, taken)
    (function,) = fuse(eliminate_dead(replace(graph, nodes=tuple(nodes)))).functions.values()
    return lower_to_loops(function)


def tensors(depths: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype, turned: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(depths) + rows)
    shapes = [(sum(depths), columns), *((k, rows) if turned else (rows, k) for k in depths)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def check(interpreter, nest: LoopNest, model: Joined, given: list[Tensor]) -> str:
    """The kernel gives the product in float64, up to the rounding of its result; its text."""
    source = emit_triton(nest, SM90)
    w, *parts = given
    left = [*parts, w] if not model.turned else [w, *parts]
    names = [b for b in nest.params if b.name not in nest.outputs]
    if [tuple(map(int, b.shape)) for b in names] != [tuple(t.shape) for t in left]:
        left = [*parts, w]
    assert [tuple(map(int, b.shape)) for b in names] == [tuple(t.shape) for t in left]
    arrays = {b.name: t.float().numpy().astype(b.dtype.numpy) for b, t in zip(names, left, strict=True)}
    (out,) = nest.outputs
    found = interpreter.run(source, nest.outputs, arrays, {})[out].astype(np.float64)
    wanted = model(*(t.double() for t in given)).numpy()
    unlike = np.isnan(found) != np.isnan(wanted)
    assert not unlike.any(), source.text
    finite = np.isfinite(wanted)
    assert (found[~finite & ~np.isnan(wanted)] == wanted[~finite & ~np.isnan(wanted)]).all()
    bound = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-3}[w.dtype]
    assert np.abs(found[finite] - wanted[finite]).max() <= bound * np.abs(wanted[finite]).max(), source.text
    return source.text


DEPTHS = [(128, 128), (128, 128, 128), (128, 256, 128), (384, 128), (130, 62)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("depths", DEPTHS)
def test_parts_are_read_where_they_are(interpreter, depths, turned, dtype):
    model, given = Joined(turned), tensors(depths, 37, 50, dtype, turned)
    schedule = default_schedule(nest_of(model, *given), SM90)
    assert schedule.rule == "gpu_contraction"
    check(interpreter, schedule.nest, model, given)


@pytest.mark.parametrize("target", [SM90, SM80], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("depths", DEPTHS[:4])
def test_no_position_is_compared_and_no_conversion_made(interpreter, depths, target):
    given = tensors(depths, 64, 64, torch.bfloat16)
    nest = default_schedule(nest_of(Joined(), *given), target).nest
    text = check(interpreter, nest, Joined(), given)
    loops = text.partition("tl.range(")[2].rpartition("tl.dot(")[0]
    assert "tl.where(" not in text and ".to(" not in loops and "mask" not in loops, text


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("depths", DEPTHS[:4])
def test_descriptors_copy_the_parts_of_programs_that_last(interpreter, depths, persistent):
    given = tensors(depths, 80, 48, torch.bfloat16)
    nest = nest_of(Joined(), *given)
    params = {"descriptors": True, "persistent": persistent, "tile": "16x16x16/4/2"}
    text = check(interpreter, scheduled(nest, replace(SM90, cores=1), **params), Joined(), given)
    assert len(re.findall(r"in\d_map0 = tl.make_tensor_descriptor", text)) == len(depths) + 1
    assert "tl.load(" not in text


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row(interpreter, bad):
    given = tensors((128, 128, 128), 32, 48, torch.bfloat16)
    given[2][5, 17] = bad
    nest = default_schedule(nest_of(Joined(), *given), SM90).nest
    check(interpreter, nest, Joined(), given)


def test_a_step_has_all_parts_where_two_steps_fit():
    """Then the loop over steps is one, and is flattened with the loop over tiles."""
    text = {}
    for depths in ((768, 768, 768), (512, 512, 512, 512)):
        given = [torch.empty(s, dtype=torch.bfloat16, device="meta")
                 for s in ((sum(depths), 768), *((8192, k) for k in depths))]  # fmt: skip
        nest = nest_of(Joined(), *given)
        c = find_contraction(nest)
        assert c is not None and joined_axis(c) is not None
        (shape, *_) = fitting(nest, SM90, c)
        text[len(depths)] = emit_triton(default_schedule(nest, SM90).nest, SM90).text
        assert parts_at_once(nest, SM90, c, shape) == (3 if len(depths) == 3 else 1)
    assert text[3].count("tl.range(") == 2 and "flatten=True" in text[3] and text[3].count("tl.dot(") == 3
    assert text[4].count("tl.range(") == 4 and "flatten=True" not in text[4]
