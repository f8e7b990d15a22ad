"""``torch_mlc.compile`` runs modules that were made, printed and edited by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from torch_mlc.dynamo_backend.entry.modules import CompiledModule, ModuleError
from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.graph.constants import digest_of
from torch_mlc.ir.graph.graph import CallTensor, IRModule, Library
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


def test_a_function_alone() -> None:
    text = SCALED[SCALED.index("@function") :]
    x = torch.randn(4, 6)
    torch.testing.assert_close(compiled(text)(x), torch.softmax(x, -1))
    over = """
@function
def doubled(in0: float32[4, 6]):
    i0 = row(4)
    i1 = row(6)
    t0 = compute(rows, add(in0[i0, i1], in0[i0, i1]))
    in0[i0, i1] = t0
"""
    wanted = x * 2
    torch.testing.assert_close(compiled(over)(x), wanted)
    torch.testing.assert_close(x, wanted)


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
        ("in0: float32[4, 6], out0: output(float32[4, 6])", "in0: float32[4, 6]",
         "scaled writes over in0, and the call does not say that x is written"),
    ],
)  # fmt: skip
def test_modules_that_are_not_sound(old: str, new: str, says: str) -> None:
    text = (SCALED if old else SOFTMAX).replace(old, new)
    if "writes over" in says:
        text = text.replace("    out0[", "    in0[")
    with pytest.raises(VerifyError) as caught:
        torch_mlc.compile(text)
    assert says in str(caught.value)


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(ParseError, match="expected a function under @graph, @function or @nest"):
        torch_mlc.compile("def f(): pass")
    with pytest.raises(OptionError, match="numerics"):
        torch_mlc.compile(SCALED, options={"numeric": "fast"})
    nest = torch_mlc.show(lower_to_loops(compiled(SCALED).kernels["scaled"].function))
    with pytest.raises(ModuleError, match="options and constants are for graphs"):
        torch_mlc.compile(nest, options={"numerics": "eager"})
    calls = SCALED[: SCALED.index("@function")] + nest
    with pytest.raises(ModuleError, match="main calls scaled, which is a nest"):
        torch_mlc.compile(calls)
