"""``torch_mlc.compile`` runs modules that were made, printed and edited by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.compiling.kernels import KernelError, emit
from torch_mlc.dynamo_backend.entry.modules import CompiledModule, ModuleError
from torch_mlc.dynamo_backend.verify.verify_graph import WrongResultError
from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.graph.constants import digest_of
from torch_mlc.ir.graph.graph import CallTensor, Graph, IRModule, Library
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.passes import PassError
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import ParseError
from torch_mlc.runtime.compile.arguments import CallError
from torch_mlc.runtime.settings.options import OptionError
from torch_mlc.scheduler.functions.lower import lower_to_loops

SOFTMAX = """
module(main='main')

@graph
def main(x: float32[4, 6], y: float32[6]):
    z, = call('scaled', [float32[4, 6]], [x])
    w, = library('aten::mul.Tensor', [float32[4, 6]], (ref('z'), ref('y')), 'by hand')
    return (w,)

@function
def scaled(in0: float32[4, 6], out0: output(float32[4, 6])):
    i0 = row(4)
    r0 = inner(6)
    t0, = reduce(max, rows, inner, (in0[i0, r0],))
    t1 = compute(points, exp(sub(in0[i0, r0], t0[i0])))
    t2, = reduce(sum, rows, inner, (t1[i0, r0],))
    out0[i0, r0] = t3
"""
SCALED = SOFTMAX.replace("    out0[", "    t3 = compute(points, div(t1[i0, r0], t2[i0]))\n    out0[")


DOUBLED = """
@function
def doubled(in0: float32[4, 6]):
    i0 = row(4)
    i1 = row(6)
    t0 = compute(rows, add(in0[i0, i1], in0[i0, i1]))
    in0[i0, i1] = t0
