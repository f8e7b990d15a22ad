"""Calls of regions are a loop of the host program, which does what their calls written out do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_mlc
from torch_mlc.codegen.host.build import build_host_program
from torch_mlc.codegen.host.memory.liveness import peaks_of, storages
from torch_mlc.codegen.host.memory.plan_memory import plan_memory
from torch_mlc.codegen.host.python.text import print_host
from torch_mlc.codegen.host.steps.kernel_use import KernelUse
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.codegen.host.steps.step import CheckLayout, Repeat
from torch_mlc.codegen.host.steps.write_out_loops import write_out_loops
from torch_mlc.codegen.host.verify import verify_host_program
from torch_mlc.ir.graph.graph import Graph, IRModule
from torch_mlc.ir.graph.regions import write_out_regions
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify

F = "float32[64, 8]"
FUNCTIONS = f"""
@function
def scaled(in0: {F}, in1: float32[8], in2: float32[8], out0: output({F})):
    i0 = row(64)
    r0 = inner(8)
    t0 = compute(points, add(mul(in0[i0, r0], in1[r0]), in2[r0]))
    out0[i0, r0] = t0

@function
def minus(in0: {F}, in1: {F}, out0: output({F})):
    i0 = row(64)
    r0 = inner(8)
    t0 = compute(points, sub(in0[i0, r0], in1[i0, r0]))
    out0[i0, r0] = t0
"""
GIVEN = f"x: {F}, w0: float32[8], w1: float32[8], w2: float32[8], m: float32[8]"
# One stream of memory that each call makes anew.
STREAM = f"""
    s, = call("scaled", [{F}], [x, w0, m])
    @graph
    def layer(a: {F}, w: float32[8], m: float32[8]):
        b, = call("scaled", [{F}], [a, w, m])
        c, = call("minus", [{F}], [b, a])
        return (c,)
    t, = repeat(layer, 2, [s], [[w1, w2]], [m])
    y, = call("scaled", [{F}], [t, m, m])
    return (y,)
"""
# What is before the calls, what is kept of each and what each was given leave the program, and the result of a product
# is added to in place.
KEPT = f"""
    s, = call("scaled", [{F}], [x, m, m])
    @graph
    def layer(a: {F}, before: {F}, w: float32[8], m: float32[8]):
        b, = call("scaled", [{F}], [a, w, m])
        v = view(tensor(float32, [8, 64], strides=[1, 8]), b, lambda i0, i1: (i1, i0))
        c, = call("minus", [{F}], [b, before])
        return (c, a, v)
    t, u, v0, v1, v2 = repeat(layer, 3, [s, x], [[w0, w1, w2]], [m])
    y, = call("minus", [{F}], [t, u])
    return (v1, y, w0, v0, v2, w1, s, w2)
"""
# Two regions whose names are the same, and those of the graph, the second of which begins with what the first gave.
TWICE = f"""
    @graph
    def layer(a: {F}, w: float32[8], m: float32[8]):
        x, = call("scaled", [{F}], [a, w, m])
        return (x, x)
    t, x0, x1 = repeat(layer, 2, [x], [[w0, w1]], [m])
    @graph
    def layer(a: {F}, m: float32[8]):
        x, = call("scaled", [{F}], [a, m, m])
        return (x,)
    u, = repeat(layer, 4, [t], [], [m])
    y, = call("minus", [{F}], [u, t])
    return (y, x1, x0, x)
"""
# What the last call hands on is kept, too: nobody may take over its memory.
REUSED = f"""
    s, = call("scaled", [{F}], [x, m, m])
    @graph
    def layer(a: {F}, w: float32[8]):
        b, = call("scaled", [{F}], [a, w, w])
        return (b, b)
    t, b0, b1 = repeat(layer, 2, [s], [[w0, w1]])
    y, = call("minus", [{F}], [t, x])
    z, = call("scaled", [{F}], [y, w2, m])
    return (z, b0, b1)