"""


def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(x @ w, -1) * 2, x.sin().sum(0)


def imported(fn: Callable[..., object], *inputs: Tensor, mode: str = "fake") -> IRModule:
    return torch_mlc.from_fx(make_fx(fn, tracing_mode=mode)(*inputs))


def compiled(what: object, **options: object) -> CompiledModule:
    found = torch_mlc.compile(what, **options)  # type: ignore[arg-type]
    assert isinstance(found, CompiledModule)
    return found


def test_a_graph_of_torch_runs_fused_and_read_back() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    module = imported(model, x, w)
    assert torch_mlc.parse(torch_mlc.show(module)) == module
    fused = compiled(module)
    assert any(isinstance(n, CallTensor) for n in fused.module.graph.nodes)
    assert torch_mlc.parse(fused.show()) == fused.module
    again = compiled(fused.show())
    assert again.module == fused.module
    for call in (fused, again):
        for found, wanted in zip(call(x, w), model(x, w), strict=True):
            torch.testing.assert_close(found, wanted)


def test_edited_text_is_what_runs() -> None:
    x, y = torch.randn(4, 6), torch.randn(6)
    torch.testing.assert_close(compiled(SCALED)(x, y), torch.softmax(x, -1) * y)
    edited = SCALED.replace("div(t1[i0, r0], t2[i0])", "sub(t1[i0, r0], t2[i0])")
    e = (x - x.amax(-1, keepdim=True)).exp()
    torch.testing.assert_close(compiled(edited)(x, y), (e - e.sum(-1, keepdim=True)) * y)


def test_sizes_follow_from_shapes() -> None:
    fused = compiled(imported(model, torch.randn(4, 8), torch.randn(8, 6), mode="symbolic"))
    for n, k, m in ((4, 8, 6), (3, 5, 7)):
        x, w = torch.randn(n, k), torch.randn(k, m)
        for found, wanted in zip(fused(x, w), model(x, w), strict=True):
            torch.testing.assert_close(found, wanted)
    with pytest.raises(CallError, match=r"dimension 0 of w_1 has to be .* = 8, the argument's is 9"):
        fused(torch.randn(4, 8), torch.randn(9, 6))


def test_a_graph_of_calls_and_of_nodes() -> None:
    text = SCALED.replace("return (w,)", "v = compute(float32[4, 6], lambda i0, i1: exp(z[i0, i1]))\n    return (w, v)")
    fused = compiled(text)
    assert len(fused.module.functions) == 3 and "scaled" in fused.module.functions
    x, y = torch.randn(4, 6), torch.randn(6)
    torch.testing.assert_close(fused(x, y)[1], torch.softmax(x, -1).exp())


def test_tensors_of_the_model() -> None:
    large, small = torch.randn(8, 9), torch.tensor([1.5, -0.0, 3.0])[:, None].expand(3, 2)

    def reads(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ large, y * small

    inputs = torch.randn(2, 8), torch.randn(3, 2)
    module = imported(reads, *inputs, mode="real")
    text = torch_mlc.show(module)
    assert torch_mlc.parse(text) == module and "[[1.5, 1.5], [-0.0, -0.0], [3.0, 3.0]]" in text
    (name,) = [n for n, c in module.graph.constants.items() if c.value.numel() > 32]
    call = compiled(text, constants={name: large.t().contiguous().t()})
    assert torch_mlc.parse(call.show()) == call.module
    for found, wanted in zip(call(*inputs), reads(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)
    for given, says in (
        ({}, f"the constant '{name}' of main is not in the text: give float32 of .8, 9."),
        ({name: large + 1}, f"the constant '{name}' of main has other elements than those that the text tells of"),
        ({name: large.half()}, r"is float32 of \[8, 9\], not torch.float16 of \[8, 9\]"),
        ({"weight": large}, f"main has no constant 'weight'; it has .*{name}"),
    ):
        with pytest.raises(ModuleError, match=says):
            torch_mlc.compile(text, constants=given)
    text = text.replace(f"sha256='{digest_of(large)}'", "")
    found = compiled(text, constants={name: large + 1})(*inputs)
    torch.testing.assert_close(found[0], inputs[0] @ (large + 1))
    other = text.replace(f"constant('{name}', float32[8, 9]", f"constant('{name}', float32[9, 8]")
    with pytest.raises(VerifyError, match=f"constant '{name}' is not of the type that {name} has"):
        torch_mlc.compile(other, constants={name: large.t()})


def test_what_a_converter_says_of_a_call_is_in_the_text() -> None:
    text = SCALED.replace("'by hand')", "'by hand', refused)").replace("    return (w,)", "    return (x,)")
    call = compiled(text)
    assert [n.refused for n in call.module.graph.nodes if isinstance(n, Library)] == [True]
    assert torch_mlc.parse(call.show()) == call.module and ", refused)" in call.show()


def loops(text: str = SCALED, target: str | None = None, **options: object) -> str:
    """A module whose functions are the loops that they are compiled with."""
    return torch_mlc.show(compiled(text, target=target, **options).scheduled())


def test_loops_are_compiled_as_they_stand() -> None:
    text, (x, y) = loops(), (torch.randn(4, 6), torch.randn(6))
    assert "@nest" in text and "@function" not in text and "vectorized(6)" in text
    call = compiled(text, options={"verify": 1})
    assert torch_mlc.parse(text) == call.module == torch_mlc.parse(call.show()) == call.scheduled()
    torch.testing.assert_close(call(x, y), torch.softmax(x, -1) * y)
    other = text.replace("vectorized(6)", "serial(6)").replace("exp(", "exp2(")
    call = compiled(other)
    source = call.kernels["scaled"].source
    assert source is not None and "<" not in source.text.partition("define void @scaled")[2].partition("\n}")[0]
    e = (x - x.amax(-1, keepdim=True)).exp2()
    torch.testing.assert_close(call(x, y), e / e.sum(-1, keepdim=True) * y)


def test_loops_beside_functions_and_nodes() -> None:
    """New functions get names beside those of loops and functions that were there."""
    text = loops(SCALED.replace("scaled", "fused_exp_0"))
    text = text.replace("return (w,)", "v = compute(float32[4, 6], lambda i0, i1: exp(z[i0, i1]))\n    return (w, v)")
    call = compiled(text, options={"verify": 1})
    assert torch_mlc.parse(call.show()) == call.module and len(call.kernels) == 2
    assert call.module.functions["fused_exp_0"] == torch_mlc.parse(text).functions["fused_exp_0"]
    x, y = torch.randn(4, 6), torch.randn(6)
    torch.testing.assert_close(call(x, y)[1], torch.softmax(x, -1).exp())


def test_loops_that_write_over_what_they_are_given() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sort()[0].relu()

    x, w = torch.randn(64, 33), torch.randn(33, 65)
    call = compiled(torch_mlc.show(compiled(imported(model, x, w)).scheduled()), options={"verify": 1})
    torch.testing.assert_close(call(x, w), model(x, w))


def test_loops_of_any_size() -> None:
    fused = compiled(imported(model, torch.randn(4, 8), torch.randn(8, 6), mode="symbolic"))
    call = compiled(torch_mlc.show(fused.scheduled()), options={"verify": 1})
    for n, k, m in ((4, 8, 6), (3, 5, 7)):
        x, w = torch.randn(n, k), torch.randn(k, m)
        for found, wanted in zip(call(x, w), model(x, w), strict=True):
            torch.testing.assert_close(found, wanted)


def test_loops_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    text = loops(SCALED.replace("@graph", "@graph(device='cuda')"), "cuda:sm_90")
    assert "block_x(4)" in text and "'num_warps': 1" in text
    call = compiled(text.replace("'num_warps': 1", "'num_warps': 2"), target="cuda:sm_90", options={"verify": 1})
    source = call.kernels["scaled"].source
    assert source is not None and ("num_warps", 2) in source.meta and call.kernels["scaled"].target.arch == "sm_90"
    with pytest.raises(KernelError, match=r"the nest scaled does not compile for cuda:sm_90: .* is parallel"):
        torch_mlc.compile(text.replace("block_x(4)", "parallel(4)"), "cuda:sm_90")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[float32[4, 6]], [x]", "[float32[4, 6]], [y]", "in0 of scaled: a shape of [6], where [4, 6] is wanted"),
        ("in0: float32[4, 6], out0: float32[4, 6]", "out0: float32[4, 6], in0: float32[4, 6]",
         "the parameters of scaled are not its inputs and then its outputs"),
        ("vectorized(6)", "vectorized(7)", "axis r0 of extent 6 is bound to 0..6"),
        ("outputs=['out0']", "outputs=['out1']", "output 'out1' is no parameter"),
    ],
)  # fmt: skip
def test_loops_that_are_not_sound(old: str, new: str, says: str) -> None:
    text = loops()
    assert old in text
    with pytest.raises(VerifyError) as caught:
        torch_mlc.compile(text.replace(old, new))
    assert says in str(caught.value)


def test_wrong_loops_are_found_by_running_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel of loops is compared with under ``verify`` is what the loops mean."""

    def other(nest: LoopNest, target: Target) -> KernelSource:
        return emit(torch_mlc.parse(torch_mlc.show(nest).replace("exp(", "exp2(")), target)

    monkeypatch.setattr(kernels, "emit", other)
    with pytest.raises(WrongResultError, match="kernel scaled differs from its definition"):
        torch_mlc.compile(loops(options={"cache": False}), options={"verify": 1, "cache": False})


def test_steps_are_dumped_and_recorded(tmp_path: Path) -> None:
    text = SCALED.replace("return (w,)", "v = compute(float32[4, 6], lambda i0, i1: exp(z[i0, i1]))\n    return (w, v)")
    call = compiled(text, options={"dump_dir": str(tmp_path), "verify": 1})
    files = {p.name.partition("_")[2].partition(".")[0]: p for p in (tmp_path / "main").iterdir()}
    assert {"input", "partition", "name_by_hand", "emit_scaled", "host_code"} <= files.keys()
    assert torch_mlc.parse(files["name_by_hand"].read_text()) == call.module
    steps = [s.name for s in call.steps]
    assert steps.index("partition") < steps.index("name_by_hand") < steps.index("emit") < steps.index("plan_memory")


def test_a_pass_that_breaks_a_module_is_named() -> None:
    def break_it(graph: Graph) -> Graph:
        return replace(graph, outputs=("nothing",))

    module = imported(model, torch.randn(4, 8), torch.randn(8, 6))
    says = r"pass break_it: .*the output 'nothing' is not defined"
    with torch_mlc.register_pass(break_it, level="graph"), pytest.raises(PassError, match=says):
        torch_mlc.compile(module, options={"verify": 1})


def test_a_function_alone() -> None:
    text = SCALED[SCALED.index("@function") :]
    x = torch.randn(4, 6)
    torch.testing.assert_close(compiled(text)(x), torch.softmax(x, -1))
    wanted = x * 2
    torch.testing.assert_close(compiled(DOUBLED)(x), wanted)
    torch.testing.assert_close(x, wanted)