"""
USES = {n: KernelUse(f"{n}_", ()) for n in ("scaled", "minus")}
BODIES = {"stream": STREAM, "kept": KEPT, "twice": TWICE, "reused": REUSED}


def module_of(body: str) -> IRModule:
    module = parse(f"module(main='main')\n\n@graph\ndef main({GIVEN}):{body}{FUNCTIONS}")
    assert isinstance(module, IRModule)
    verify(module)
    return module


def program_of(graph: Graph) -> Any:
    return build_host_program(graph, USES)


def lines(body: str) -> list[str]:
    return print_host(resolve(program_of(module_of(body).graph))).text.splitlines()


def test_a_loop_as_text() -> None:
    assert [line[4:] for line in lines(STREAM)[2:] if "with_memory_" not in line] == [
        "w1_each = args[3:1:-1]",
        "x, w0, m = [args[k] for k in (0, 1, 4)]",
        "args.clear()",
        "s = empty_cpu_((64, 8), (8, 1), torch.float32)",
        "scaled_(x.data_ptr(), w0.data_ptr(), m.data_ptr(), s.data_ptr())",
        "del x, w0",
        "c = s",
        "for _ in range(2):  # layers that are alike",
        "    s = c",
        "    del c",
        "    w1 = w1_each.pop()",
        "    b = empty_cpu_((64, 8), (8, 1), torch.float32)",
        "    scaled_(s.data_ptr(), w1.data_ptr(), m.data_ptr(), b.data_ptr())",
        "    del w1",
        "    c = empty_cpu_((64, 8), (8, 1), torch.float32)",
        "    minus_(b.data_ptr(), s.data_ptr(), c.data_ptr())",
        "    del b, s",
        "y = empty_cpu_((64, 8), (8, 1), torch.float32)",
        "scaled_(c.data_ptr(), m.data_ptr(), m.data_ptr(), y.data_ptr())",
        "del c, m",
        "return (y,)",
    ]


def test_the_layout_of_what_a_call_has_for_itself_is_looked_at_in_the_loop() -> None:
    program = build_host_program(module_of(STREAM).graph, USES, checked=("w1", "m"))
    (loop,) = (s for s in program.steps if isinstance(s, Repeat))
    assert [s.name for s in loop.steps if isinstance(s, CheckLayout)] == ["w1"]
    assert [s.name for s in program.steps if isinstance(s, CheckLayout)] == ["m"]
    verify_host_program(write_out_loops(program))


@pytest.mark.parametrize(
    "library",
    [
        f"library('aten::as_strided_scatter.default', [{F}], (ref('m'), ref('a'), (64, 8), (8, 1)), '')",
        f"library('_c10d_functional::all_reduce.default', [{F}], (ref('a'), 'sum', '0'), '')",
    ],
    ids=["whole storages", "what another call waits for"],
)
def test_what_is_no_loop_is_written_out(library: str) -> None:
    body = STREAM.replace("        c, =", f"        d, = {library}\n        c, =")
    program = program_of(module_of(body).graph)
    verify_host_program(program)
    assert not any(isinstance(s, Repeat) for s in program.steps) and program.library_calls == 2


@pytest.mark.parametrize("name", BODIES)
def test_memory(name: str) -> None:
    """A loop has no higher peak than its calls written out, and each form of it is sound, as an arena has it too."""
    graph = module_of(BODIES[name]).graph
    looped, written = program_of(graph), program_of(write_out_regions(graph))
    assert any(isinstance(s, Repeat) for s in looped.steps) and looped.launches == written.launches
    for program in (looped, plan_memory(looped)):
        verify_host_program(program)
        verify_host_program(resolve(program))
        verify_host_program(write_out_loops(program))
    assert peaks_of(storages(write_out_loops(looped))) == peaks_of(storages(written))


@pytest.mark.parametrize("host", ["python", "native"])
@pytest.mark.parametrize("name", BODIES)
def test_what_it_computes(name: str, host: str) -> None:
    module = module_of(BODIES[name])
    graph = write_out_regions(module.graph)
    options = {"host_program": host, "cache": False}
    given = [torch.randn(64, 8), *(torch.randn(8) for _ in range(4))]
    looped, plain = (
        torch_mlc.compile(m, options=options) for m in (module, IRModule({**module.functions, "main": graph}, "main"))
    )
    assert "for _ in range(" in looped.host.told.text and "for _ in range(" not in plain.host.told.text
    for _ in range(3):  # later calls are machine code
        for mine, own in zip(looped(*given), plain(*given), strict=True):
            assert mine.stride() == own.stride() and torch.equal(mine, own)