def test_a_call_says_what_is_written_over() -> None:
    text = SCALED[: SCALED.index("@function")].replace("'scaled'", "'doubled'") + DOUBLED
    says = "doubled writes over in0, and the call does not say that x is written"
    with pytest.raises(VerifyError, match=says):
        torch_mlc.compile(text)
    nest = torch_mlc.show(lower_to_loops(torch_mlc.parse(DOUBLED)))
    with pytest.raises(VerifyError, match=says):
        torch_mlc.compile(text[: text.index("@function")] + nest)


def test_memory_that_is_not_aligned() -> None:
    text = SCALED[SCALED.index("@function") :].replace("float32[4, 6]", "tensor(float32, [4, 6], align=16)")
    x = torch.randn(25)[1:].view(4, 6)
    torch.testing.assert_close(compiled(text)(x), torch.softmax(x, -1))


def test_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    text = SCALED.replace("@graph", "@graph(device='cuda')")
    fused = compiled(text, target="cuda:sm_90")
    assert [b.target.arch for b in fused.kernels.values()] == ["sm_90"]
    with pytest.raises(CallError, match="x has to be on cuda; the argument is on cpu"):
        fused(torch.randn(4, 6), torch.randn(6))


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((torch.zeros(4, 6),), r"main takes 2 inputs \(x: float32\[4, 6\], y: float32\[6\]\), 1 were given"),
        ((torch.zeros(4, 6).double(), torch.zeros(6)), "x is of torch.float32, the argument of torch.float64"),
        ((torch.zeros(4, 7), torch.zeros(6)), "dimension 1 of x has to be 6, the argument's is 7"),
        ((torch.zeros(6, 4).t(), torch.zeros(6)), "stride 0 of x has to be 6, the argument's is 1"),
        ((torch.zeros(4, 6, device="meta"), torch.zeros(6)), "x has to be on cpu; the argument is on meta"),
        (([1.0], torch.zeros(6)), "x is a strided tensor, not list"),
    ],
)
def test_arguments_that_do_not_fit(inputs: tuple[object, ...], says: str) -> None:
    with pytest.raises(CallError, match=says):
        compiled(SCALED)(*inputs)  # type: ignore[arg-type]


def test_a_size_that_the_graph_does_not_have() -> None:
    with pytest.raises(CallError, match="main has no size s0; its sizes are none"):
        compiled(SCALED)(torch.zeros(4, 6), torch.zeros(6), s0=3)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", "no stage makes 't3'; there are t0, t1, t2"),
        ("[float32[4, 6]], [x])", "[float32[4, 6]], [y])", "in0 of scaled: a shape of [6], where [4, 6] is wanted"),
        ("[float32[4, 6]], [x])", "[bfloat16[4, 6]], [x])", "z as out0 of scaled: bfloat16, where float32 is wanted"),
        ("[float32[4, 6]], [x])", "[float32[4, 6]], [x, y])", "scaled has 1 arguments and 1 results, here 2 and 1"),
        ("[float32[4, 6]], [x])", "[float32[4, 6]], [x], sizes=[4])", "scaled has the sizes none, here are 1"),
        ("call('scaled'", "call('scale'", "the module has no function 'scale'; it has main, scaled"),
        ("[float32[4, 6]], [x])", "[tensor(float32, [4, 6], device='cuda')], [x])",
         "scaled is given tensors of cpu and cuda"),
    ],
)  # fmt: skip
def test_modules_that_are_not_sound(old: str, new: str, says: str) -> None:
    text = (SCALED if old else SOFTMAX).replace(old, new)
    with pytest.raises(VerifyError) as caught:
        torch_mlc.compile(text)
    assert says in str(caught.value)


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(ParseError, match="expected a function under @graph, @function or @nest"):
        torch_mlc.compile("def f(): pass")
    with pytest.raises(OptionError, match="numerics"):
        torch_mlc.compile(SCALED, options={"numeric": "fast"})
    nest = torch_mlc.show(lower_to_loops(compiled(SCALED).kernels["scaled"].definition))
    with pytest.raises(ModuleError, match="options and constants are for graphs"):
        torch_mlc.compile(nest, options={"numerics": "eager"})
    graph = "@graph\ndef scaled(x: float32[4, 6]):\n    return (x,)\n"
    with pytest.raises(ModuleError, match="main calls scaled, which is a graph"):
        torch_mlc.compile(SCALED[: SCALED.index("@function")] + graph)
